"""Any range of any cut is read right from any layout, and nothing that is not whole is read at all."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from bert_ds.checkpoint.format import KINDS, LATEST_FILE, MANIFEST_FILE
from bert_ds.checkpoint.parameters import parameter_shapes
from bert_ds.checkpoint.reader import Checkpoint, find_latest, locate
from bert_ds.errors import CheckpointError, SoundCheckpointError
from tests.checkpoint.saved_checkpoints import Layout, cut, model_config, random_tensors, save

CONFIG = model_config()
TENSORS = random_tensors(CONFIG)
LAYOUTS = [Layout(), Layout(tp=2), Layout(tp=4, dp=3), Layout(pp=2, dp=2), Layout(tp=2, pp=2, dp=2)]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[Layout, Checkpoint]:
    root = tmp_path_factory.mktemp("layouts")
    return {layout: Checkpoint.open(save(root / str(number), CONFIG, TENSORS, layout=layout), verify_hashes=True)
            for number, layout in enumerate(LAYOUTS)}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_everything_comes_back_whole(checkpoints: dict[Layout, Checkpoint], layout: Layout) -> None:
    checkpoint = checkpoints[layout]
    assert set(checkpoint.manifest.parameters) == set(parameter_shapes(CONFIG))
    assert checkpoint.manifest.layout.world_size == len(checkpoint.manifest.files) == layout.tp * layout.pp * layout.dp
    for key, expected in TENSORS.items():
        kind, _, name = key.partition("/")
        assert torch.equal(checkpoint.read_full(kind, name), expected), key


@pytest.mark.proves("any range of a checkpoint from any cut", "EXACT")
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_range_of_any_cut(checkpoints: dict[Layout, Checkpoint], data: st.DataObject) -> None:
    checkpoint = checkpoints[data.draw(st.sampled_from(LAYOUTS))]
    name = data.draw(st.sampled_from(sorted(parameter_shapes(CONFIG))))
    kind, tp_count = data.draw(st.sampled_from(KINDS)), data.draw(st.sampled_from([1, 2, 4]))
    tp_index = data.draw(st.integers(0, tp_count - 1))
    piece = cut(TENSORS[f"{kind}/{name}"], parameter_shapes(CONFIG)[name], tp_index, tp_count).flatten()
    start = data.draw(st.integers(0, piece.numel()))
    stop = data.draw(st.integers(start, piece.numel()))
    got = checkpoint.read(kind, name, tp_index=tp_index, tp_count=tp_count, start=start, stop=stop)
    assert torch.equal(got, piece[start:stop])


def test_only_what_overlaps_is_read(checkpoints: dict[Layout, Checkpoint], monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = checkpoints[Layout(tp=2, pp=2, dp=2)]
    read: list[int] = []
    stored = Checkpoint._stored

    def counting(self, key, file, record, start, stop):  # type: ignore[no-untyped-def]
        read.append(stop - start)
        return stored(self, key, file, record, start, stop)

    monkeypatch.setattr(Checkpoint, "_stored", counting)
    checkpoint.read("weight", "encoder.layers.1.mlp.linear_fc1.weight", tp_index=1, tp_count=2, start=7, stop=19)
    assert sum(read) == 12
    read.clear()
    checkpoint.read("weight", "encoder.layers.1.mlp.linear_fc2.weight", tp_index=1, tp_count=2, start=7, stop=19)
    assert sum(read) == 20  # the one row of width 40 / 2 that holds the range


def test_files_are_plain_safetensors(checkpoints: dict[Layout, Checkpoint]) -> None:
    checkpoint = checkpoints[Layout(tp=2)]
    with safe_open(checkpoint.folder / "rank_00001.safetensors", framework="pt") as opened:
        stored = opened.get_tensor("exp_avg/output_layer.bias")
    assert stored.dtype == torch.float32
    assert torch.equal(stored, TENSORS["exp_avg/output_layer.bias"][CONFIG.padded_vocab_size // 2 :])


def test_an_unknown_parameter_or_kind_is_refused(tmp_path: Path) -> None:
    weights = {key: value for key, value in TENSORS.items() if key.startswith("weight/")}
    checkpoint = Checkpoint.open(save(tmp_path, CONFIG, weights))
    assert checkpoint.manifest.kinds == ("weight",)
    for kind, name in (("weight", "no.such.weight"), ("exp_avg", "output_layer.bias")):
        with pytest.raises(CheckpointError, match=rf"{kind}/{name}: is not in the checkpoint.*Fix: "):
            checkpoint.read(kind, name)


@pytest.fixture
def two_saves(tmp_path: Path) -> Path:
    for step in (100, 200):
        save(tmp_path, CONFIG, TENSORS, step=step, layout=Layout(tp=2))
    return tmp_path


def _flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)


def _change_a_number(path: Path) -> None:
    path.write_text(path.read_text().replace('"consumed_samples": 6400', '"consumed_samples": 6401'))


def _claim_a_newer_format(path: Path) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), "format_version": 99}))


def _cut_to(share: float) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])


DAMAGES = {
    "lost": ("rank_00001.safetensors", Path.unlink, "rank_00001.safetensors: is missing"),
    "truncated": ("rank_00001.safetensors", _cut_to(0.9), "bytes and should have"),
    "flipped": ("rank_00000.safetensors", _flip_a_bit, r"other content than was written \(SHA-256\)"),
    "no manifest": (MANIFEST_FILE, Path.unlink, "saving it was never finished"),
    "half a manifest": (MANIFEST_FILE, _cut_to(0.5), "cannot be read as a manifest"),
    "empty manifest": (MANIFEST_FILE, lambda path: path.write_text("[]"), "cannot be read as a manifest"),
    "changed manifest": (MANIFEST_FILE, _change_a_number, "does not match its own hash"),
    "vocabulary": ("vocab.txt", lambda path: path.write_text("[PAD]\n"), "is not the vocabulary that was saved"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named_and_the_former_checkpoint_taken(
    two_saves: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert find_latest(two_saves, verify_hashes=True) == two_saves / "iter_0000200"
    file, spoil, message = DAMAGES[damage]
    spoil(two_saves / "iter_0000200" / file)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(two_saves / "iter_0000200", verify_hashes=True)
    with caplog.at_level(logging.WARNING, logger="bert_ds"):
        assert find_latest(two_saves, verify_hashes=True) == two_saves / "iter_0000100"
    assert "iter_0000200 cannot be used" in caplog.text
    assert "resuming from iter_0000100, the newest complete checkpoint" in caplog.text


@pytest.mark.parametrize("step", [100, 200])
def test_a_newer_format_is_no_damage(two_saves: Path, step: int) -> None:
    """Going on from an older one would throw away what the newer program has trained."""
    _claim_a_newer_format(two_saves / f"iter_{step:07d}" / MANIFEST_FILE)
    (two_saves / LATEST_FILE).write_text(f"iter_{step:07d}")
    with pytest.raises(SoundCheckpointError, match=r"format_version=99: .* newer than the version 3 .*Fix: "):
        find_latest(two_saves)


@pytest.mark.parametrize("content", [None, b"", b"iter_0000300\n", b"\xff\x00garbage"])
def test_a_latest_that_names_nothing_falls_back_to_the_newest(two_saves: Path, content: bytes | None) -> None:
    (two_saves / LATEST_FILE).unlink()
    if content is not None:
        (two_saves / LATEST_FILE).write_bytes(content)
    assert find_latest(two_saves) == two_saves / "iter_0000200"


def test_latest_may_name_an_earlier_one(two_saves: Path) -> None:
    (two_saves / LATEST_FILE).write_text("iter_0000100")
    assert find_latest(two_saves) == two_saves / "iter_0000100"


def test_a_folder_without_a_checkpoint_is_a_new_run_but_broken_ones_are_not(two_saves: Path, tmp_path: Path) -> None:
    assert find_latest(tmp_path / "not there") is None
    (tmp_path / "fresh" / "iter_0000100.incomplete").mkdir(parents=True)
    assert find_latest(tmp_path / "fresh") is None
    for folder in two_saves.glob("iter_*00"):
        (folder / MANIFEST_FILE).unlink()
    with pytest.raises(CheckpointError, match=r"iter_0000200.*\n.*iter_0000100"):
        find_latest(two_saves)


def test_locate_takes_a_checkpoint_or_the_folder_above(two_saves: Path) -> None:
    assert locate(two_saves) == two_saves / "iter_0000200"
    assert locate(two_saves / "iter_0000100") == two_saves / "iter_0000100"
    (two_saves / "empty").mkdir()
    for path, reason in ((two_saves / "empty", "holds no checkpoint"), (two_saves / "latest", "is no folder")):
        with pytest.raises(CheckpointError, match=f"{path}: {reason}.*Fix: give the folder"):
            locate(path)


def test_a_damaged_file_behind_a_whole_manifest_is_reported_when_read(two_saves: Path) -> None:
    checkpoint = Checkpoint.open(two_saves / "iter_0000200")
    path = checkpoint.folder / "rank_00000.safetensors"
    path.write_bytes(b"\xff" * path.stat().st_size)
    with pytest.raises(CheckpointError, match=r"rank_00000\.safetensors: cannot be read"):
        checkpoint.read_full("weight", "output_layer.bias")
