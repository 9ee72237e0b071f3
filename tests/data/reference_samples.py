"""Megatron's rules once more, slowly, with numpy's own generator: what the kernels are checked against."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np
from numpy.typing import NDArray

from bert_ds.data.vocabulary import SPECIAL_TOKENS, Vocabulary


def word_piece_vocabulary(num_words: int, num_continuations: int) -> Vocabulary:
    """[PAD] [UNK] [CLS] [SEP] [MASK], whole words, then continuations."""
    words = [f"w{i}" for i in range(len(SPECIAL_TOKENS), num_words)]
    tokens = (*SPECIAL_TOKENS, *words, *(f"##{i}" for i in range(num_continuations)))
    return Vocabulary(tokens=tokens, pad_id=0, unk_id=1, cls_id=2, sep_id=3, mask_id=4, sha256="",
                      is_continuation=np.array([token.startswith("##") for token in tokens]))


def reference_rows(boundaries: list[int], lengths: list[int], num_samples: int, max_tokens: int, short_seq_prob: float,
                   seed: int, min_sentences: int) -> list[list[int]]:
    """The mapping before its shuffle."""
    words = np.random.RandomState(seed)
    ratio = int(1 / short_seq_prob + 0.5) if short_seq_prob else 0

    def target() -> int:
        if ratio == 0:
            return max_tokens
        word = int(words.randint(0, 2**32, dtype=np.uint32))
        return 2 + word % (max_tokens - 1) if word % ratio == 0 else max_tokens

    rows: list[list[int]] = []
    while len(rows) < num_samples:
        for first, end in pairwise(boundaries):
            count = end - first
            if (count > 1 and max(lengths[first:end]) > 512) or count < min_sentences:
                continue
            start, tokens, wanted = first, 0, target()
            for sentence in range(first, end):
                tokens += lengths[sentence]
                left = end - sentence - 1
                if (tokens >= wanted and left > 1 and sentence + 1 - start >= min_sentences) or left == 0:
                    rows.append([start, sentence + 1, wanted])
                    start, tokens, wanted = sentence + 1, 0, target()
    return rows


@dataclass
class ReferenceSample:
    tokens: list[int]
    types: list[int]
    labels: dict[int, int]
    swapped: bool | None
    truncated: bool


def reference_sample(sentences: list[list[int]], target: int, vocabulary: Vocabulary, *, seed: int, mask_prob: float,
                     sentence_order: bool) -> ReferenceSample:
    """One sample; `seed` is the sum of the run's seed and the sample's index."""
    random_state = np.random.RandomState(seed % 2**32)
    pivot, swapped = len(sentences), None
    if sentence_order:
        pivot = random_state.randint(1, len(sentences)) if len(sentences) >= 3 else 1
        swapped = bool(random_state.random_sample() < 0.5)
    first, second = _joined(sentences[:pivot]), _joined(sentences[pivot:])
    if swapped:
        first, second = second, first
    truncated = len(first) + len(second) > target
    while len(first) + len(second) > target:
        longer = first if len(first) > len(second) else second
        longer.pop(0 if random_state.random_sample() < 0.5 else -1)
    tokens = [vocabulary.cls_id, *first, vocabulary.sep_id]
    types = [0] * len(tokens)
    if second:
        tokens += [*second, vocabulary.sep_id]
        types += [1] * (len(second) + 1)
    return ReferenceSample(*_masked(tokens, target, vocabulary, mask_prob, random_state, types), swapped, truncated)


def _masked(tokens: list[int], target: int, vocabulary: Vocabulary, mask_prob: float,
            random_state: np.random.RandomState, types: list[int]) -> tuple[list[int], list[int], dict[int, int]]:
    words = _words(tokens, vocabulary)
    budget = min(mask_prob * target, max(1, round(len(tokens) * mask_prob)))
    shares = 1 / np.arange(1, 4)
    shares /= shares.sum()
    ngrams = [[_joined(words[i:i + n]) for n in (1, 2, 3)] for i in range(len(words))]
    random_state.shuffle(ngrams)
    masked, labels = list(tokens), {}
    for candidate in ngrams:
        if len(labels) >= budget:
            break
        n = random_state.choice([1, 2, 3], p=shares / shares.sum())
        while n > 1 and len(labels) + len(candidate[n - 1]) > budget:
            n -= 1
        places = candidate[n - 1]
        if len(labels) + len(places) > budget or any(place in labels for place in places):
            continue
        for place in places:
            labels[place] = tokens[place]
            if random_state.random_sample() < 0.8:
                masked[place] = vocabulary.mask_id
            elif random_state.random_sample() >= 0.5:
                masked[place] = random_state.randint(0, len(vocabulary))
    return masked, types, labels


def _words(tokens: list[int], vocabulary: Vocabulary) -> list[list[int]]:
    """Places of the tokens of each word."""
    words: list[list[int]] = []
    for place, token in enumerate(tokens):
        if token in {vocabulary.cls_id, vocabulary.sep_id}:
            continue
        if vocabulary.is_continuation[token] and words:
            words[-1].append(place)
        else:
            words.append([place])
    return words


def _joined(lists: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(lists))


def random_corpus(seed: int, vocab_size: int, *, num_documents: int, max_sentences: int, max_length: int,
                  ) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.uint16]]:
    """Document boundaries, sentence lengths and tokens; documents may be empty."""
    rng = np.random.default_rng(seed)
    sentences = rng.integers(0, max_sentences + 1, num_documents)
    boundaries = np.concatenate(([0], np.cumsum(sentences)))
    lengths = rng.integers(1, max_length + 1, boundaries[-1]).astype(np.int32)
    tokens = rng.integers(len(SPECIAL_TOKENS), vocab_size, lengths.sum()).astype(np.uint16)
    return boundaries, lengths, tokens
