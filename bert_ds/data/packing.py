"""Packed rows: several short samples share one row, so that few positions are padding.

The packing index says which samples a row holds. It is drawn from the samples' lengths alone, before training: a row
is a pure function of (index, number), whatever the layout, the workers and the place where a run resumes.

A window of samples waits, in the order of the mapping. Each row takes the sample that waits longest, then again and
again the longest that still fits. So the rows come in the mapping's random order, give or take the window, nothing
waits for ever, and row r depends only on the samples that come before it and on the window behind: further epochs
never change the rows before. What is left in the window at the end is left out.

Share of the positions that are tokens, unpacked and by M (two samples a row on average for the first):

    text                                      unpacked   M = 2   3       6       8
    like Wikipedia, mean 254 of 512           49.7 %     82.5 %  99.6 %  99.7 %  99.7 %
    novels by chapter, mean 462 of 512        90.2 %     99.9 %  99.9 %  99.9 %  99.9 %
    short notices, mean 67 of 512             13.2 %                     79.6 %  96.9 %  (12: 99.8 %)

The index of 30 million samples takes a second on one core; laying out rows costs a tenth of building their samples.

How many samples the wanted rows take is measured on a first stretch of the split; the mapping is then drawn for so
many, and should they not suffice, further epochs follow.

S sequence length, M the most sequences of a row, N samples, R rows, B rows of a batch, W samples of the window.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numba
import numpy as np
from numpy.typing import NDArray

from bert_ds.data.index_cache import load_or_build
from bert_ds.data.samples import UNUSED_LABEL, MeasuredSource, SampleBatch

ALGORITHM_VERSION = 1
"""Changes whenever the same lengths would give other rows."""
WINDOW = 2048
"""Samples to choose from; four times as many gain less than 0.1 % of the positions."""

_PROBE = 2**16
_MARGIN = 1.01
_CHUNK = 2**20
_LARGEST_UINT32 = 2**32 - 1
_PLACED, _TOO_LONG, _TOO_MANY_PREDICTIONS = range(3)

logger = logging.getLogger(__name__)


class DrawnSamples(Protocol):
    """The samples of a split in their order, not yet built."""

    def describe(self) -> Mapping[str, object]:
        """Everything that the order and the lengths of the samples depend on."""
        ...

    def build(self) -> MeasuredSource:
        """The samples."""
        ...


class Draw(Protocol):
    """Orders the samples of a split."""

    def __call__(self, planned: int, wanted: int, cached: bool) -> DrawnSamples:
        """At least `wanted` samples in the order drawn for `planned`; `cached` unless nobody asks for them again."""
        ...


@dataclass(frozen=True, kw_only=True)
class PackedRows:
    """The form of packed rows, and where their index is kept."""

    seq_length: int
    max_sequences: int
    num_predictions: int
    """P of a row of `max_sequences` sequences."""
    pad_id: int
    cache_folder: Path
    name: str
    """Name of the index in the cache."""

    def build(self, draw: Draw, *, planned: int, wanted: int) -> PackedDataset:
        """At least `wanted` rows, in the order drawn for `planned` rows."""
        per_row = self._samples_per_row(draw(_PROBE, _PROBE, cached=False))
        planned_samples, wanted_samples = (_samples_for(rows, per_row) for rows in (planned, wanted))
        while True:
            packed = self._pack(draw(planned_samples, wanted_samples, cached=True))
            if len(packed) >= wanted:
                return packed
            wanted_samples = len(packed.source) + _samples_for(wanted - len(packed), per_row)

    def _pack(self, samples: DrawnSamples) -> PackedDataset:
        source = samples.build()

        def build() -> NDArray[np.unsignedinteger]:
            lengths = _measure_all(source)
            array = pack_samples(lengths, seq_length=self.seq_length, max_sequences=self.max_sequences)
            index = PackingIndex.of(array)
            tokens = int(lengths[index.samples].sum(dtype=np.int64))
            logger.info("%s: %d samples in %d rows, %.2f%% of the positions are tokens", self.name, len(index.samples),
                        index.num_rows, 100 * tokens / max(1, index.num_rows * self.seq_length))
            return array

        array = load_or_build(self.cache_folder, self.name, self._description("packing", samples), build)
        return PackedDataset(source, PackingIndex.of(array), self)

    def _samples_per_row(self, probe: DrawnSamples) -> float:
        """How many samples a row takes on average."""
        def build() -> NDArray[np.int64]:
            lengths = probe.build().lengths(np.arange(_PROBE))
            array = pack_samples(lengths, seq_length=self.seq_length, max_sequences=self.max_sequences)
            index = PackingIndex.of(array)
            return np.array([len(index.samples), index.num_rows])

        description = self._description("samples per row", probe)
        num_samples, num_rows = load_or_build(self.cache_folder, f"{self.name}-measure", description, build).tolist()
        return float(num_samples / num_rows)

    def _description(self, array: str, samples: DrawnSamples) -> dict[str, object]:
        return {"array": array, "version": ALGORITHM_VERSION, "samples": samples.describe(),
                "seq_length": self.seq_length, "max_sequences": self.max_sequences, "window": WINDOW}


def _samples_for(rows: int, per_row: float) -> int:
    return math.ceil(rows * per_row * _MARGIN) + WINDOW


def _measure_all(source: MeasuredSource) -> NDArray[np.int32]:
    lengths = np.empty(len(source), np.int32)
    for begin in range(0, len(lengths), _CHUNK):
        end = min(begin + _CHUNK, len(lengths))
        lengths[begin:end] = source.lengths(np.arange(begin, end))
    return lengths


class PackingIndex(NamedTuple):
    """Which samples each row holds."""

    row_starts: NDArray[np.unsignedinteger]
    """[R + 1], where each row begins in `samples`."""
    samples: NDArray[np.unsignedinteger]
    """[samples in rows], row by row."""

    @property
    def num_rows(self) -> int:
        return len(self.row_starts) - 1

    @classmethod
    def of(cls, array: NDArray[np.unsignedinteger]) -> PackingIndex:
        """Reads what `pack_samples` returns."""
        num_rows = int(array[0])
        return cls(array[1:num_rows + 2], array[num_rows + 2:])


def pack_samples(lengths: NDArray[np.int32], *, seq_length: int, max_sequences: int,
                 window: int = WINDOW) -> NDArray[np.unsignedinteger]:
    """The packing index of samples of these lengths [N], as one array: R, row_starts [R + 1], samples.

    uint32, or uint64 where a sample's number needs it.
    """
    assert len(lengths) == 0 or 0 < lengths.min() <= lengths.max() <= seq_length
    index_type = np.uint32 if len(lengths) <= _LARGEST_UINT32 else np.uint64
    row_starts = np.zeros(len(lengths) + 1, index_type)
    samples = np.empty(len(lengths), index_type)
    num_rows = _pack(lengths, _new_pool(window, seq_length), max_sequences, row_starts, samples)
    row_starts = row_starts[:num_rows + 1]
    return np.concatenate([np.array([num_rows], index_type), row_starts, samples[:row_starts[-1]]])


class PackedDataset:
    """Rows of several samples: a pure function of (samples, packing index, row). Thread-safe."""

    def __init__(self, source: MeasuredSource, index: PackingIndex, form: PackedRows) -> None:
        self.source = source
        self.index = index
        self._form = form

    def __len__(self) -> int:
        return self.index.num_rows

    def build_batch(self, indices: NDArray[np.int64]) -> SampleBatch:
        """The rows [B] of `indices`; see SampleSource."""
        rows = np.asarray(indices, np.int64)
        outside = (rows < 0) | (rows >= len(self))
        if outside.any():
            raise IndexError(f"row {rows[outside.argmax()]} of {len(self)}")
        starts = self.index.row_starts
        begins = starts[rows].astype(np.int64)
        counts = starts[rows + 1].astype(np.int64) - begins
        places = np.arange(counts.sum()) + np.repeat(begins - np.cumsum(counts) + counts, counts)
        samples = self.source.build_batch(self.index.samples[places].astype(np.int64))
        form = self._form
        batch = SampleBatch.empty(len(rows), form.seq_length, form.num_predictions, form.max_sequences)
        status = _place_samples(samples, counts, form.pad_id, batch)
        assert status == _PLACED, f"samples do not fit their row ({status})"
        return batch


class _Pool(NamedTuple):
    """The samples of the window, each in a slot: linked by age, and by age among those of one length.

    -1 ends a list of one length. Slot W stands before the oldest and behind the newest of all.
    """

    samples: NDArray[np.int64]
    """[W]."""
    next_of_length: NDArray[np.int64]
    """[W]."""
    older: NDArray[np.int64]
    """[W + 1]."""
    newer: NDArray[np.int64]
    """[W + 1]."""
    oldest_of: NDArray[np.int64]
    """[S + 1], the oldest slot of each length."""
    newest_of: NDArray[np.int64]
    """[S + 1], the newest slot of each length that is there."""
    free: NDArray[np.int64]
    """[W], slots; used as a stack."""


def _new_pool(window: int, seq_length: int) -> _Pool:
    return _Pool(
        samples=np.empty(window, np.int64), next_of_length=np.empty(window, np.int64),
        older=np.full(window + 1, window), newer=np.full(window + 1, window),
        oldest_of=np.full(seq_length + 1, -1), newest_of=np.full(seq_length + 1, -1), free=np.arange(window))


@numba.njit(cache=True, nogil=True)
def _pack(lengths: NDArray[np.int32], pool: _Pool, max_sequences: int, row_starts: NDArray[np.unsignedinteger],
          samples: NDArray[np.unsignedinteger]) -> int:
    """Packs until the window cannot be filled again. Returns the number of rows."""
    window = num_free = len(pool.free)
    seq_length = len(pool.oldest_of) - 1
    num_rows = count = sample = 0
    while True:
        while num_free > 0 and sample < len(lengths):
            num_free -= 1
            _add(pool, pool.free[num_free], sample, lengths[sample])
            sample += 1
        if num_free > 0:
            return num_rows
        room = seq_length
        row_end = count + max_sequences
        length = np.int64(lengths[pool.samples[pool.newer[window]]])
        while length > 0 and count < row_end:
            slot = _take_oldest(pool, length)
            pool.free[num_free] = slot
            num_free += 1
            samples[count] = pool.samples[slot]
            count += 1
            room -= length
            length = room
            while length > 0 and pool.oldest_of[length] < 0:
                length -= 1
        num_rows += 1
        row_starts[num_rows] = count


@numba.njit(cache=True, nogil=True)
def _add(pool: _Pool, slot: int, sample: int, length: int) -> None:
    pool.samples[slot] = sample
    pool.next_of_length[slot] = -1
    if pool.oldest_of[length] < 0:
        pool.oldest_of[length] = slot
    else:
        pool.next_of_length[pool.newest_of[length]] = slot
    pool.newest_of[length] = slot
    last = len(pool.samples)
    newest = pool.older[last]
    pool.older[slot], pool.newer[slot] = newest, last
    pool.newer[newest] = pool.older[last] = slot


@numba.njit(cache=True, nogil=True)
def _take_oldest(pool: _Pool, length: int) -> int:
    """Takes the oldest sample of a length out of the lists. Returns its slot."""
    slot = pool.oldest_of[length]
    pool.oldest_of[length] = pool.next_of_length[slot]
    older, newer = pool.older[slot], pool.newer[slot]
    pool.newer[older], pool.older[newer] = newer, older
    return slot


@numba.njit(cache=True, nogil=True)
def _place_samples(samples: SampleBatch, counts: NDArray[np.int64], pad_id: int, batch: SampleBatch) -> int:
    """Lays counts[0] samples into row 0 of `batch`, the next counts[1] into row 1, and so on.

    Returns _PLACED, or why samples do not fit.
    """
    seq_length, num_predictions = batch.input_ids.shape[1], batch.masked_labels.shape[1]
    sample = 0
    for row in range(len(counts)):
        ids, types, segments = batch.input_ids[row], batch.token_type_ids[row], batch.segment_ids[row]
        positions, labels = batch.masked_positions[row], batch.masked_labels[row]
        orders = batch.sentence_order_labels[row]
        place = used = 0
        truncated = False
        for sequence in range(counts[row]):
            length = num_masked = 0
            while length < seq_length and samples.segment_ids[sample, length] != 0:
                length += 1
            while num_masked < samples.masked_labels.shape[1] and (
                    samples.masked_labels[sample, num_masked] != UNUSED_LABEL):
                num_masked += 1
            if place + length > seq_length:
                return _TOO_LONG
            if used + num_masked > num_predictions:
                return _TOO_MANY_PREDICTIONS
            ids[place:place + length] = samples.input_ids[sample, :length]
            types[place:place + length] = samples.token_type_ids[sample, :length]
            segments[place:place + length] = sequence + 1
            positions[used:used + num_masked] = samples.masked_positions[sample, :num_masked] + place
            labels[used:used + num_masked] = samples.masked_labels[sample, :num_masked]
            orders[sequence] = samples.sentence_order_labels[sample, 0]
            truncated |= samples.truncated[sample]
            place += length
            used += num_masked
            sample += 1
        ids[place:] = pad_id
        types[place:] = 0
        segments[place:] = 0
        positions[used:] = 0
        labels[used:] = UNUSED_LABEL
        orders[counts[row]:] = UNUSED_LABEL
        batch.truncated[row] = truncated
    return _PLACED
