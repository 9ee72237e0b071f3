"""Megatron's rules once more, slowly, with numpy's own generator: what the kernels are checked against."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np
from numpy.typing import NDArray

from bert_ds.config.data import DataConfig
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
    label: bool | None
    truncated: bool


def reference_sample(rows: list[tuple[int, list[list[int]]]], index: int, target: int, vocabulary: Vocabulary,
                     data: DataConfig, *, seed: int, binary_head: bool) -> ReferenceSample:
    """Sample `index` of a run with `seed`. rows: the document and the sentences of every row."""
    random_state = np.random.RandomState((seed + index) % 2**32)
    document, sentences = rows[index]
    pivot, label = len(sentences), None
    if binary_head:
        pivot = random_state.randint(1, len(sentences)) if len(sentences) >= 3 else 1
        label = bool(random_state.random_sample() < 0.5)
    first, second = _joined(sentences[:pivot]), _joined(sentences[pivot:])
    if label and data.sentence_task == "order":
        first, second = second, first
    elif label:
        draws = (rows[random_state.randint(0, len(rows))] for _ in range(10))
        other = next((others for its_document, others in draws if its_document != document), None)
        label = other is not None
        if other is not None:
            second = _joined(other[1 + random_state.randint(0, len(other) - 1):])
    truncated = len(first) + len(second) > target
    while len(first) + len(second) > target:
        longer = first if len(first) > len(second) else second
        longer.pop(0 if random_state.random_sample() < 0.5 else -1)
    tokens = [vocabulary.cls_id, *first, vocabulary.sep_id]
    types = [0] * len(tokens)
    if second:
        tokens += [*second, vocabulary.sep_id]
        types += [1] * (len(second) + 1)
    return ReferenceSample(*_masked(tokens, target, vocabulary, data, random_state, types), label, truncated)


def _masked(tokens: list[int], target: int, vocabulary: Vocabulary, data: DataConfig,
            random_state: np.random.RandomState, types: list[int]) -> tuple[list[int], list[int], dict[int, int]]:
    words = _words(tokens, vocabulary, whole=data.masking_do_full_word)
    budget = min(data.mask_prob * target, max(1, round(len(tokens) * data.mask_prob)))
    sizes = range(1, data.masking_max_ngram + 1)
    ngrams = [[_joined(words[i:i + n]) for n in sizes] for i in range(len(words))]
    random_state.shuffle(ngrams)
    masked, labels = list(tokens), {}
    for places in _chosen(ngrams, budget, data, random_state, labels):
        for place in places:
            labels[place] = tokens[place]
            if random_state.random_sample() < 0.8:
                masked[place] = vocabulary.mask_id
            elif random_state.random_sample() >= 0.5:
                masked[place] = random_state.randint(0, len(vocabulary))
    if data.masking_do_permutation:
        random_state.shuffle(ngrams)
        moved: dict[int, int] = {}
        for places in _chosen(ngrams, budget, data, random_state, moved, labels):
            moved |= {place: tokens[place] for place in places}
        sources = sorted(moved)
        random_state.shuffle(sources)
        for place, source in zip(sorted(moved), sources, strict=True):
            masked[place] = tokens[source]
        labels |= moved
    return masked, types, labels


def _chosen(ngrams: list[list[list[int]]], budget: float, data: DataConfig, random_state: np.random.RandomState,
            taken: dict[int, int], others: Collection[int] = ()) -> Iterator[list[int]]:
    """Places of the n-grams that fit the budget and touch nothing of `taken`, which the caller fills, or `others`."""
    shares = 1 / np.arange(1, data.masking_max_ngram + 1)
    shares /= shares.sum()
    if data.masking_use_longer_ngrams:
        shares = shares[::-1]
    for candidate in ngrams:
        if len(taken) >= budget:
            return
        if data.masking_use_geometric_distribution:
            n = min(random_state.geometric(0.2), data.masking_max_ngram)
        else:
            n = random_state.choice(np.arange(1, data.masking_max_ngram + 1), p=shares / shares.sum())
        while n > 1 and len(taken) + len(candidate[n - 1]) > budget:
            n -= 1
        places = candidate[n - 1]
        if len(taken) + len(places) <= budget and not any(place in taken or place in others for place in places):
            yield places


def _words(tokens: list[int], vocabulary: Vocabulary, *, whole: bool) -> list[list[int]]:
    """Places of the tokens of each word, or of each token by itself."""
    words: list[list[int]] = []
    for place, token in enumerate(tokens):
        if token in {vocabulary.cls_id, vocabulary.sep_id}:
            continue
        if whole and vocabulary.is_continuation[token] and words:
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
