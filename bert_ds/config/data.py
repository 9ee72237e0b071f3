"""Which text a run reads and how samples are drawn from it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from bert_ds.errors import Problem

TOKENIZER_TYPES = ("BertWordPieceLowerCase", "BertWordPieceCase")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Data, vocabulary and masking. Defaults are those of Megatron-LM's BERT."""

    data_path: tuple[str, ...] = ("data/corpus_text_sentence",)
    """Prefix of a .bin/.idx pair made by preprocess_data with --split-sentences."""
    vocab_file: str = "data/vocab.txt"
    """WordPiece vocabulary, one token a line; the line number is the id."""
    tokenizer_type: Literal["BertWordPieceLowerCase", "BertWordPieceCase"] = "BertWordPieceLowerCase"
    """Whether the vocabulary is lower-cased; must be what the data were made with."""
    split: str = "949,50,1"
    """Shares of the documents for training, validation and test, in the order of the file."""
    mask_prob: float = 0.15
    """Share of the tokens that the model has to predict."""
    short_seq_prob: float = 0.1
    """Share of the rows that are cut to a random shorter length."""
    data_cache_path: str | None = None
    """Where the sample index is kept; None means `cache` beside the data."""
    num_workers: int = 2
    """Threads that build samples ahead of training."""
    rows_are_full: bool = False
    """Promise that no row is padded, so that attention needs no mask; the loader checks it."""

    def predictions_per_row(self, seq_length: int, sequences_per_row: int = 1) -> int:
        """Masked positions kept of a row: all that masking may choose, rounded up to a multiple of 8."""
        return 8 * math.ceil((self.mask_prob * seq_length + sequences_per_row / 2) / 8)

    def problems(self) -> Iterator[Problem]:
        """Everything that is wrong with these settings before any file is opened."""
        if not self.data_path:
            yield Problem("data.data_path", "", "names no data", "give the prefix of a .bin/.idx pair")
        if not _is_split(self.split):
            yield Problem("data.split", self.split, "is not up to three shares separated by commas", "use 949,50,1")
        if self.tokenizer_type not in TOKENIZER_TYPES:
            yield Problem("data.tokenizer_type", self.tokenizer_type, "is not a known choice",
                          f"use one of {', '.join(TOKENIZER_TYPES)}")
        if not 0 < self.mask_prob < 1:
            yield Problem("data.mask_prob", self.mask_prob, "is not a share between 0 and 1", "use 0.15")
        if not 0 <= self.short_seq_prob <= 1:
            yield Problem("data.short_seq_prob", self.short_seq_prob, "is not a probability", "use 0.1")
        if self.num_workers < 1:
            yield Problem("data.num_workers", self.num_workers, "must be at least 1", "use 1 or 2")


def _is_split(text: str) -> bool:
    """Whether `text` gives one to three shares, none negative, of which one is positive."""
    try:
        shares = [float(share) for share in text.split(",")]
    except ValueError:
        return False
    return len(shares) <= 3 and min(shares) >= 0 < sum(shares) < math.inf
