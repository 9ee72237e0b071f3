"""A WordPiece vocabulary: one token a line, the line number is the id."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bert_ds.config.data import DataConfig
from bert_ds.errors import DataError, Problem, raise_if_any

PAD, UNK, CLS, SEP, MASK = SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
BOS, EOS = EXTRA_TOKENS = ("[BOS]", "[EOS]")
"""Appended by Megatron-LM's own tokenizer (up to 0.16) to a vocabulary that lacks them."""
CONTINUATION_PREFIX = "##"

_SETTING = "--vocab-file"
_REPAIR = ("give a WordPiece vocabulary as plain text, one token a line, such as bert-base-uncased's vocab.txt, or "
           "make one with `python -m bert_ds.build_vocab`")


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """Tokens in the order of their ids. The extra tokens of Megatron-LM, where asked for, follow those of the file."""

    tokens: tuple[str, ...]
    pad_id: int
    unk_id: int
    cls_id: int
    sep_id: int
    mask_id: int
    sha256: str
    """Hex digest of the file's bytes."""
    is_continuation: NDArray[np.bool_] = field(repr=False, compare=False)
    """[len(self)]; whether the token continues a word (starts with "##"). Read-only."""
    document_end: str = SEP
    """Token that closes a document: [EOS] with the extra tokens, else [SEP]."""

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def of_run(cls, data: DataConfig) -> Vocabulary:
        """The vocabulary of a run; see from_file."""
        return cls.from_file(data.vocab_file, extra_bos_eos=data.vocab_extra_bos_eos)

    @classmethod
    def from_file(cls, path: str, *, extra_bos_eos: bool = False) -> Vocabulary:
        """Reads a vocabulary file; raises DataError when it is missing or is not a usable vocabulary.

        extra_bos_eos: append [BOS] and [EOS] where the file lacks them.
        """
        try:
            content = Path(path).read_bytes()
        except OSError as error:
            raise DataError.of(_SETTING, path, f"cannot be read ({error.strerror})", _REPAIR) from None
        tokens = _tokens_of(content, path)
        raise_if_any(DataError, _problems(tokens, path))
        if extra_bos_eos:
            tokens += tuple(token for token in EXTRA_TOKENS if token not in tokens)
        id_of = {token: token_id for token_id, token in enumerate(tokens)}
        is_continuation = np.array([token.startswith(CONTINUATION_PREFIX) for token in tokens], dtype=np.bool_)
        is_continuation.flags.writeable = False
        return cls(
            tokens=tokens,
            pad_id=id_of[PAD], unk_id=id_of[UNK], cls_id=id_of[CLS], sep_id=id_of[SEP], mask_id=id_of[MASK],
            sha256=hashlib.sha256(content).hexdigest(),
            is_continuation=is_continuation,
            document_end=EOS if extra_bos_eos else SEP,
        )


def _tokens_of(content: bytes, path: str) -> tuple[str, ...]:
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError.of(_SETTING, path, f"is not UTF-8 text (byte {error.start})", _REPAIR) from None
    if "\0" in text:
        raise DataError.of(_SETTING, path, "is a binary file, not text", _REPAIR)
    if _is_json(text):
        raise DataError.of(_SETTING, path, "is JSON, not a list of tokens", _REPAIR)
    # Only "\n" ends a line: real vocabularies hold tokens such as U+2028 and U+0085.
    return tuple(text.removesuffix("\n").split("\n"))


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _problems(tokens: tuple[str, ...], path: str) -> Iterator[Problem]:
    missing = [token for token in SPECIAL_TOKENS if token not in tokens]
    if missing and tokens[0].endswith("\r"):
        yield Problem(_SETTING, path, "ends its lines with CR LF", "convert it to Unix line ends (dos2unix)")
        return
    if missing:
        yield Problem(_SETTING, path, f"lacks {', '.join(missing)}", _REPAIR)
    token, count = Counter(tokens).most_common(1)[0]
    if count > 1:
        yield Problem(_SETTING, path, f"holds the token {token!r} {count} times", "remove the duplicates")
