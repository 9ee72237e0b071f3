"""Ranks agree on the newest intact checkpoint, on one disk or on one a machine, killed saves included."""

from __future__ import annotations

import hashlib
import logging
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from killed import deaths, without_waiting_for_the_disk
from thread_ranks import on_ranks

from bert_ds.checkpoint.format import LATEST_FILE, MANIFEST_FILE, WEIGHT, LayoutRecord, VocabularyRecord, rank_file
from bert_ds.checkpoint.reader import Checkpoint
from bert_ds.checkpoint.writer import TensorSlice
from bert_ds.config.output import OutputConfig
from bert_ds.errors import CheckpointError, SoundCheckpointError
from bert_ds.training.coordination import Coordinator
from bert_ds.training.disks import Disks, find_disks
from bert_ds.training.intact import find_intact
from bert_ds.training.save import Target, write_checkpoint
from tests.checkpoint.saved_checkpoints import Layout, manifest_of, model_config, random_tensors, slices_of_ranks

CONFIG = model_config(num_layers=1)
OLD, NEW = (random_tensors(CONFIG, seed=seed, kinds=(WEIGHT,)) for seed in (1, 2))
LAYOUT = Layout(tp=2)
BIAS = "output_layer.bias"
ONE_DISK, TWO_DISKS = ("shared", "shared"), ("first", "second")


@pytest.fixture(autouse=True)
def impatient_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bert_ds.training.coordination._POLL_S", 0.0005)


def write(root: Path, places: tuple[str, ...], step: int, tensors: dict[str, torch.Tensor], **keep: int) -> None:
    """Saves as two tensor-parallel ranks, each into its place below `root`."""
    slices = list(slices_of_ranks(CONFIG, tensors, LAYOUT))

    def body(ranks: Coordinator) -> int:
        folder = root / places[ranks.rank]
        disks = find_disks(folder, ranks)
        own = [*slices[ranks.rank], *(_replicated(slices[0]) if disks.leads(ranks.rank) and ranks.rank else ())]
        target = Target(OutputConfig(save=str(folder), **keep), disks, b"[PAD]\n", 0)  # type: ignore[arg-type]
        manifest = manifest_of(CONFIG, step, LAYOUT, "BertWordPieceCase", VocabularyRecord("", 1, ""), ())
        return write_checkpoint(target, ranks, replace(manifest, vocabulary=_vocabulary()), own)

    sizes = on_ranks(body, ranks=2)
    assert all(isinstance(size, int) for size in sizes), sizes


def _replicated(of_first: list[TensorSlice]) -> Iterator[TensorSlice]:
    return (piece for piece in of_first if piece.tp_count == 1)


def _vocabulary() -> VocabularyRecord:
    return VocabularyRecord(hashlib.sha256(b"[PAD]\n").hexdigest(), 1, "BertWordPieceCase")


def find(root: Path, places: tuple[str, ...], layout: Layout = LAYOUT, **options: Any) -> list[Any]:
    """What each of two ranks, which look at their places below `root`, goes on from, or raises."""
    grid = LayoutRecord(layout.tp, layout.pp, layout.dp)
    return on_ranks(lambda ranks: find_intact(root / places[ranks.rank], grid, ranks, **options), ranks=2)


def biases(found: list[Any]) -> list[torch.Tensor]:
    """What each rank reads of a parameter that is cut in two."""
    return [checkpoint.read("weight", BIAS, tp_index=rank, tp_count=2) for rank, checkpoint in enumerate(found)]


def expected(tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return tensors[f"weight/{BIAS}"].chunk(2)


@pytest.fixture
def two_saves(tmp_path: Path) -> Path:
    for step, tensors in ((100, OLD), (200, NEW)):
        write(tmp_path, ONE_DISK, step, tensors)
    return tmp_path


@pytest.mark.proves("a job killed at any write, fsync or rename of a save resumes from an intact checkpoint", "EXACT")
@pytest.mark.parametrize(("places", "step", "keep"), [
    (ONE_DISK, 100, {}), (TWO_DISKS, 100, {}), (TWO_DISKS, 200, {"keep_last": 1}),
], ids=["one disk, same step again", "two disks, same step again", "two disks, the former ones go"])
def test_a_job_killed_at_any_point_of_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, places: tuple[str, ...], step: int, keep: dict[str, int]
) -> None:
    without_waiting_for_the_disk(monkeypatch)
    write(tmp_path / "before", places, 50, OLD)
    write(tmp_path / "before", places, 100, OLD)
    root, seen = tmp_path / "root", set()

    def prepare(point: int) -> None:
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(tmp_path / "before", root)

    for _, finished in deaths(lambda: write(root, places, step, NEW, **keep), prepare):
        found = find(root, places)
        assert all(isinstance(one, Checkpoint) for one in found), found
        is_new = all(map(torch.equal, biases(found), expected(NEW)))
        assert is_new or all(map(torch.equal, biases(found), expected(OLD)))
        assert is_new or not finished
        seen.add(is_new)
    assert seen == {True, False}
    assert [one.folder.name for one in find(root, places)] == [f"iter_{step:07d}"] * 2
    left = {path.name for place in places for path in (root / place).iterdir()}
    assert left == {f"iter_{step:07d}", LATEST_FILE} | (set() if keep else {"iter_0000050"})


def _flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "lost": (rank_file(1), Path.unlink, "is missing"),
    "truncated": (rank_file(1), lambda path: path.write_bytes(path.read_bytes()[:-9]), "bytes and should have"),
    "flipped in the share of rank 0": (rank_file(0), _flip_a_bit, "other content"),
    "flipped in the share of rank 1": (rank_file(1), _flip_a_bit, "other content"),
    "half a manifest": (MANIFEST_FILE, lambda path: path.write_bytes(path.read_bytes()[:999]), "cannot be read"),
    "no manifest": (MANIFEST_FILE, Path.unlink, "saving it was never finished"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_all_ranks_fall_back_to_the_same_older_one(
    two_saves: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    name, spoil, reason = DAMAGES[damage]
    spoil(two_saves / "shared" / "iter_0000200" / name)
    with caplog.at_level(logging.INFO, logger="bert_ds"):
        assert all(map(torch.equal, biases(find(two_saves, ONE_DISK)), expected(OLD)))
    told = [record.message for record in caplog.records if "is not taken" in record.message]
    assert len(told) == 1
    assert "iter_0000200 is not taken" in told[0]
    assert reason in told[0]
    assert "going on from" in caplog.text
    for refused in (find(two_saves, ONE_DISK, step=200), find(two_saves / "shared", ("iter_0000200",) * 2)):
        if damage != "no manifest" or refused[0] is not None:  # a folder without manifest is no checkpoint at all
            assert all(isinstance(one, CheckpointError) for one in refused)
            assert reason in str(refused[0])


def test_none_intact_is_refused_with_all_reasons(two_saves: Path) -> None:
    for step in (100, 200):
        _flip_a_bit(two_saves / "shared" / f"iter_{step:07d}" / rank_file(1))
    for error in find(two_saves, ONE_DISK):
        assert isinstance(error, CheckpointError)
        assert "iter_0000200" in str(error) and "iter_0000100" in str(error)


def test_a_step_that_is_named(two_saves: Path) -> None:
    assert all(map(torch.equal, biases(find(two_saves, ONE_DISK, step=100)), expected(OLD)))
    for error in find(two_saves, ONE_DISK, step=150):
        assert "holds those of iterations 100, 200" in str(error)
    assert find(two_saves / "nothing", ONE_DISK) == [None, None]


def test_latest_decides_and_newer_ones_are_told(two_saves: Path, caplog: pytest.LogCaptureFixture) -> None:
    (two_saves / "shared" / LATEST_FILE).write_text("iter_0000100\n")
    with caplog.at_level(logging.INFO, logger="bert_ds"):
        assert all(map(torch.equal, biases(find(two_saves, ONE_DISK)), expected(OLD)))
    assert "iter_0000200 is not taken: `latest` names iter_0000100; --ckpt-step 200 would take it" in caplog.text


def test_what_is_not_damage_does_not_fall_back(two_saves: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.read_bytes

    def denied(path: Path) -> bytes:
        if path.parent.name == "iter_0000200":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(Path, "read_bytes", denied)
    for error in find(two_saves, ONE_DISK):
        assert isinstance(error, SoundCheckpointError)
        assert "Permission denied" in str(error)


def test_disks_are_found_by_looking(tmp_path: Path) -> None:
    places = ("a", "b", "a", "b", "c")
    found = on_ranks(lambda ranks: find_disks(tmp_path / places[ranks.rank], ranks), ranks=5)
    assert {disks.of_rank for disks in found} == {(0, 1, 0, 1, 4)}
    assert [found[0].leads(rank) for rank in range(5)] == [True, True, False, False, True]
    assert [record.ranks for record in found[0].records()] == [(0, 2), (1, 3), (4,)]
    assert Disks((0, 0), ("x", "y")).records() == ()
    assert not list(tmp_path.glob("*/*"))


def test_disks_of_their_own(tmp_path: Path) -> None:
    """The same ranks go on where they were; a part that is lost, or elsewhere, is named; copied together, it is one."""
    write(tmp_path, TWO_DISKS, 100, OLD)
    first, second = (tmp_path / place / "iter_0000100" for place in TWO_DISKS)
    assert not (first / rank_file(1)).exists() and (second / MANIFEST_FILE).exists()
    assert all(map(torch.equal, biases(find(tmp_path, TWO_DISKS)), expected(OLD)))
    replicated = [one.read("weight", "encoder.final_layernorm.weight") for one in find(tmp_path, TWO_DISKS)]
    assert torch.equal(replicated[0], replicated[1])

    for errors, message in (
        (find(tmp_path, ("second", "first")), "the part of rank 0 was saved on the disk of"),
        (find(tmp_path, TWO_DISKS, Layout(dp=2)), "can only be resumed in the layout that saved it"),
        (find(tmp_path, (*ONE_DISK[:1], "second")), "is not the same on the disks"),
    ):
        for error in errors:
            assert isinstance(error, CheckpointError), message
            assert message in str(error) or "is no folder" in str(error)

    second.rename(tmp_path / "second" / "moved")
    for error in find(tmp_path, TWO_DISKS):
        assert re.search(r"second/iter_0000100: is no folder on .+, the machine of rank 1", str(error))
    (tmp_path / "second" / "moved").rename(second)

    together = tmp_path / "together"
    for source in (first, second):
        shutil.copytree(source, together / "iter_0000100", dirs_exist_ok=True)
    found = find(tmp_path, ("together", "together"), Layout(dp=2))
    assert torch.equal(found[1].read_full("weight", BIAS), OLD[f"weight/{BIAS}"])

    (second / rank_file(1)).unlink()
    for error in find(tmp_path, TWO_DISKS):
        assert f"{rank_file(1)}: is missing; it was saved on the disk of" in str(error)
