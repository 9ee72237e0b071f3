"""Which sentences form which training row, and in which order the rows come: Megatron's mapping, bit for bit.

A row is (first sentence, end sentence, target tokens): whole sentences of one document are collected until the target
is reached. Now and then a target is cut short at random. The rows of all epochs are shuffled together.
Source of the rules: Megatron-LM, megatron/core/datasets/helpers.cpp, build_mapping.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from bert_ds.data.mersenne_twister import (
    LAST_START_32,
    LAST_START_64,
    Stream,
    new_stream_32,
    new_stream_64,
    refill_32,
    refill_64,
    start_32,
    start_64,
)
from bert_ds.errors import DataError, UserError

LONGEST_SENTENCE = 512
"""A document with a longer sentence is left out, unless the sentence is its only one."""

ALGORITHM_VERSION = 1
"""Changes whenever the same settings would give other rows."""

_LARGEST_UINT32 = 2**32 - 1
_SEEDS = 2**31 - 1
_SERVES, _TOO_FEW_SENTENCES, _LONG_SENTENCE = 1, 2, 3

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class MappingSettings:
    """What the mapping depends on beside the corpus."""

    num_samples: int
    """Rows that the order is drawn for: whole epochs until there are as many, shuffled together."""
    needed_samples: int = 0
    """Rows wanted at least. Where the planned ones do not suffice, further epochs follow, each shuffled by itself, so
    that more rows never change the order of those before."""
    max_tokens: int
    """Tokens of a full row without its special tokens: sequence length - 3."""
    short_seq_prob: float
    """Share of the rows whose target is cut to a random length from 2 to max_tokens."""
    seed: int
    """0 <= seed < 2^31 - 1."""
    min_sentences: int
    """2 with a sentence-order label, else 1; shorter documents are left out."""


class _Corpus(NamedTuple):
    boundaries: NDArray[np.int64]
    lengths: NDArray[np.int32]
    serves: NDArray[np.bool_]


class _Rules(NamedTuple):
    max_tokens: int
    short_row_ratio: int
    min_sentences: int


def build_mapping(boundaries: NDArray[np.int64], lengths: NDArray[np.int32], settings: MappingSettings, *,
                  source: str) -> NDArray[np.unsignedinteger]:
    """The shuffled rows [rows, 3] of (first sentence, end sentence, target tokens).

    boundaries: [documents + 1], first sentence of each document of the split, and the end of the last.
    lengths: [sentences of the corpus], tokens. Both must have passed `IndexedDataset.verify`.
    source: names the corpus in messages.
    uint32, or uint64 when the corpus has more than 2^32 - 1 sentences. Raises DataError when no document can serve.
    """
    verdicts = _judge(boundaries, lengths, settings.min_sentences)
    too_few = int(np.count_nonzero(verdicts == _TOO_FEW_SENTENCES))
    too_long = int(np.count_nonzero(verdicts == _LONG_SENTENCE))
    if too_few + too_long == len(verdicts):
        raise _nothing_serves(source, len(verdicts), too_few, too_long, settings.min_sentences)
    if too_few or too_long:
        logger.info("%s: of %d documents, %d are left out with fewer than %d sentences, %d with a sentence of more "
                    "than %d tokens", source, len(verdicts), too_few, settings.min_sentences, too_long,
                    LONGEST_SENTENCE)
    serves = verdicts == _SERVES
    parts = [_shuffled_rows(boundaries, lengths, serves, settings)]
    while sum(map(len, parts)) < settings.needed_samples:
        seed = (settings.seed + len(parts)) % _SEEDS
        parts.append(_shuffled_rows(boundaries, lengths, serves, replace(settings, num_samples=1, seed=seed)))
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _shuffled_rows(boundaries: NDArray[np.int64], lengths: NDArray[np.int32], serves: NDArray[np.bool_],
                   settings: MappingSettings) -> NDArray[np.unsignedinteger]:
    rows_type = np.uint32 if len(lengths) <= _LARGEST_UINT32 else np.uint64
    rows = _collect_rows(boundaries, lengths, serves, settings, rows_type)
    _shuffle(rows, settings.seed + 1)
    return rows


def _short_row_ratio(short_seq_prob: float) -> int:
    """One row in this many is short; 0 means none. C's round(1 / p): halves away from zero."""
    if short_seq_prob == 0:
        return 0
    inverse = 1 / short_seq_prob
    return math.floor(inverse) + (inverse - math.floor(inverse) >= 0.5)


def _nothing_serves(source: str, documents: int, too_few: int, too_long: int, min_sentences: int) -> UserError:
    repairs = ["split long sentences before preprocessing"] if too_long else []
    if too_few and min_sentences > 1:
        repairs.append("preprocess with --split-sentences, give texts of several sentences, or train without the "
                       "sentence-order task (--bert-no-binary-head)")
    elif too_few:
        repairs.append("give texts that are not empty")
    return DataError.of(
        "--data-path", source,
        f"no document can serve: of {documents} documents, {too_few} have fewer than {min_sentences} "
        f"sentence{'s' if min_sentences > 1 else ''} and {too_long} hold a sentence of more than {LONGEST_SENTENCE} "
        "tokens", "; ".join(repairs))


def _collect_rows(boundaries: NDArray[np.int64], lengths: NDArray[np.int32], serves: NDArray[np.bool_],
                  settings: MappingSettings, rows_type: type[np.unsignedinteger]) -> NDArray[np.unsignedinteger]:
    """Rows of whole epochs in the order of the text; there must be a document that serves."""
    rows = np.empty((settings.num_samples + settings.num_samples // 8 + len(boundaries), 3), rows_type)
    corpus = _Corpus(boundaries, lengths, serves)
    rules = _Rules(settings.max_tokens, _short_row_ratio(settings.short_seq_prob), settings.min_sentences)
    stream = new_stream_32()
    at = start_32(stream, settings.seed)
    count = 0
    while count < settings.num_samples:
        document = 0
        while document < len(serves):
            document, count, at = _append_rows(corpus, rules, document, rows, count, stream, at)
            if document < len(serves):
                rows = _grown(rows, count)
    return rows[:count]


def _grown(rows: NDArray[np.unsignedinteger], count: int) -> NDArray[np.unsignedinteger]:
    larger = np.empty((len(rows) + len(rows) // 2 + 1, 3), rows.dtype)
    larger[:count] = rows[:count]
    return larger


@numba.njit(cache=True, nogil=True)
def _judge(boundaries: NDArray[np.int64], lengths: NDArray[np.int32], min_sentences: int) -> NDArray[np.uint8]:
    """For each document whether it serves, and why not."""
    verdicts = np.empty(len(boundaries) - 1, np.uint8)
    for document in range(len(verdicts)):
        first, end = boundaries[document], boundaries[document + 1]
        longest = np.int32(0)
        for sentence in range(np.uint64(first), np.uint64(end)):
            longest = max(longest, lengths[sentence])
        if end - first > 1 and longest > LONGEST_SENTENCE:
            verdicts[document] = _LONG_SENTENCE
        elif end - first < min_sentences:
            verdicts[document] = _TOO_FEW_SENTENCES
        else:
            verdicts[document] = _SERVES
    return verdicts


@numba.njit(cache=True, nogil=True)
def _append_rows(corpus: _Corpus, rules: _Rules, document: int, rows: NDArray[np.unsignedinteger], count: int,
                 stream: Stream, at: int) -> tuple[int, int, int]:
    """Appends rows from `document` on.

    Returns the document at which `rows` became too small, the number of rows and the stream's next word.
    """
    boundaries, lengths, serves = corpus
    max_tokens, ratio, min_sentences = rules
    while document < len(serves):
        first, end = boundaries[document], boundaries[document + 1]
        if not serves[document]:
            document += 1
            continue
        if count + end - first > len(rows):
            break
        # A row may end where it is full and two sentences are left; the last row takes what there is.
        last_end = end - 2
        sentence = first
        while sentence < end:
            if at > LAST_START_32:
                at = refill_32(stream, at)
            target = _target_of(stream[at], max_tokens, ratio)
            at += 1
            start = sentence
            tokens = np.int64(lengths[start])
            sentence = min(start + min_sentences, end)
            for i in range(start + 1, sentence):
                tokens += lengths[i]
            while sentence <= last_end and tokens < target:
                tokens += lengths[sentence]
                sentence += 1
            if sentence > last_end:
                sentence = end
            rows[count, 0] = start
            rows[count, 1] = sentence
            rows[count, 2] = target
            count += 1
        # One more target is drawn after the last row of a document, and not used.
        if at > LAST_START_32:
            at = refill_32(stream, at)
        at += 1
        document += 1
    return document, count, at


@numba.njit(cache=True, nogil=True)
def _target_of(word: int, max_tokens: int, ratio: int) -> int:
    if ratio != 0 and word % np.uint32(ratio) == 0:
        return 2 + np.int64(word % np.uint32(max_tokens - 1))
    return max_tokens


@numba.njit(cache=True, nogil=True)
def _shuffle(rows: NDArray[np.unsignedinteger], seed: int) -> None:
    """Fisher-Yates from the end, in place."""
    stream = new_stream_64()
    at = start_64(stream, seed)
    for i in range(len(rows) - 1, 0, -1):
        if at > LAST_START_64:
            at = refill_64(stream, at)
        j = np.int64(stream[at] % np.uint64(i + 1))
        at += 1
        for column in range(3):
            kept = rows[i, column]
            rows[i, column] = rows[j, column]
            rows[j, column] = kept
