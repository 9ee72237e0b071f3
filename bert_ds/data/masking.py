"""The kernel that builds masked rows, equal to Megatron-LM 0.16 bit for bit.

A sample is a pure function of (seed + its index): the order of the draws from its random stream is part of the format.
S sequence length, P predictions kept per row, V vocabulary, B rows.
Source of the rules: Megatron-LM, megatron/core/datasets/bert_dataset.py and masked_dataset.py.

Kernels that call each other stand in one file, the generator excepted: numba compiles a cached kernel again only when
its own file has changed. What runs for every word takes few arrays as arguments: each costs a counted reference.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from bert_ds.config.data import DataConfig
from bert_ds.data.mersenne_twister import (
    LAST_START_32,
    Stream,
    as_double,
    bits_of,
    draw_below,
    new_stream_32,
    refill_32,
    start_32,
)
from bert_ds.data.samples import UNUSED_LABEL, SampleBatch
from bert_ds.data.vocabulary import Vocabulary

BUILT, OUTSIDE_MAPPING, DAMAGED, UNKNOWN_TOKEN, TOO_MANY_PREDICTIONS = range(5)
"""What became of a row."""

NO_TASK, SENTENCE_ORDER, RANDOM_NEXT = range(3)
"""What the label of a row's two segments says."""

_WORD, _CONTINUATION, _BOUNDARY = range(3)
_SHARE_MASK_TOKEN = 0.8
_SHARE_KEPT_OF_REST = 0.5
_GEOMETRIC_P = 0.2
_DAMAGED_LABEL = -1
_DRAWS_OF_ANOTHER_DOCUMENT = 10
_LARGEST_BOUND = 2**32 - 1


class Corpus(NamedTuple):
    """Arrays of an IndexedDataset."""

    tokens: NDArray[np.integer]
    lengths: NDArray[np.int32]
    pointers: NDArray[np.int64]
    boundaries: NDArray[np.int64]
    """[documents + 1], first sentence of each document; only read to tell documents apart."""


class Rules(NamedTuple):
    """How rows are built from sentences."""

    token_kinds: NDArray[np.uint8]
    """[V]; whether a token starts a word, continues one or is [CLS] or [SEP]."""
    ngram_cdf: NDArray[np.float64]
    """[N]; entry n is the probability that at most n + 1 words are masked together, the last is 1."""
    pad_id: int
    cls_id: int
    sep_id: int
    mask_id: int
    mask_prob: float
    sentence_task: int
    """NO_TASK: one segment. SENTENCE_ORDER or RANDOM_NEXT: two segments and a label."""
    permutation: bool
    """Whether tokens that are not masked are shuffled among themselves and predicted."""
    seed: int


class _Scratch(NamedTuple):
    positions: NDArray[np.int32]
    """[S], places of the tokens that may be masked, word by word."""
    word_starts: NDArray[np.int32]
    """[S + 1], where each word begins in `positions`."""
    order: NDArray[np.int32]
    """[S], the words, shuffled."""
    labels: NDArray[np.int32]
    """[S], original id where masked, else -1."""


def rules_for(vocabulary: Vocabulary, data: DataConfig, *, binary_head: bool, seed: int) -> Rules:
    """The rules that a run's settings ask for."""
    continuation = _CONTINUATION if data.masking_do_full_word else _WORD
    kinds = np.where(vocabulary.is_continuation, continuation, _WORD).astype(np.uint8)
    kinds[[vocabulary.cls_id, vocabulary.sep_id]] = _BOUNDARY
    task = {"order": SENTENCE_ORDER, "random_next": RANDOM_NEXT}[data.sentence_task]
    return Rules(
        token_kinds=kinds, ngram_cdf=_ngram_cdf(data),
        pad_id=vocabulary.pad_id, cls_id=vocabulary.cls_id, sep_id=vocabulary.sep_id, mask_id=vocabulary.mask_id,
        mask_prob=data.mask_prob, sentence_task=task if binary_head else NO_TASK,
        permutation=data.masking_do_permutation, seed=seed,
    )


def _ngram_cdf(data: DataConfig) -> NDArray[np.float64]:
    """Distribution of the number of words masked together, such that one uniform number draws it.

    By default the share of n is proportional to 1/n. RandomState.choice draws by the same comparison, and so does
    RandomState.geometric, by the inverse of its distribution.
    """
    sizes = np.arange(1, data.masking_max_ngram + 1, dtype=np.float64)
    if data.masking_use_geometric_distribution:
        return np.append(1 - (1 - _GEOMETRIC_P) ** sizes[:-1], 1.0)
    # Divided twice, then by the last sum: the rounding decides which n a draw gives.
    shares = 1.0 / sizes
    shares /= shares.sum()
    if data.masking_use_longer_ngrams:
        shares = shares[::-1]
    cumulated = (shares / shares.sum()).cumsum()
    return cumulated / cumulated[-1]


@numba.njit(cache=True, nogil=True)
def build_rows(corpus: Corpus, mapping: NDArray[np.unsignedinteger], rules: Rules, indices: NDArray[np.int64],
               rows: NDArray[np.int64], batch: SampleBatch) -> tuple[int, int, int]:
    """Builds sample indices[k] into row rows[k] of `batch`, for all k.

    Reads nothing outside the arrays, whatever they hold. Returns (BUILT, 0, 0), or at the first failure what it was,
    its k, and for UNKNOWN_TOKEN the id.
    """
    seq_length = batch.input_ids.shape[1]
    stream = new_stream_32()
    scratch = _Scratch(np.empty(seq_length, np.int32), np.empty(seq_length + 1, np.int32),
                       np.empty(seq_length, np.int32), np.empty(seq_length, np.int32))
    for k in range(len(indices)):
        index, row = indices[k], rows[k]
        if not 0 <= index < len(mapping):
            return OUTSIDE_MAPPING, k, 0
        sample = (np.int64(mapping[index, 0]), np.int64(mapping[index, 1]), np.int64(mapping[index, 2]))
        if not _is_sound(corpus, sample, seq_length, rules.sentence_task):
            return DAMAGED, k, 0
        at = start_32(stream, rules.seed + index)
        first, second, label, at = _choose_segments(corpus, mapping, rules, sample, seq_length, stream, at)
        if label == _DAMAGED_LABEL:
            return DAMAGED, k, 0
        first, second, at, truncated = _truncate(first, second, sample[2], stream, at)
        batch.sentence_order_labels[row, 0] = label
        batch.truncated[row] = truncated
        length, unknown = _lay_out(corpus.tokens, first, second, rules, batch, row)
        if length == 0:
            return UNKNOWN_TOKEN, k, unknown
        ids = batch.input_ids[row, :length]
        num_words = _find_words(ids, rules.token_kinds, scratch)
        at = _shuffle_words(scratch.order, num_words, stream, at)
        # A float, rounded half to even; [CLS] and [SEP] count.
        budget = min(rules.mask_prob * sample[2], max(1.0, np.rint(length * rules.mask_prob)))
        at = _mask_words(ids, budget, num_words, rules, scratch, stream, at)
        if rules.permutation:
            _permute_words(ids, budget, num_words, rules, scratch, stream, at)
        if not _write_predictions(scratch.labels[:length], batch.masked_positions[row], batch.masked_labels[row]):
            return TOO_MANY_PREDICTIONS, k, 0
    return BUILT, 0, 0


@numba.njit(cache=True, nogil=True)
def measure_samples(corpus: Corpus, mapping: NDArray[np.unsignedinteger], rules: Rules, indices: NDArray[np.int64],
                    seq_length: int, lengths: NDArray[np.int32]) -> tuple[int, int]:
    """Writes how many tokens the samples of `indices` will have; one too many where a segment is empty.

    Returns (BUILT, 0), or at the first failure what it was and its k, as `build_rows`.
    """
    stream = new_stream_32()
    for k in range(len(indices)):
        index = indices[k]
        if not 0 <= index < len(mapping):
            return OUTSIDE_MAPPING, k
        start, end, target = np.int64(mapping[index, 0]), np.int64(mapping[index, 1]), np.int64(mapping[index, 2])
        if not _is_sound(corpus, (start, end, target), seq_length, rules.sentence_task):
            return DAMAGED, k
        tokens = _begin_of(corpus, end - 1) + corpus.lengths[end - 1] - _begin_of(corpus, start)
        if rules.sentence_task == RANDOM_NEXT:
            at = start_32(stream, rules.seed + index)
            first, second, label, at = _choose_segments(corpus, mapping, rules, (start, end, target), seq_length,
                                                        stream, at)
            if label == _DAMAGED_LABEL:
                return DAMAGED, k
            tokens = first[1] - first[0] + second[1] - second[0]
        lengths[k] = min(tokens, target) + (2 if rules.sentence_task == NO_TASK else 3)
    return BUILT, 0


@numba.njit(cache=True, nogil=True)
def _is_sound(corpus: Corpus, sample: tuple[int, int, int], seq_length: int, sentence_task: int) -> bool:
    """Whether the sample's sentences lie inside the corpus, back to back, and its target fits the row."""
    start, end, target = sample
    if not 0 <= start < end <= len(corpus.lengths) or end - start < (1 if sentence_task == NO_TASK else 2):
        return False
    if not 2 <= target <= seq_length - 3:
        return False
    itemsize = np.int64(corpus.tokens.itemsize)
    corpus_bytes = len(corpus.tokens) * itemsize
    expected = corpus.pointers[start]
    if expected < 0 or expected % itemsize != 0:
        return False
    for sentence in range(start, end):
        length = np.int64(corpus.lengths[sentence])
        if corpus.pointers[sentence] != expected or length < 0 or length * itemsize > corpus_bytes - expected:
            return False
        expected += length * itemsize
    return True


@numba.njit(cache=True, nogil=True)
def _choose_segments(corpus: Corpus, mapping: NDArray[np.unsignedinteger], rules: Rules, sample: tuple[int, int, int],
                     seq_length: int, stream: Stream, at: int) -> tuple[tuple[int, int], tuple[int, int], int, int]:
    """The tokens of both segments as [begin, end), their label and the stream's next word.

    The second segment is empty without a sentence task. The label is _DAMAGED_LABEL where another row that was drawn
    does not lie in the corpus.
    """
    start, end, _ = sample
    begin, close = _begin_of(corpus, start), _begin_of(corpus, end - 1) + corpus.lengths[end - 1]
    if rules.sentence_task == NO_TASK:
        return (begin, close), (close, close), UNUSED_LABEL, at
    pivot, at = draw_below(stream, at, end - start - 1)
    middle = _begin_of(corpus, start + 1 + pivot)
    if at > LAST_START_32:
        at = refill_32(stream, at)
    label = np.int64(as_double(stream[at], stream[at + 1]) < 0.5)
    at += 2
    if label == 0:
        return (begin, middle), (middle, close), 0, at
    if rules.sentence_task == SENTENCE_ORDER:
        return (middle, close), (begin, middle), 1, at
    other, at = _row_of_another_document(corpus.boundaries, mapping, start, stream, at)
    if other < 0:
        return (begin, middle), (middle, close), 0, at
    start, end, target = np.int64(mapping[other, 0]), np.int64(mapping[other, 1]), np.int64(mapping[other, 2])
    if not _is_sound(corpus, (start, end, target), seq_length, rules.sentence_task):
        return (begin, middle), (middle, close), _DAMAGED_LABEL, at
    pivot, at = draw_below(stream, at, end - start - 1)
    close = _begin_of(corpus, end - 1) + corpus.lengths[end - 1]
    return (begin, middle), (_begin_of(corpus, start + 1 + pivot), close), 1, at


@numba.njit(cache=True, nogil=True)
def _begin_of(corpus: Corpus, sentence: int) -> int:
    return corpus.pointers[sentence] // corpus.tokens.itemsize


@numba.njit(cache=True, nogil=True)
def _row_of_another_document(boundaries: NDArray[np.int64], mapping: NDArray[np.unsignedinteger], sentence: int,
                             stream: Stream, at: int) -> tuple[int, int]:
    """A row, drawn uniformly, outside the document of `sentence`, and the stream's next word. -1 where several draws
    found none, as in a corpus of one document."""
    document = np.searchsorted(boundaries, sentence, side="right")
    if not 0 < document < len(boundaries):
        return -1, at
    first, end = boundaries[document - 1], boundaries[document]
    for _ in range(_DRAWS_OF_ANOTHER_DOCUMENT):
        row, at = draw_below(stream, at, min(len(mapping), _LARGEST_BOUND))
        if not first <= np.int64(mapping[row, 0]) < end:
            return row, at
    return -1, at


@numba.njit(cache=True, nogil=True)
def _lay_out(tokens: NDArray[np.integer], first: tuple[int, int], second: tuple[int, int], rules: Rules,
             batch: SampleBatch, row: int) -> tuple[int, int]:
    """Writes [CLS] A [SEP] B [SEP] and padding.

    Returns the length without padding and 0; or length 0 and an id outside the vocabulary.
    """
    ids, types, segments = batch.input_ids[row], batch.token_type_ids[row], batch.segment_ids[row]
    ids[0] = rules.cls_id
    first_end, unknown = _copy_segment(tokens, first, rules, ids, 1)
    length = first_end
    if length != 0 and second[1] > second[0]:
        length, unknown = _copy_segment(tokens, second, rules, ids, first_end)
    if length == 0:
        return 0, unknown
    ids[length:] = rules.pad_id
    types[:first_end] = 0
    types[first_end:length] = 1
    types[length:] = 0
    segments[:length] = 1
    segments[length:] = 0
    return length, 0


@numba.njit(cache=True, nogil=True)
def _truncate(first: tuple[int, int], second: tuple[int, int], target: int, stream: Stream,
              at: int) -> tuple[tuple[int, int], tuple[int, int], int, bool]:
    """Drops tokens from either end of the longer segment (the second when equal) until both have `target` together."""
    first_begin, first_end = first
    second_begin, second_end = second
    surplus = first_end - first_begin + second_end - second_begin - target
    for _ in range(surplus):
        if at > LAST_START_32:
            at = refill_32(stream, at)
        from_front = as_double(stream[at], stream[at + 1]) < 0.5
        at += 2
        if first_end - first_begin > second_end - second_begin:
            first_begin += from_front
            first_end -= not from_front
        else:
            second_begin += from_front
            second_end -= not from_front
    return (first_begin, first_end), (second_begin, second_end), at, surplus > 0


@numba.njit(cache=True, nogil=True)
def _copy_segment(tokens: NDArray[np.integer], segment: tuple[int, int], rules: Rules, ids: NDArray[np.int32],
                  place: int) -> tuple[int, int]:
    """Writes tokens and [SEP] to ids[place:]. Returns the place behind them and 0; or 0 and an id that is unknown."""
    vocab_size = len(rules.token_kinds)
    for i in range(segment[0], segment[1]):
        token = np.int64(tokens[i])
        if not 0 <= token < vocab_size:
            return 0, token
        ids[place] = token
        place += 1
    ids[place] = rules.sep_id
    return place + 1, 0


@numba.njit(cache=True, nogil=True)
def _find_words(ids: NDArray[np.int32], token_kinds: NDArray[np.uint8], scratch: _Scratch) -> int:
    """Lists the tokens that may be masked, word by word, and resets labels and order. Returns the number of words.

    A continuation joins the word before it, even across a [SEP].
    """
    positions, word_starts, order, labels = scratch.positions, scratch.word_starts, scratch.order, scratch.labels
    num_words = num_positions = 0
    for i in range(len(ids)):
        labels[i] = -1
        kind = token_kinds[ids[i]]
        if kind == _BOUNDARY:
            continue
        if kind == _WORD or num_words == 0:
            word_starts[num_words] = num_positions
            order[num_words] = num_words
            num_words += 1
        positions[num_positions] = i
        num_positions += 1
    word_starts[num_words] = num_positions
    return num_words


@numba.njit(cache=True, nogil=True)
def _shuffle_words(order: NDArray[np.int32], num_words: int, stream: Stream, at: int) -> int:
    """RandomState.shuffle of a list of `num_words`. Returns the stream's next word."""
    for i in range(num_words - 1, 0, -1):
        largest, bits = np.uint32(i), bits_of(i)
        if at > LAST_START_32:
            at = refill_32(stream, at)
        value = stream[at] & bits
        at += 1
        while value > largest:
            if at > LAST_START_32:
                at = refill_32(stream, at)
            value = stream[at] & bits
            at += 1
        kept = order[i]
        order[i] = order[value]
        order[value] = kept
    return at


@numba.njit(cache=True, nogil=True)
def _mask_words(ids: NDArray[np.int32], budget: float, num_words: int, rules: Rules, scratch: _Scratch,
                stream: Stream, at: int) -> int:
    """Masks n-grams of words in the shuffled order until `budget` tokens are masked; sets their labels.

    Returns the stream's next word.
    """
    positions, word_starts, order, labels = scratch.positions, scratch.word_starts, scratch.order, scratch.labels
    cdf, mask_id, vocab_size, room = rules.ngram_cdf, rules.mask_id, len(rules.token_kinds), np.int64(budget)
    num_masked = 0
    for k in range(num_words):
        if num_masked >= budget:
            break
        if at > LAST_START_32:
            at = refill_32(stream, at)
        uniform = as_double(stream[at], stream[at + 1])
        at += 2
        word = order[k]
        last_word = min(word + _words_drawn(cdf, uniform), num_words)
        begin, end = word_starts[word], _end_of_ngram(word_starts, word, last_word, room - num_masked)
        if end - begin > room - num_masked or _is_taken(labels, positions, begin, end):
            continue
        for place in positions[begin:end]:
            labels[place] = ids[place]
            if at > LAST_START_32:
                at = refill_32(stream, at)
            if as_double(stream[at], stream[at + 1]) < _SHARE_MASK_TOKEN:
                ids[place] = mask_id
                at += 2
            elif as_double(stream[at + 2], stream[at + 3]) >= _SHARE_KEPT_OF_REST:
                ids[place], at = draw_below(stream, at + 4, vocab_size)
            else:
                at += 4
        num_masked += end - begin
    return at


@numba.njit(cache=True, nogil=True)
def _words_drawn(cdf: NDArray[np.float64], uniform: float) -> int:
    size = 1
    while uniform >= cdf[size - 1]:
        size += 1
    return size


@numba.njit(cache=True, nogil=True)
def _end_of_ngram(word_starts: NDArray[np.int32], word: int, last_word: int, room: int) -> int:
    """End of the words from `word` to before `last_word` among the positions, fewer of them if `room` does not suffice,
    but at least one."""
    end = word_starts[last_word]
    while last_word > word + 1 and end - word_starts[word] > room:
        last_word -= 1
        end = word_starts[last_word]
    return end


@numba.njit(cache=True, nogil=True)
def _permute_words(ids: NDArray[np.int32], budget: float, num_words: int, rules: Rules, scratch: _Scratch,
                   stream: Stream, at: int) -> None:
    """Chooses n-grams that are not masked, up to `budget` tokens, and shuffles their tokens; sets their labels."""
    positions, word_starts, order, labels = scratch.positions, scratch.word_starts, scratch.order, scratch.labels
    cdf, chosen, room = rules.ngram_cdf, np.empty(len(ids), np.int32), np.int64(budget)
    count = 0
    at = _shuffle_words(order, num_words, stream, at)
    for k in range(num_words):
        if count >= budget:
            break
        if at > LAST_START_32:
            at = refill_32(stream, at)
        uniform = as_double(stream[at], stream[at + 1])
        at += 2
        word = order[k]
        last_word = min(word + _words_drawn(cdf, uniform), num_words)
        begin, end = word_starts[word], _end_of_ngram(word_starts, word, last_word, room - count)
        if end - begin > room - count or _is_taken(labels, positions, begin, end):
            continue
        for place in positions[begin:end]:
            labels[place] = ids[place]
            chosen[count] = place
            count += 1
    places = np.sort(chosen[:count])
    moved = places.copy()
    _shuffle_words(moved, count, stream, at)
    for k in range(count):
        ids[places[k]] = labels[moved[k]]


@numba.njit(cache=True, nogil=True)
def _is_taken(labels: NDArray[np.int32], positions: NDArray[np.int32], begin: int, end: int) -> bool:
    for i in range(begin, end):
        if labels[positions[i]] >= 0:
            return True
    return False


@numba.njit(cache=True, nogil=True)
def _write_predictions(labels: NDArray[np.int32], positions: NDArray[np.int32], out: NDArray[np.int32]) -> bool:
    """Lists the masked places in ascending order, with their labels; False when there are more than fit."""
    count = 0
    for i in range(len(labels)):
        if labels[i] >= 0:
            if count == len(positions):
                return False
            positions[count] = i
            out[count] = labels[i]
            count += 1
    positions[count:] = 0
    out[count:] = UNUSED_LABEL
    return True
