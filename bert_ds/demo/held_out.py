"""Held-out sentences with words put in brackets, for the model to guess."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from bert_ds.data.sentences import sentence_splitter
from bert_ds.data.text_sources import BadRecords, TextSources

WORDS_IN_A_SENTENCE = range(8, 19)


def sentences_to_fill(held_out: Path, vocabulary: Collection[str], *, sentences: int, hidden: int) -> list[str]:
    """Sentences of plain prose, one a document, in the order of the file, each with `hidden` words in brackets."""
    found: list[str] = []
    for candidates in _prose(held_out):
        text = next(filter(None, (hide(words, vocabulary, hidden) for words in candidates)), None)
        if text is not None:
            found.append(text)
        if len(found) == sentences:
            break
    return found


def hide(words: list[str], vocabulary: Collection[str], hidden: int) -> str | None:
    """The sentence with `hidden` words in brackets, or None when it has not twice as many to choose from.

    Their place alone decides: among the words that are whole tokens, those that cut the sentence into equal parts.
    """
    whole = [place for place, word in enumerate(words) if len(word) > 1 and word.lower() in vocabulary]
    if len(whole) < 2 * hidden:
        return None
    chosen = {whole[len(whole) * part // (hidden + 1)] for part in range(1, hidden + 1)}
    return " ".join(f"[{word}]" if place in chosen else word for place, word in enumerate(words)) + "."


def _prose(held_out: Path) -> Iterator[list[list[str]]]:
    """For each document its sentences of plain words, cut into words, without the full stop."""
    split = sentence_splitter("sentencex")
    for document in TextSources([str(held_out)]).documents(["text"], BadRecords("stop")):
        cut = (sentence.removesuffix(".").split() for sentence in split(document.texts[0]) if sentence.endswith("."))
        yield [words for words in cut if len(words) in WORDS_IN_A_SENTENCE and _are_plain(words)]


def _are_plain(words: list[str]) -> bool:
    return words[0].istitle() and all(word.removesuffix(",").isalpha() and not word[1:].isupper() for word in words)
