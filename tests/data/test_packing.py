from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_ds.config.data import DataConfig
from bert_ds.data.bert_dataset import build_datasets
from bert_ds.data.indexed_dataset import IndexedDatasetWriter
from bert_ds.data.loader import WindowLoader
from bert_ds.data.packing import PackedDataset, PackingIndex, pack_samples
from bert_ds.data.sample_mapping import MappingSettings, build_mapping
from bert_ds.data.samples import UNUSED_LABEL, SampleBatch
from tests.data.reference_samples import random_corpus, word_piece_vocabulary

VOCABULARY = word_piece_vocabulary(100, 40)
SEQ_LENGTH = 64
PACKED = DataConfig(pack_sequences=True, split="8,1,1")


def rows_of(index: PackingIndex) -> list[list[int]]:
    return [row.tolist() for row in np.split(index.samples, index.row_starts[1:-1])] if index.num_rows else []


def reference_rows(lengths: list[int], seq_length: int, max_sequences: int, window: int) -> list[list[int]]:
    """The rule of the packing, slowly."""
    coming, pool, rows = list(range(len(lengths))), [], []
    while True:
        while coming and len(pool) < window:
            pool.append(coming.pop(0))
        if len(pool) < window:
            return rows
        row = [pool.pop(0)]
        while len(row) < max_sequences:
            room = seq_length - sum(lengths[sample] for sample in row)
            fitting = [sample for sample in pool if lengths[sample] <= room]
            if not fitting:
                break
            row.append(max(fitting, key=lambda sample: (lengths[sample], -sample)))
            pool.remove(row[-1])
        rows.append(row)


@pytest.mark.proves("packing by the rule; further samples change no row", "EXACT")
@settings(deadline=None)  # the first call compiles
@given(lengths=st.lists(st.integers(1, 40), max_size=120), max_sequences=st.integers(1, 9), window=st.integers(1, 30),
       further=st.lists(st.integers(1, 40), max_size=40))
def test_rows_follow_the_rule_and_more_samples_change_none(
        lengths: list[int], max_sequences: int, window: int, further: list[int]) -> None:
    def packed(lengths: list[int]) -> list[list[int]]:
        return rows_of(PackingIndex.of(pack_samples(np.array(lengths, np.int32), seq_length=40,
                                                    max_sequences=max_sequences, window=window)))

    rows = packed(lengths)
    assert rows == reference_rows(lengths, 40, max_sequences, window)
    waiting = set(range(len(lengths)))
    for row in rows:
        assert row[0] == min(waiting)
        assert len(row) <= max_sequences
        assert sum(lengths[sample] for sample in row) <= 40
        for sample in row:
            waiting.remove(sample)
    assert len(waiting) < window
    assert packed(lengths + further)[:len(rows)] == rows


def wikipedia_like_lengths() -> np.ndarray:
    """Samples of 512 cut from documents of log-normal length in sentences of 25 tokens: 254 tokens on average."""
    rng = np.random.default_rng(0)
    sentences = np.maximum(1, rng.lognormal(5.12, 1.1, 100_000) / 25).astype(np.int64)
    boundaries = np.concatenate(([0], np.cumsum(sentences)))
    lengths = np.clip(rng.gamma(3, 25 / 3, boundaries[-1]), 3, 120).astype(np.int32)
    settings = MappingSettings(num_samples=1, max_tokens=509, short_seq_prob=0.1, seed=1, min_sentences=2)
    mapping = build_mapping(boundaries, lengths, settings, source="x")
    ends = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    return np.minimum(ends[mapping[:, 1]] - ends[mapping[:, 0]], mapping[:, 2]).astype(np.int32) + 3


def test_hardly_a_position_is_padding_on_lengths_like_wikipedias() -> None:
    lengths = wikipedia_like_lengths()
    assert lengths.mean() == pytest.approx(254, abs=3)
    index = PackingIndex.of(pack_samples(lengths, seq_length=512, max_sequences=DataConfig().max_sequences_per_row))
    assert lengths[index.samples].sum() / (512 * index.num_rows) > 0.99
    # Samples come in the order of the mapping, give or take the window.
    assert np.corrcoef(np.arange(len(index.samples)), index.samples)[0, 1] > 0.999


def write_corpus(prefix: Path, *, seed: int = 0, num_documents: int = 60, max_length: int = 5) -> str:
    boundaries, lengths, tokens = random_corpus(seed, len(VOCABULARY), num_documents=num_documents, max_sentences=9,
                                                max_length=max_length)
    with IndexedDatasetWriter(str(prefix), np.uint16) as writer:
        writer.add_documents(tokens, lengths, np.diff(boundaries))
    return str(prefix)


def rows(config: DataConfig, *paths: str, split: str = "train", binary_head: bool = True, **counts: int,
         ) -> PackedDataset:
    datasets = build_datasets(replace(config, data_path=paths), seq_length=SEQ_LENGTH, binary_head=binary_head,
                              seed=1234, vocabulary=VOCABULARY, num_samples=counts or {split: 200})
    found = getattr(datasets, split)
    assert isinstance(found, PackedDataset)
    return found


CASES = [({}, True), ({}, False), ({"sentence_task": "random_next"}, True), ({"masking_do_permutation": True}, True),
         ({"mask_prob": 0.02, "max_sequences_per_row": 20}, True)]


@pytest.mark.parametrize(("change", "binary_head"), CASES)
@pytest.mark.parametrize("blended", [False, True])
def test_a_row_is_its_samples_one_after_another(tmp_path: Path, change: dict, binary_head: bool, blended: bool) -> None:
    paths = [write_corpus(tmp_path / "a"), write_corpus(tmp_path / "b", seed=1, max_length=12)][:1 + blended]
    dataset = rows(replace(PACKED, **change), *paths, binary_head=binary_head)
    numbers = np.array([150, 3, 0, *range(20, 60)])
    batch = dataset.build_batch(numbers)
    per_row = dataset.index.row_starts
    assert batch.sentence_order_labels.shape == (len(numbers), change.get("max_sequences_per_row", 6))
    for row, number in enumerate(numbers):
        samples = dataset.index.samples[per_row[number]:per_row[number + 1]].astype(np.int64)
        alone = dataset.source.build_batch(samples)
        tokens = np.count_nonzero(alone.segment_ids, axis=1)
        assert (tokens == dataset.source.lengths(samples)).all()
        assert_row(batch, row, alone, tokens)


def assert_row(batch: SampleBatch, row: int, alone: SampleBatch, tokens: np.ndarray) -> None:
    """`batch[row]` is the rows of `alone`, of which `tokens` positions are used, joined."""
    def joined(field: np.ndarray) -> np.ndarray:
        return np.concatenate([values[:count] for values, count in zip(field, tokens, strict=True)])

    end = tokens.sum()
    assert (batch.input_ids[row, :end] == joined(alone.input_ids)).all()
    assert (batch.input_ids[row, end:] == VOCABULARY.pad_id).all()
    assert (batch.token_type_ids[row, :end] == joined(alone.token_type_ids)).all()
    assert (batch.segment_ids[row] == [*np.repeat(1 + np.arange(len(tokens)), tokens), *[0] * (SEQ_LENGTH - end)]).all()
    starts = np.cumsum(tokens) - tokens
    used = alone.masked_labels != UNUSED_LABEL
    count = np.count_nonzero(used)
    assert (batch.masked_positions[row, :count] == (alone.masked_positions + starts[:, None])[used]).all()
    assert (np.diff(batch.masked_positions[row, :count]) > 0).all()
    assert (batch.masked_labels[row, :count] == alone.masked_labels[used]).all()
    assert (batch.masked_labels[row, count:] == UNUSED_LABEL).all()
    assert (batch.masked_positions[row, count:] == 0).all()
    assert (batch.sentence_order_labels[row, :len(tokens)] == alone.sentence_order_labels[:, 0]).all()
    assert (batch.sentence_order_labels[row, len(tokens):] == UNUSED_LABEL).all()
    assert batch.truncated[row] == alone.truncated.any()


def test_more_rows_than_planned_follow_and_change_none(tmp_path: Path) -> None:
    path = write_corpus(tmp_path / "a")
    planned = rows(PACKED, path, train=300)
    cached = set((tmp_path / "cache").iterdir())
    first = planned.build_batch(np.arange(300))
    again = rows(PACKED, path, train=300)
    assert set((tmp_path / "cache").iterdir()) == cached
    assert (again.index.samples == planned.index.samples).all()
    longer = rows(replace(PACKED, planned_samples=300), path, train=3000)
    assert len(longer) >= 3000
    assert all((one == other).all() for one, other in zip(first, longer.build_batch(np.arange(300)), strict=True))
    other = rows(replace(PACKED, max_sequences_per_row=2), path, train=300).build_batch(np.arange(300))
    assert np.count_nonzero(other.segment_ids > 2) == 0 < np.count_nonzero(first.segment_ids > 2)
    with pytest.raises(IndexError, match=f"row -1 of {len(planned)}"):
        planned.build_batch(np.array([-1]))


def test_every_split_is_packed(tmp_path: Path) -> None:
    path = write_corpus(tmp_path / "a", num_documents=200)
    for split in ("valid", "test"):
        dataset = rows(PACKED, path, split=split, train=10, valid=40, test=20)
        batch = dataset.build_batch(np.arange(20))
        assert batch.segment_ids.max() > 1
        assert np.count_nonzero(batch.segment_ids) > 0.95 * batch.segment_ids.size


def test_rows_of_a_global_batch_depend_on_neither_layout_nor_workers_nor_start(tmp_path: Path) -> None:
    dataset = rows(PACKED, write_corpus(tmp_path / "a"), train=96)

    def batches(dp_size: int, first_row: int = 0, num_workers: int = 1) -> list[list[bytes]]:
        loaders = [WindowLoader(dataset, first_sample=first_row, num_samples=96, micro_batch_size=2,
                                accumulation=4 // dp_size, dp_rank=rank, dp_size=dp_size, num_workers=num_workers)
                   for rank in range(dp_size)]
        return [sorted(row.numpy().tobytes() for window in windows for batch in window.micro_batches
                       for row in batch[0]) for windows in zip(*loaders, strict=True)]

    wanted = batches(1)
    assert len(wanted) == 12
    assert batches(2) == batches(4, num_workers=3) == wanted
    assert batches(2, first_row=40) == wanted[5:]


def test_contradictions_are_told() -> None:
    problems = [str(problem) for problem in DataConfig(pack_sequences=True, rows_are_full=True,
                                                       max_sequences_per_row=1).problems()]
    assert len(problems) == 2
    assert "contradicts rows_are_full" in problems[0]
    assert "lets no samples share a row" in problems[1]
