"""What made an indexed dataset: `<prefix>.json` beside its `.bin` and `.idx`.

Training compares it with its own vocabulary: token ids mean nothing without the list they were made with.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from bert_ds.data.vocabulary import Vocabulary
from bert_ds.errors import DataError, Problem


@dataclass(frozen=True, kw_only=True)
class DatasetMetadata:
    """How the tokens of one dataset came about, and how many there are."""

    vocab_file: str
    vocab_size: int
    vocab_sha256: str
    tokenizer_type: str
    max_word_length: int
    """Characters beyond which a word became [UNK]."""
    sentence_splitter: str | None
    """Name of the splitter; None where documents were not split."""
    sentence_splitter_version: str
    document_end_token: str | None
    """Token that closes every document, if any."""
    inputs: tuple[str, ...]
    json_key: str
    documents: int
    documents_of_two_sentences: int
    """Documents of at least two sentences, the ones that BERT's sentence order can use."""
    sentences: int
    tokens: int
    unknown_tokens: int
    """Tokens that are [UNK]."""
    skipped_records: int
    """Records of the input that were left out because they could not be read."""
    replaced_records: int = 0
    """Records in which characters that could not be decoded were replaced."""
    duplicate_documents: int = 0
    """Documents whose text had stood in an earlier one, found by a hash of it."""
    duplicates_dropped: bool = False
    """Whether these were left out; then they are not among `documents`."""

    def problems(self, vocabulary: Vocabulary, vocab_file: str, tokenizer_type: str) -> Iterator[Problem]:
        """Where a run's vocabulary and tokenizer type disagree with the data."""
        if vocabulary.sha256 != self.vocab_sha256:
            yield Problem("--vocab-file", vocab_file, f"is not the vocabulary of the data, which were made with "
                          f"{self.vocab_file} ({self.vocab_size} entries, sha256 {self.vocab_sha256[:12]}...)",
                          "use that file, or preprocess the text again")
        if tokenizer_type != self.tokenizer_type:
            yield Problem("--tokenizer-type", tokenizer_type, f"the data were made with {self.tokenizer_type}",
                          f"use --tokenizer-type {self.tokenizer_type}, or preprocess the text again")

    def text(self) -> str:
        """The content of `<prefix>.json`."""
        return json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n"


def metadata_path(prefix: str) -> Path:
    return Path(f"{prefix}.json")


def read_metadata(prefix: str) -> DatasetMetadata | None:
    """The metadata of a dataset; None where there are none, as beside data made by Megatron-LM. Raises DataError."""
    path = metadata_path(prefix)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        known = {field.name: content[field.name] for field in fields(DatasetMetadata) if field.name in content}
        return DatasetMetadata(**known | {"inputs": tuple(content["inputs"])})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError.of("--data-path", prefix, f"{path} cannot be read ({type(error).__name__}: {error})",
                           "preprocess the text again, or delete that file to train without this check") from None
