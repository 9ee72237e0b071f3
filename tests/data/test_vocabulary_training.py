from __future__ import annotations

import random

import pytest

from bert_ds.data.vocabulary import SPECIAL_TOKENS
from bert_ds.data.vocabulary_training import train_vocabulary
from bert_ds.errors import ConfigError, DataError


def corpus() -> list[str]:
    """Words of random syllables: many ties in frequency, the hard case for reproducibility."""
    draw = random.Random(1)
    syllables = [consonant + vowel for consonant in "bcdfghjklmnpqrstvwxyzßéñ" for vowel in "aeiouü"]
    words = ["".join(draw.choices(syllables, k=draw.randint(1, 4))) for _ in range(3000)]
    return [" ".join(draw.choices(words, k=200)).capitalize() + ". 中文, [MASK]!" for _ in range(100)]


def test_every_run_gives_the_same_list() -> None:
    texts = corpus()
    first = train_vocabulary(lambda: texts, size=2000)
    assert len(first) == len(set(first)) == 2000
    assert all(train_vocabulary(lambda: texts, size=2000) == first for _ in range(3))
    assert train_vocabulary(lambda: texts[::-1], size=2000) == first


def test_order_and_alphabet() -> None:
    tokens = train_vocabulary(lambda: ["Unable, unable! Ümlaut 中文 x"] * 5, size=100)
    alphabet = sorted(set("unable,!umlaut中文x"))
    assert tokens[:5] == list(SPECIAL_TOKENS)
    assert tokens[5:5 + len(alphabet)] == alphabet
    continuing = [f"##{character}" for character in alphabet if character not in ",!中文"]
    assert tokens[5 + len(alphabet):5 + len(alphabet) + len(continuing)] == continuing
    assert {"unable", "umlaut"} <= set(tokens)


def test_case_is_kept_on_request() -> None:
    texts = ["Köln Köln köln"] * 3
    assert {"Köln", "köln"} <= set(train_vocabulary(lambda: texts, size=60, lower_case=False))
    assert "koln" in train_vocabulary(lambda: texts, size=60)


def test_rare_characters_and_pieces_are_left_out() -> None:
    texts = ["aa ab"] * 5 + ["z once"]
    assert not {"z", "##z"} & set(train_vocabulary(lambda: texts, size=100, alphabet_limit=2))
    assert "once" not in train_vocabulary(lambda: texts, size=100)
    assert "once" in train_vocabulary(lambda: texts, size=100, min_frequency=1)


def test_impossible_requests() -> None:
    with pytest.raises(ConfigError, match="special tokens and single characters need 11 entries"):
        train_vocabulary(lambda: ["abc"], size=10)
    with pytest.raises(DataError, match="no text"):
        train_vocabulary(lambda: ["", " \n"], size=10)


def test_an_error_while_reading_comes_through() -> None:
    calls = []

    def texts() -> object:
        calls.append(1)
        yield "some text"
        if len(calls) == 2:
            raise DataError.of("--input", "file:3", "is broken", "mend it")

    with pytest.raises(DataError, match="file:3"):
        train_vocabulary(texts, size=100)
