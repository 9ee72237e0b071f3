"""Training a WordPiece vocabulary: the same text gives the same list, in every run.

The trainer of `tokenizers` numbers the continuation pieces of single characters ("##a") in the order of a hash table,
and breaks ties among rare characters at random; both decide later merges. So the alphabet is counted and cut here, and
handed over in a fixed order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.trainers import WordPieceTrainer

from bert_ds.data.tokenizer import bert_normalizer
from bert_ds.data.vocabulary import CONTINUATION_PREFIX, SPECIAL_TOKENS, UNK
from bert_ds.errors import ConfigError, DataError


def train_vocabulary(texts: Callable[[], Iterable[str]], *, size: int, lower_case: bool = True, min_frequency: int = 2,
                     alphabet_limit: int = 1000) -> list[str]:
    """A vocabulary of at most `size` tokens, special tokens first; shorter when the text does not hold more.

    `texts` is called, and read, twice. Pieces seen fewer than `min_frequency` times are not merged; of the characters,
    the `alphabet_limit` most frequent are kept, the others become [UNK]. Raises ConfigError when the characters alone
    exceed `size`, DataError when there is no text.
    """
    tokenizer = Tokenizer(WordPiece(unk_token=UNK))
    tokenizer.normalizer = bert_normalizer(lower_case=lower_case)
    tokenizer.pre_tokenizer = BertPreTokenizer()

    alphabet = _alphabet(texts(), tokenizer, alphabet_limit)
    if not alphabet:
        raise DataError.of("--input", "", "the input holds no text", "give a text that is not empty")
    fixed = [*SPECIAL_TOKENS, *alphabet, *(CONTINUATION_PREFIX + character for character in alphabet
                                          if _continues_words(character, tokenizer))]
    if len(fixed) > size:
        raise ConfigError.of("--size", size, f"special tokens and single characters need {len(fixed)} entries",
                             f"ask for more, or keep fewer characters with --alphabet-limit (now {alphabet_limit})")
    trainer = WordPieceTrainer(
        vocab_size=size,
        min_frequency=min_frequency,
        # "Special" here only means: first, and in this order.
        special_tokens=fixed,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        continuing_subword_prefix=CONTINUATION_PREFIX,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(), trainer)
    id_of: dict[str, int] = tokenizer.get_vocab()
    return sorted(id_of, key=id_of.__getitem__)


def _alphabet(texts: Iterable[str], tokenizer: Tokenizer, limit: int) -> list[str]:
    """The most frequent characters of the cleaned text, sorted."""
    raw_counts = Counter[str]()
    for text in texts:
        raw_counts.update(text)
    counts = Counter[str]()
    for character, count in raw_counts.items():
        for cleaned in "".join(tokenizer.normalizer.normalize_str(character).split()):
            counts[cleaned] += count
    by_frequency = sorted(counts, key=lambda character: (-counts[character], character))
    return sorted(by_frequency[:limit])


def _continues_words(character: str, tokenizer: Tokenizer) -> bool:
    """False for punctuation and ideographs, which are words of their own."""
    word = tokenizer.normalizer.normalize_str(f"a{character}")
    return len(tokenizer.pre_tokenizer.pre_tokenize_str(word)) == 1
