"""BERT's WordPiece over Hugging Face `tokenizers`, made fast by remembering words.

The tokenizer works on each whitespace-separated word by itself, so the ids of a word are a function of the word alone.
Text repeats its words: looking them up is several times faster than computing them again.
"""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer

from bert_ds.config.data import TOKENIZER_TYPES
from bert_ds.data.indexed_dataset import dtype_for_vocab
from bert_ds.data.vocabulary import CONTINUATION_PREFIX, UNK, Vocabulary
from bert_ds.errors import ConfigError

MAX_WORD_LENGTH = 100
"""Characters beyond which a word becomes [UNK]: the value of `transformers`. Megatron-LM up to 0.16 had 200."""

_REMEMBERED_WORDS = 1 << 19
_LONGEST_REMEMBERED_WORD = 64
# Control characters at which `str.split` cuts, but which BERT's text cleaning removes.
_REMOVED_CONTROLS = re.compile("[\x0b\x0c\x1c-\x1f\x85]")


class WordPieceTokenizer:
    """Text to ids, without [CLS] and [SEP]. The ids equal those of `transformers.BertTokenizer`, with one exception:
    a special token spelled in the text, such as "[MASK]", is text like any other and never becomes the special id.
    """

    def __init__(self, vocabulary: Vocabulary, tokenizer_type: str = TOKENIZER_TYPES[0], *,
                 max_word_length: int = MAX_WORD_LENGTH) -> None:
        if tokenizer_type not in TOKENIZER_TYPES:
            raise ConfigError.of("--tokenizer-type", tokenizer_type, "is not a known choice",
                                 f"use one of {', '.join(TOKENIZER_TYPES)}")
        self.vocabulary = vocabulary
        self.dtype = dtype_for_vocab(len(vocabulary)).newbyteorder("<")
        """Type of the ids, that of the indexed dataset for this vocabulary."""
        self._words = _WordMemory(word_piece(vocabulary, tokenizer_type, max_word_length), self.dtype)

    def encode(self, text: str) -> NDArray[np.generic]:
        """Ids of the text, [tokens]."""
        return np.frombuffer(self.encode_bytes(text), self.dtype)

    def encode_bytes(self, text: str) -> bytes:
        """Ids of the text as the bytes of an array of `dtype`."""
        return b"".join(map(self._words.__getitem__, _REMOVED_CONTROLS.sub("", text).split()))


class _WordMemory(dict[str, bytes]):
    """Ids of the words met so far, computed when a word is first asked for."""

    def __init__(self, tokenizer: Tokenizer, dtype: np.dtype[np.generic]) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._dtype = dtype

    def __missing__(self, word: str) -> bytes:
        ids = np.array(self._tokenizer.encode(word, add_special_tokens=False).ids, self._dtype).tobytes()
        if len(word) <= _LONGEST_REMEMBERED_WORD:
            if len(self) >= _REMEMBERED_WORDS:
                self.clear()
            self[word] = ids
        return ids


def word_piece(vocabulary: Vocabulary, tokenizer_type: str, max_word_length: int) -> Tokenizer:
    """The tokenizer without added tokens, so that nothing in a text is taken for a special token."""
    id_of = {token: token_id for token_id, token in enumerate(vocabulary.tokens)}
    tokenizer = Tokenizer(WordPiece(id_of, unk_token=UNK, max_input_chars_per_word=max_word_length,
                                    continuing_subword_prefix=CONTINUATION_PREFIX))
    tokenizer.normalizer = bert_normalizer(lower_case=tokenizer_type == "BertWordPieceLowerCase")
    tokenizer.pre_tokenizer = BertPreTokenizer()
    return tokenizer


def bert_normalizer(*, lower_case: bool) -> BertNormalizer:
    """BERT's text cleaning; `lower_case` also strips accents."""
    return BertNormalizer(clean_text=True, handle_chinese_chars=True, strip_accents=lower_case, lowercase=lower_case)
