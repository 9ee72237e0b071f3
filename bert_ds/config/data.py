"""Which text a run reads and how samples are drawn from it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from bert_ds.errors import Problem

TOKENIZER_TYPES = ("BertWordPieceLowerCase", "BertWordPieceCase")
SENTENCE_TASKS = ("order", "random_next")
SHORTEST_SEQUENCE = 3
"""[CLS], a token, [SEP]."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Data, vocabulary and masking. Defaults are those of Megatron-LM's BERT."""

    data_path: tuple[str, ...] = ("data/corpus_text_sentence",)
    """Prefixes of .bin/.idx pairs made by preprocess_data with --split-sentences: one; several; or WEIGHT PREFIX pairs.
    Several without weights give in proportion to their tokens."""
    train_data_path: tuple[str, ...] = ()
    """Data of training alone, written like data_path. Where a split has data of its own, each split has, and data_path
    and split are not used."""
    valid_data_path: tuple[str, ...] = ()
    """Data of validation alone, see train_data_path."""
    test_data_path: tuple[str, ...] = ()
    """Data of the test alone, see train_data_path."""
    vocab_file: str = "data/vocab.txt"
    """WordPiece vocabulary, one token a line; the line number is the id."""
    vocab_extra_bos_eos: bool = False
    """Append [BOS] and [EOS] to the vocabulary, as Megatron-LM's tokenizer up to 0.16 does: random replacement may draw
    them, and data made there with --append-eod hold [EOS]. An export leaves them out."""
    tokenizer_type: Literal["BertWordPieceLowerCase", "BertWordPieceCase"] = "BertWordPieceLowerCase"
    """Whether the vocabulary is lower-cased; must be what the data were made with."""
    split: str = "949,50,1"
    """Shares of the documents for training, validation and test, in the order of the file."""
    planned_samples: int | None = None
    """Training samples that the order is drawn for; None means train_iters x global batch size. A resumed run takes the
    checkpoint's, so that a changed train_iters keeps the order. What it trains beyond comes in further epochs, each
    shuffled by itself."""
    mid_level_dataset_surplus: float = 0.005
    """Share of samples that each dataset of a blend builds beyond its part, for the rounding of the blend's order."""
    data_cache_path: str | None = None
    """Where the sample index is kept; None means `cache` beside the data."""
    short_seq_prob: float = 0.1
    """Share of the rows that are cut to a random shorter length."""
    sentence_task: Literal["order", "random_next"] = "order"
    """What the binary head learns. order: whether the two segments are swapped (ALBERT, Megatron-LM). random_next:
    whether the second is from another document (the original BERT)."""
    mask_prob: float = 0.15
    """Share of the tokens that the model has to predict."""
    masking_max_ngram: int = 3
    """Words that may be masked together."""
    masking_do_full_word: bool = True
    """Mask whole words; otherwise each piece of a word by itself."""
    masking_use_longer_ngrams: bool = False
    """Draw n words with a probability that grows with n instead of falling like 1/n."""
    masking_use_geometric_distribution: bool = False
    """Draw the number of words from a geometric distribution with p = 0.2, clipped at masking_max_ngram (SpanBERT)."""
    masking_do_permutation: bool = False
    """Beside masking, shuffle as many tokens among themselves, which the model has to predict too."""
    num_workers: int = 2
    """Threads that build samples ahead of training; 0 counts as 1."""
    rows_are_full: bool = False
    """Promise that no row is padded, so that attention needs no mask; the loader checks it."""
    pack_sequences: bool = False
    """Let short samples share a row. Batch sizes, iterations and counters count rows, which then hold more text."""
    max_sequences_per_row: int = 6
    """Samples that may share a row. Up to 6, a row of 128 or 512 needs no more room for predictions than one sample;
    texts far shorter than a sixth of a row want more."""

    @property
    def has_data_of_splits(self) -> bool:
        """Whether the splits read data of their own instead of shares of data_path."""
        return bool(self.train_data_path or self.valid_data_path or self.test_data_path)

    @property
    def sequences_per_row(self) -> int:
        """M: the most sequences that a row holds."""
        return self.max_sequences_per_row if self.pack_sequences else 1

    @property
    def row_kind(self) -> Literal["full", "padded", "packed"]:
        """What attention has to reckon with, see ops/rows.py."""
        if self.pack_sequences:
            return "packed"
        return "full" if self.rows_are_full else "padded"

    def predictions_per_row(self, seq_length: int, sequences_per_row: int = 1) -> int:
        """P: room for the predicted tokens of a row, a multiple of 8 (80 for 512 at 15 %).

        A sequence has at most mask_prob x its length of them, rounded up by a half, or else one; permutation predicts
        as many again.
        """
        times = 2 if self.masking_do_permutation else 1
        rounding = sequences_per_row * max(0.5, 1 - SHORTEST_SEQUENCE * self.mask_prob)
        return 8 * math.ceil(times * math.floor(self.mask_prob * seq_length + rounding) / 8)

    def problems(self) -> Iterator[Problem]:
        """Everything that is wrong with these settings before any file is opened."""
        yield from self._source_problems()
        yield from self._sample_problems()
        if self.num_workers < 0:
            yield Problem("data.num_workers", self.num_workers, "is negative", "use 1 or 2")

    def evaluation_problems(self) -> Iterator[Problem]:
        """What is wrong with these settings in a run that evaluates."""
        without = "or train without evaluation (--eval-interval none)"
        if self.has_data_of_splits:
            if not self.valid_data_path:
                yield Problem("data.valid_data_path", "none", "validation has no data, while training has its own",
                              f"give --valid-data-path, {without}")
            return
        shares = _shares(self.split)
        if shares is not None and not sum(shares[1:2]):
            yield Problem("data.split", self.split, "leaves nothing to validation, and the run evaluates",
                          f"give it a share, as in 949,50,1, {without}")

    def _source_problems(self) -> Iterator[Problem]:
        if not self.data_path and not self.has_data_of_splits:
            yield Problem("data.data_path", "", "names no data", "give the prefix of a .bin/.idx pair")
        if self.has_data_of_splits and not self.train_data_path:
            yield Problem("data.train_data_path", "", "names no data although another split has data of its own",
                          "give it too, or give data_path alone")
        shares = _shares(self.split)
        if shares is None:
            yield Problem("data.split", self.split, "is not up to three shares separated by commas", "use 949,50,1")
        elif not self.has_data_of_splits and not shares[0]:
            yield Problem("data.split", self.split, "leaves nothing to train on", "use 949,50,1")
        if self.tokenizer_type not in TOKENIZER_TYPES:
            yield Problem("data.tokenizer_type", self.tokenizer_type, "is not a known choice",
                          f"use one of {', '.join(TOKENIZER_TYPES)}")
        if self.planned_samples is not None and self.planned_samples < 1:
            yield Problem("data.planned_samples", self.planned_samples, "must be at least 1", "leave it out")
        if not 0 <= self.mid_level_dataset_surplus <= 1:
            yield Problem("data.mid_level_dataset_surplus", self.mid_level_dataset_surplus, "is not a share",
                          "use 0.005")

    def _sample_problems(self) -> Iterator[Problem]:
        if self.pack_sequences and self.rows_are_full:
            yield Problem("data.pack_sequences", True, "contradicts rows_are_full", "choose one of the two")
        if self.max_sequences_per_row < 2:
            yield Problem("data.max_sequences_per_row", self.max_sequences_per_row, "lets no samples share a row",
                          "use 6, or leave pack_sequences out")
        if not 0 < self.mask_prob < 1:
            yield Problem("data.mask_prob", self.mask_prob, "is not a share between 0 and 1", "use 0.15")
        if not 0 <= self.short_seq_prob <= 1:
            yield Problem("data.short_seq_prob", self.short_seq_prob, "is not a probability", "use 0.1")
        if self.sentence_task not in SENTENCE_TASKS:
            yield Problem("data.sentence_task", self.sentence_task, "is not a known choice",
                          f"use one of {', '.join(SENTENCE_TASKS)}")
        if self.masking_max_ngram < 1:
            yield Problem("data.masking_max_ngram", self.masking_max_ngram, "must be at least 1", "use 3")
        if self.masking_use_geometric_distribution:
            for name in ("masking_do_permutation", "masking_use_longer_ngrams"):
                if getattr(self, name):
                    yield Problem(f"data.{name}", True, "contradicts masking_use_geometric_distribution",
                                  "choose one of the two")


def _shares(split: str) -> list[float] | None:
    """The one to three shares of `split`; None where it is no such list, one is negative, or none is positive."""
    try:
        shares = [float(share) for share in split.split(",")]
    except ValueError:
        return None
    return shares if len(shares) <= 3 and min(shares) >= 0 < sum(shares) < math.inf else None
