"""A checkpoint of 20b from one cluster, read by another of 1,024 ranks: ranges only, no cluster and no bytes."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bert_ds.checkpoint.format import (
    WEIGHT,
    FileRecord,
    LayoutRecord,
    Manifest,
    ParameterRecord,
    SliceRecord,
    VocabularyRecord,
    rank_file,
)
from bert_ds.checkpoint.parameters import parameter_shapes
from bert_ds.checkpoint.reader import Checkpoint
from bert_ds.config.parallel import ParallelConfig
from tests.model.test_absent_cluster import TWENTY_B, stage_of

SHAPES = parameter_shapes(TWENTY_B)
WORD_TABLE = "embedding.word_embeddings.weight"


@dataclass(frozen=True)
class Held:
    """What one rank keeps of one parameter under ZeRO 1."""

    rank: int
    name: str
    tp_index: int
    tp_count: int
    start: int
    stop: int


def ranges(layout: LayoutRecord) -> Iterator[Held]:
    """Every rank's ranges: a stage's parameters laid end to end, matrices and vectors apart, in equal shares."""
    tp, dp = layout.tensor_parallel, layout.data_parallel
    parallel = ParallelConfig(tensor_model_parallel_size=tp, pipeline_model_parallel_size=layout.pipeline_parallel)
    for stage in range(layout.pipeline_parallel):
        held = {name: parameter.numel() for name, parameter in stage_of(TWENTY_B, parallel, stage, 0).items()
                if stage == 0 or name != WORD_TABLE}
        for is_vector in (False, True):
            group = {name: numel for name, numel in held.items() if (len(SHAPES[name].shape) == 1) == is_vector}
            share = -(-sum(group.values()) // dp)
            for place in range(dp):
                yield from _share(group, share * place, share * (place + 1), (stage * dp + place) * tp, tp)


def _share(group: dict[str, int], first: int, last: int, rank: int, tp: int) -> Iterator[Held]:
    offset = 0
    for name, numel in group.items():
        start, stop = (min(max(edge - offset, 0), numel) for edge in (first, last))
        offset += numel
        if stop > start:
            for tp_rank in range(tp):
                yield Held(rank + tp_rank, name, tp_rank, tp, start, stop)


def manifest(layout: LayoutRecord) -> Manifest:
    slices: dict[int, dict[str, SliceRecord]] = defaultdict(dict)
    for held in ranges(layout):
        pieces = SHAPES[held.name].pieces(held.tp_count)
        if pieces > 1 or held.tp_index == 0:
            slices[held.rank][f"{WEIGHT}/{held.name}"] = SliceRecord(
                held.tp_index if pieces > 1 else 0, pieces, held.start, held.stop)
    return Manifest(
        step=1, consumed_samples=0, successful_samples=0, skipped_steps=0, optimizer_step=1, loss_scaler=None,
        config={}, layout=layout, versions={}, vocabulary=VocabularyRecord("", 0, ""), metrics={}, parameters=SHAPES,
        files=tuple(FileRecord(rank_file(rank), 0, "", found) for rank, found in sorted(slices.items())))


def numbers(record: ParameterRecord, tp_index: int, tp_count: int, start: int, stop: int) -> Tensor:
    """Elements [start, stop) of a piece of a parameter whose every number tells its place in the whole tensor."""
    place = torch.arange(start, stop)
    if record.cut_dim == 1:
        width = record.shape[1] // tp_count
        place = place // width * record.shape[1] + tp_index * width + place % width
    elif tp_count > 1:
        place = place + tp_index * (record.numel // tp_count)
    return (place % 16_777_213).float()


class WithoutBytes(Checkpoint):
    """A checkpoint whose files are not there: notes what is read of them, and makes up the numbers where wanted."""

    def __init__(self, manifest: Manifest) -> None:
        super().__init__(Path("nowhere"), manifest)
        self.read_of: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
        self.values = False

    def _stored(self, key: str, file: str, record: SliceRecord, start: int, stop: int) -> Tensor:
        assert 0 <= start < stop <= record.stop - record.start
        self.read_of[key, file].append((start, stop))
        if not self.values:
            return torch.empty(stop - start, device="meta")
        return numbers(SHAPES[key.partition("/")[2]], record.tp_index, record.tp_count, record.start + start,
                       record.start + stop)


@pytest.mark.proves("1,024 ranks read every number of a 20B checkpoint of another layout, from its place", "EXACT")
@pytest.mark.parametrize(("saved", "wanted"), [
    (LayoutRecord(4, 4, 8), LayoutRecord(8, 16, 8)), (LayoutRecord(8, 16, 8), LayoutRecord(4, 4, 2)),
    (LayoutRecord(2, 8, 3), LayoutRecord(8, 16, 8))], ids=["128 to 1024", "1024 to 32", "48 to 1024"])
def test_another_cluster_reads_every_number_of_20b(saved: LayoutRecord, wanted: LayoutRecord) -> None:
    checkpoint = WithoutBytes(manifest(saved))
    assert not list(checkpoint.manifest.problems())
    needed = list(ranges(wanted))
    assert {held.rank for held in needed} == set(range(wanted.world_size))
    with torch.device("meta"):
        for held in needed:
            got = checkpoint.read(WEIGHT, held.name, tp_index=held.tp_index, tp_count=held.tp_count, start=held.start,
                                  stop=held.stop)
            assert got.shape == (held.stop - held.start,)
    for file in checkpoint.manifest.files:
        for key, record in file.slices.items():
            assert_whole(checkpoint.read_of[key, file.name], record.stop - record.start)
    checkpoint.values = True
    choose = random.Random(5)
    for held in choose.sample(needed, 200):
        start = choose.randrange(held.start, held.stop)
        stop = min(start + choose.randrange(1, 20_000), held.stop)
        got = checkpoint.read(WEIGHT, held.name, tp_index=held.tp_index, tp_count=held.tp_count, start=start, stop=stop)
        tp_count = SHAPES[held.name].pieces(held.tp_count)
        assert torch.equal(got, numbers(SHAPES[held.name], held.tp_index, tp_count, start, stop)), held


def assert_whole(intervals: list[tuple[int, int]], length: int) -> None:
    end = 0
    for start, stop in sorted(intervals):
        assert start <= end, f"nobody reads elements {end} to {start}"
        end = max(end, stop)
    assert end == length
