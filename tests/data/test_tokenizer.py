from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_ds.data.tokenizer import WordPieceTokenizer, word_piece
from bert_ds.data.vocabulary import SPECIAL_TOKENS, Vocabulary
from bert_ds.errors import ConfigError

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZéÉüßö\u03c3\u03c20123456789"
WORDS = ("the", "un", "##aff", "##able", "want", "##ed", "The", "cafe", "café", "mask", "[", "]", ".", ",", "!", "'",
         "-", "中", "文", "hello", "##lo", "😀", "##\u0301")
TEXTS = (
    "The unaffable want, wanted!", "Café CAFÉ cafe\u0301 Ünaffable", "中文hello中 文", "a\u00a0b\u2003c\u3000d",
    "tab\there\r\nnewline\x0bvt\x0cff\x1c\x1d\x85nel", "zero\u200bwidth \u00adsoft \ufeffbom \ufffd bad",
    "[MASK] and [CLS] [SEP]", "x" * 100 + " " + "x" * 101, "don't stop-it... (really)", "😀👩\u200d👩 ok", "",
    "\u03a3A\u03a3 \u03a3", " \n ", "\x00nul\x07bell",
)


@pytest.fixture(scope="module")
def vocab_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokens = [*SPECIAL_TOKENS, *LETTERS, *(f"##{letter}" for letter in LETTERS), *WORDS]
    path = tmp_path_factory.mktemp("vocabulary") / "vocab.txt"
    path.write_text("\n".join(dict.fromkeys(tokens)) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module", params=["BertWordPieceLowerCase", "BertWordPieceCase"])
def tokenizer(request: pytest.FixtureRequest, vocab_file: Path) -> WordPieceTokenizer:
    return WordPieceTokenizer(Vocabulary.from_file(str(vocab_file)), request.param)


def tokens_of(tokenizer: WordPieceTokenizer, text: str) -> list[str]:
    return [tokenizer.vocabulary.tokens[token_id] for token_id in tokenizer.encode(text)]


def test_ids_equal_those_of_hugging_face(vocab_file: Path, tokenizer: WordPieceTokenizer) -> None:
    transformers = pytest.importorskip("transformers")
    lower_case = "[" in tokens_of(tokenizer, "[MASK]") and tokens_of(tokenizer, "THE") == ["the"]
    theirs = transformers.BertTokenizer(str(vocab_file), do_lower_case=lower_case)
    for text in TEXTS:
        if not any(special in text for special in SPECIAL_TOKENS):
            assert tokenizer.encode(text).tolist() == theirs.encode(text, add_special_tokens=False), repr(text)


def test_special_tokens_in_text_stay_text(tokenizer: WordPieceTokenizer) -> None:
    special_ids = set(range(len(SPECIAL_TOKENS))) - {tokenizer.vocabulary.unk_id}
    assert not special_ids.intersection(tokenizer.encode("[MASK] [CLS]x[SEP] [PAD] a[MASK]b").tolist())
    if tokens_of(tokenizer, "THE") == ["the"]:
        assert tokens_of(tokenizer, "[MASK]") == ["[", "mask", "]"]


def test_every_character_is_treated_as_in_a_whole_text(vocab_file: Path, tokenizer: WordPieceTokenizer) -> None:
    """Remembering words cuts the text at blanks first; that must be invisible for every character there is."""
    whole = tokenizer._words._tokenizer
    points = (*range(0x3100), *range(0x3100, 0xD800, 97), *range(0xE000, 0xF900, 97), *range(0xF900, 0x10000), 0xE0001)
    characters = list(map(chr, points))
    texts = [f"un{character}aff {character} want{character}" for character in characters]
    for character, text, expected in zip(characters, texts, whole.encode_batch_fast(texts, add_special_tokens=False),
                                         strict=True):
        assert tokenizer.encode(text).tolist() == expected.ids, hex(ord(character))


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60))
def test_any_text_is_treated_as_a_whole(vocab_file: Path, tokenizer: WordPieceTokenizer, text: str) -> None:
    assert tokenizer.encode(text).tolist() == tokenizer._words._tokenizer.encode(text, add_special_tokens=False).ids


def test_word_length_limit(vocab_file: Path) -> None:
    vocabulary = Vocabulary.from_file(str(vocab_file))
    assert len(WordPieceTokenizer(vocabulary).encode("x" * 100)) == 100
    assert WordPieceTokenizer(vocabulary).encode("x" * 101).tolist() == [vocabulary.unk_id]
    assert len(WordPieceTokenizer(vocabulary, max_word_length=200).encode("x" * 101)) == 101


def test_memory_of_words_is_bounded(vocab_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bert_ds.data.tokenizer._REMEMBERED_WORDS", 10)
    tokenizer = WordPieceTokenizer(Vocabulary.from_file(str(vocab_file)))
    words = [f"un{number}" for number in range(35)]
    fresh = word_piece(tokenizer.vocabulary, "BertWordPieceLowerCase", 100)
    for _ in range(2):
        for word in words:
            assert tokenizer.encode(word).tolist() == fresh.encode(word).ids
    assert len(tokenizer._words) <= 10


def test_unknown_type_is_refused(vocab_file: Path) -> None:
    with pytest.raises(ConfigError, match="BertWordPieceLowerCase, BertWordPieceCase"):
        WordPieceTokenizer(Vocabulary.from_file(str(vocab_file)), "BertWordPieceUpperCase")
