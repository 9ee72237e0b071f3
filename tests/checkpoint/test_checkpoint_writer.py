"""A save that dies at any write, sync or rename leaves the former checkpoint or the whole of the next one."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from killed import deaths, without_waiting_for_the_disk
from safetensors.torch import load_file

from bert_ds.checkpoint import files
from bert_ds.checkpoint.format import WEIGHT, Manifest, SliceRecord, step_of, tag_for
from bert_ds.checkpoint.reader import Checkpoint, find_latest
from bert_ds.checkpoint.tensor_file import TensorSpec, write_tensor_file
from bert_ds.checkpoint.writer import TensorSlice, commit, prepare_folder, superseded, write_rank_file
from bert_ds.errors import CheckpointError
from tests.checkpoint.saved_checkpoints import Layout, content_of, model_config, random_tensors, save

CONFIG = model_config(num_layers=1)
OLD, NEW = random_tensors(CONFIG, seed=1), random_tensors(CONFIG, seed=2)


@pytest.mark.proves("a saver killed at any write, fsync, rename or removal strands nobody", "EXACT")
@pytest.mark.parametrize(("step", "keep_last"), [(200, None), (200, 1), (100, None)],
                         ids=["next step", "the former one goes", "same step again"])
def test_killed_at_any_point_strands_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, keep_last: int | None
) -> None:
    without_waiting_for_the_disk(monkeypatch)
    old, new = (random_tensors(CONFIG, seed=seed, kinds=(WEIGHT,)) for seed in (1, 2))
    save(tmp_path / "before", CONFIG, old, step=100, layout=Layout(tp=2))
    root, seen = tmp_path / "root", []

    def prepare(point: int) -> None:
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(tmp_path / "before", root)

    for _, finished in deaths(lambda: save(root, CONFIG, new, step=step, layout=Layout(tp=2), keep_last=keep_last),
                              prepare):
        folder = find_latest(root, verify_hashes=True)
        assert folder is not None
        weight = Checkpoint.open(folder).read_full("weight", "output_layer.bias")
        seen.append(torch.equal(weight, new["weight/output_layer.bias"]))
        assert seen[-1] or torch.equal(weight, old["weight/output_layer.bias"])
        assert seen[-1] or not finished
        save(root, CONFIG, new, step=300, layout=Layout(dp=2), keep_last=1)
        assert {path.name for path in root.iterdir()} == {"iter_0000300", "latest", "vocabulary-of-the-run.txt"}
    assert seen == sorted(seen), "once the next checkpoint is there, it stays"
    assert set(seen) == {True, False}
    assert len(seen) > 15


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, CONFIG, OLD)
    folder = save(tmp_path, CONFIG, NEW, layout=Layout(tp=2, dp=2))
    weight = Checkpoint.open(folder).read_full("weight", "output_layer.bias")
    assert torch.equal(weight, NEW["weight/output_layer.bias"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000100", "latest", "vocabulary-of-the-run.txt"]
    assert (tmp_path / "latest").read_text() == "iter_0000100\n"


def test_a_disk_that_is_full_at_any_point_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = random_tensors(CONFIG, kinds=(WEIGHT,))
    save(tmp_path, CONFIG, weights)
    before, failures = content_of(tmp_path), 0
    while True:
        touches = itertools.count()

        def full(real: Any, touches: Iterator[int] = touches, last: int = failures) -> Any:
            def touch(*arguments: Any, **keywords: Any) -> Any:
                if next(touches) >= last:
                    raise OSError(errno.ENOSPC, "No space left on device")
                return real(*arguments, **keywords)

            return touch

        with monkeypatch.context() as patch:
            for module, name in ((os, "fsync"), (os, "mkdir"), (files, "_pieces")):
                patch.setattr(module, name, full(getattr(module, name)))
            try:
                save(tmp_path, CONFIG, weights, step=200)
                break
            except CheckpointError as error:
                assert re.search(r"output\.save=.*No space left on device.*Fix: free space", str(error))
        failures += 1
        kept = {path: sha for path, sha in content_of(tmp_path).items() if ".incomplete" not in path}
        assert before.items() <= kept.items() or (tmp_path / "iter_0000200").exists()
    assert failures > 20
    assert find_latest(tmp_path, verify_hashes=True) == tmp_path / "iter_0000200"


def test_what_is_kept(tmp_path: Path) -> None:
    weights = random_tensors(CONFIG, kinds=(WEIGHT,))
    for step in (100, 200, 300, 400, 500, 900):
        save(tmp_path, CONFIG, weights, step=step)

    def gone(step: int, keep_last: int | None, keep_every: int | None = None) -> list[int | None]:
        return sorted(step_of(name) for name in superseded(tmp_path, step, keep_last=keep_last, keep_every=keep_every))

    assert gone(600, None) == []
    assert gone(600, 1) == [100, 200, 300, 400, 500], "900 is of a future that the run has left"
    assert gone(600, 3) == [100, 200, 300]
    assert gone(600, 3, 200) == [100, 300]
    (tmp_path / "iter_0000500" / "rank_00000.safetensors").unlink()
    assert gone(600, 3) == [100, 200], "a broken one does not count"
    assert gone(600, 1) == [100, 200, 300, 400, 500]


def test_nothing_goes_before_its_successor_is_proved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, CONFIG, OLD)
    before = content_of(tmp_path)
    real = files.write_durably

    def rotten(path: Path, buffers: Any) -> files.Digest:
        written = real(path, buffers)
        if path.suffix == ".safetensors":
            with path.open("r+b") as file:
                file.seek(-8, os.SEEK_END)
                file.write(b"\xff")
        return written

    monkeypatch.setattr("bert_ds.checkpoint.tensor_file.write_durably", rotten)
    with pytest.raises(CheckpointError, match="reads back otherwise than it was written"):
        save(tmp_path, CONFIG, NEW, step=200, keep_last=1)
    assert {path: sha for path, sha in content_of(tmp_path).items() if ".incomplete" not in path} == before


def test_a_checkpoint_with_a_hole_is_never_committed(tmp_path: Path) -> None:
    manifest = Checkpoint.open(save(tmp_path, CONFIG, OLD, layout=Layout(tp=2, dp=2))).manifest
    name = "encoder.layers.0.mlp.linear_fc1.weight"

    def with_slices(change: Callable[[str, SliceRecord], SliceRecord | None]) -> Manifest:
        changed = [dataclasses.replace(file, slices={
            key: kept for key, record in file.slices.items() if (kept := change(key, record)) is not None
        }) for file in manifest.files]
        return dataclasses.replace(manifest, files=tuple(changed))

    def shortened(key: str, record: SliceRecord) -> SliceRecord:
        return dataclasses.replace(record, stop=record.stop - 1) if key == f"weight/{name}" else record

    def without_a_moment(key: str, record: SliceRecord) -> SliceRecord | None:
        return None if key == f"exp_avg/{name}" else record

    prepare_folder(tmp_path, tag_for(200))
    holes = (
        (with_slices(shortened), rf"weight/{name}=\[40, 24\]: piece 0 of 2 is saved up to element \d+ of 480 only"),
        (with_slices(without_a_moment), f"exp_avg/{name}=.*was not saved"),
        (dataclasses.replace(manifest, files=()), "hold no weights"),
        (dataclasses.replace(manifest, parameters={}), f"weight/{name}=saved: is no parameter"),
    )
    for broken, message in holes:
        with pytest.raises(CheckpointError, match=message):
            commit(tmp_path, tag_for(200), broken)
    assert find_latest(tmp_path) == tmp_path / tag_for(100)


def test_the_manifest_survives_json(tmp_path: Path) -> None:
    manifest = Checkpoint.open(save(tmp_path, CONFIG, OLD, layout=Layout(tp=2, pp=2, dp=2))).manifest
    assert Manifest.from_json(manifest.to_json()) == manifest
    assert manifest.to_json() == (tmp_path / tag_for(100) / "checkpoint.json").read_bytes()


def test_ranges_are_recorded_and_empty_ones_left_out(tmp_path: Path) -> None:
    folder = prepare_folder(tmp_path, tag_for(1))
    record = write_rank_file(folder, 3, [
        TensorSlice("weight", "a", 1, 2, 4, 7, torch.arange(3.0)),
        TensorSlice("weight", "b", 0, 1, 5, 5, torch.empty(0)),
    ])
    assert record.name == "rank_00003.safetensors"
    assert record.slices == {"weight/a": SliceRecord(1, 2, 4, 7)}
    assert files.Digest(record.bytes, record.sha256) == files.digest(folder / record.name)
    assert torch.equal(load_file(folder / record.name)["weight/a"], torch.arange(3.0))


def test_our_tensor_files_are_read_by_safetensors(tmp_path: Path) -> None:
    tensors = {"half": torch.randn(3, 5).half(), "é": torch.randn(7).bfloat16(), "one": torch.tensor(2.5).double(),
               "turned": torch.randn(4, 6).t(), "none": torch.empty(0, 3)}
    specs = [TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]
    write_tensor_file(tmp_path / "x.safetensors", specs, tensors.values(), {"format": "pt"})
    loaded = load_file(tmp_path / "x.safetensors")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)


@pytest.mark.parametrize(("tag", "step"), [("iter_0000100", 100), ("iter_12345678", 12345678), ("iter_100", None),
                                           ("iter_0000100.incomplete", None), ("", None)])
def test_tags(tag: str, step: int | None) -> None:
    assert step_of(tag) == step
    assert step is None or tag_for(step) == tag
