"""`deepspeed bert_ds/pretrain.py` as users run it: not installed, from another folder, killed, stopped, misled."""

from __future__ import annotations

import fcntl
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launched import (
    ROOT,
    SMALL,
    command,
    environment,
    launch,
    make_data,
    outputs,
    records,
    tensor_hashes,
)
from processes import kill_with_descendants

from bert_ds.checkpoint.reader import Checkpoint, find_latest
from bert_ds.compat import check_deepspeed_version
from bert_ds.errors import ConfigError

NO_DROPOUT = ["--hidden-dropout", "0", "--attention-dropout", "0"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return make_data(tmp_path_factory.mktemp("data"))


@pytest.mark.proves("eight ranks and one rank through the launcher, 20 steps", "REDUCTION_ORDER")
@pytest.mark.long
def test_eight_ranks_report_what_one_rank_reports(data: list[str], tmp_path: Path) -> None:
    run = [*data, *NO_DROPOUT, "--train-iters", "20", "--eval-interval", "20"]
    eight = launch(8, [*run, *outputs(tmp_path / "8"), "--tensor-model-parallel-size", "2",
                       "--pipeline-model-parallel-size", "2"], tmp_path)
    assert eight.returncode == 0, eight.stdout + eight.stderr
    one = launch(1, [*run, *outputs(tmp_path / "1")], tmp_path)
    assert one.returncode == 0, one.stdout + one.stderr
    for found, wanted in zip(records(tmp_path / "8"), records(tmp_path / "1"), strict=True):
        for key in ("lm_loss", "sop_loss", "grad_norm"):
            assert found[key] == pytest.approx(wanted[key], rel=1e-5), (found["iteration"], key)
    assert len(records(tmp_path / "1")) == 20
    for text in (eight.stdout, one.stdout):
        assert "validation loss at iteration 20" in text
        assert "test loss at iteration 20" in text


def losses(folder: Path) -> list[tuple[object, object, object]]:
    return [(record["iteration"], record["lm_loss"], record["grad_norm"]) for record in records(folder)]


@pytest.mark.proves("killed three times and resumed: the same curve and files", "EXACT")
@pytest.mark.long
def test_killed_three_times_the_run_gives_the_same_curve(data: list[str], tmp_path: Path) -> None:
    """SIGKILL for the whole job at moments drawn within a save, which is under way most of the time."""
    run = [*data, "--train-iters", "24", "--save-interval", "2", "--keep-last", "2", "--hidden-dropout", "0.1",
           "--pipeline-model-parallel-size", "2"]
    straight = launch(2, [*run, *outputs(tmp_path / "straight")], tmp_path)
    assert straight.returncode == 0, straight.stdout + straight.stderr

    draw, killed_at = random.Random(5), []
    for first, port in ((4, 29573), (8, 29583), (14, 29585)):
        running = subprocess.Popen(command(2, [*run, *outputs(tmp_path / "killed")], port), cwd=tmp_path,
                                   env=environment(), stdout=subprocess.PIPE, text=True, start_new_session=True)
        assert running.stdout is not None
        for line in running.stdout:
            if re.search(rf"iteration +{first}/", line):
                break
        time.sleep(draw.uniform(0, 0.3))
        kill_with_descendants(running.pid)
        running.communicate()
        found = find_latest(tmp_path / "killed" / "checkpoints", verify_hashes=True)
        assert found is not None
        killed_at.append(Checkpoint.open(found).manifest.step)
    assert killed_at == sorted(killed_at)
    assert 2 <= killed_at[0] and killed_at[2] >= 12

    again = launch(2, [*run, *outputs(tmp_path / "killed")], tmp_path)
    assert again.returncode == 0, again.stdout + again.stderr
    assert f"at iteration {killed_at[2]}," in again.stdout
    assert losses(tmp_path / "killed") == losses(tmp_path / "straight")
    assert tensor_hashes(tmp_path / "killed") == tensor_hashes(tmp_path / "straight")
    left = {path.name for path in (tmp_path / "killed" / "checkpoints").iterdir()}
    assert left == {"iter_0000022", "iter_0000024", "latest", ".in_use"}


def test_a_signal_saves_and_ends_the_run(data: list[str], tmp_path: Path) -> None:
    arguments = [sys.executable, str(ROOT / "bert_ds" / "pretrain.py"), "--deepspeed_config", "ds_configs/tiny.json",
                 *SMALL, *data, *outputs(tmp_path), "--train-iters", "100000"]
    running = subprocess.Popen(arguments, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True)
    assert running.stdout is not None
    for line in running.stdout:
        if re.search(r"iteration +3/", line):
            running.send_signal(signal.SIGTERM)
            break
    text = running.stdout.read()
    assert running.wait(60) == 128 + signal.SIGTERM
    assert "stopped by SIGTERM" in text
    found = find_latest(tmp_path / "checkpoints", verify_hashes=True)
    assert found is not None
    assert Checkpoint.open(found).manifest.step >= 3


def pretrain(arguments: list[str], cwd: Path) -> tuple[int, str, float]:
    """One process without a launcher: exit code, all it printed, seconds."""
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(ROOT / "bert_ds" / "pretrain.py"), "--deepspeed_config", "ds_configs/tiny.json", *SMALL,
         *arguments], cwd=cwd, env=environment(), capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout + done.stderr, time.monotonic() - started


def test_a_checkpoint_of_another_model_is_refused(data: list[str], tmp_path: Path) -> None:
    code, text, _ = pretrain([*data, *outputs(tmp_path), "--train-iters", "4"], tmp_path)
    assert code == 0, text
    before = tensor_hashes(tmp_path)
    code, text, _ = pretrain([*data, *outputs(tmp_path), "--train-iters", "4", "--num-layers", "2"], tmp_path)
    assert code == 2
    assert "Traceback" not in text
    assert "model.num_layers=2: the checkpoint's model has 4" in text
    assert tensor_hashes(tmp_path) == before


@pytest.mark.long
def test_a_resumed_run_may_change_its_batch_size_and_length(data: list[str], tmp_path: Path) -> None:
    run = [*data, *outputs(tmp_path), "--eval-interval", "none"]
    code, text, _ = pretrain([*run, "--train-iters", "8", "--exit-interval", "4"], tmp_path)
    assert code == 0, text
    assert "differs" not in text
    larger = [*run, "--global-batch-size", "48"]
    code, text, _ = pretrain([*larger, "--train-iters", "8", "--exit-interval", "7"], tmp_path)
    assert code == 0, text
    told = re.findall(r"\]   (.*)", text.partition("differs from the run that saved the checkpoint (saved -> now)")[2])
    assert told == ["engine.global_batch_size: 16 -> 48"]
    code, text, _ = pretrain([*larger, "--train-iters", "9"], tmp_path)
    assert code == 0, text
    told = re.findall(r"\]   (.*)", text.partition("differs from the run that saved the checkpoint (saved -> now)")[2])
    assert told == ["schedule.train_iters: 8 -> 9", "learning rate of the next update: 3.333e-04 -> 5.714e-04"]
    assert [record["consumed_samples"] for record in records(tmp_path)] == [
        16, 32, 48, 64, 64 + 48, 64 + 96, 64 + 144, 64 + 192, 64 + 240]
    # The curve is in iterations: 2e-3 after two, falling to 0 at eight, later at nine; told is the next update's rate.
    wanted = [*((8 - n) / 6 * 2e-3 for n in range(2, 8)), *((9 - n) / 7 * 2e-3 for n in (8, 9))]
    assert [record["learning_rate"] for record in records(tmp_path)][1:] == pytest.approx(wanted)


@pytest.mark.long
def test_a_folder_in_use_and_damaged_checkpoints(data: list[str], tmp_path: Path) -> None:
    """The run falls back to an intact checkpoint, ends as if it had not been interrupted, and refuses without one."""
    run = [*data, *outputs(tmp_path), "--train-iters", "6", "--save-interval", "2"]
    code, text, _ = pretrain(run, tmp_path)
    assert code == 0, text
    wanted, checkpoints = tensor_hashes(tmp_path), tmp_path / "checkpoints"
    with (checkpoints / ".in_use").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        code, text, _ = pretrain(run, tmp_path)
    assert code == 2, text
    assert "another run saves there" in text
    _flip_a_bit(checkpoints / "iter_0000006")
    (checkpoints / "iter_0000004" / "rank_00000.safetensors").unlink()
    code, text, _ = pretrain(run, tmp_path)
    assert code == 0, text
    assert text.count("is not taken") == 2
    assert "resumed from" in text and "at iteration 2," in text
    assert tensor_hashes(tmp_path) == wanted
    for step in (2, 4, 6):
        _flip_a_bit(checkpoints / f"iter_{step:07d}")
    code, text, _ = pretrain(run, tmp_path)
    assert code == 2, text
    assert text.count("other content than was written") >= 3
    assert "Traceback" not in text


def _flip_a_bit(checkpoint: Path) -> None:
    file = checkpoint / "rank_00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun"])
def test_the_end_of_the_launcher_saves_and_ends_the_run(data: list[str], tmp_path: Path, launcher: str) -> None:
    """`deepspeed` passes SIGTERM on to nobody; torchrun gives its ranks time."""
    start = command(2, [*data, *outputs(tmp_path), "--train-iters", "100000", "--pipeline-model-parallel-size", "2"],
                    29579)
    if launcher == "torchrun":
        torchrun = str(Path(sys.executable).parent / "torchrun")
        start = [torchrun, "--nproc_per_node", "2", "--master_port", "29581", *start[5:]]
    running = subprocess.Popen(start, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True)
    assert running.stdout is not None
    for line in running.stdout:
        if re.search(r"iteration +3/", line):
            running.send_signal(signal.SIGTERM)
            break
    text = running.stdout.read()  # ends when the last process that writes has gone
    running.wait(60)
    assert "stopped by SIGTERM" in text
    assert find_latest(tmp_path / "checkpoints", verify_hashes=True) is not None


@pytest.mark.parametrize(("arguments", "messages"), [
    (["--data-path", "nowhere"], ["nowhere.idx", "bert_ds.preprocess_data", "--output-prefix nowhere"]),
    (["--tensor-model-parallel-size", "3"], ["does not divide the world size 1"]),
    (["--train-itres", "3"], ["--train-itres", "--train-iters"]),
    (["--micro-batch-size", "3"], ["train_batch_size", "15", "18"]),
    (["--load", "nowhere"], ["output.load=nowhere", "is no folder"]),
])
def test_bad_input_is_one_message(data: list[str], tmp_path: Path, arguments: list[str], messages: list[str]) -> None:
    code, text, _ = pretrain([*data, *outputs(tmp_path), *arguments], tmp_path)
    assert code == 2, text
    assert "Traceback" not in text
    for message in messages:
        assert message in text
    assert not list((tmp_path / "checkpoints").glob("iter_*"))


def test_one_rank_that_fails_ends_all_with_one_message(data: list[str], tmp_path: Path) -> None:
    """The index cannot be written: rank 0 says so, rank 1, which waits for it, ends as well."""
    (tmp_path / "file").write_text("")
    done = launch(2, [*data, *outputs(tmp_path), "--data-cache-path", str(tmp_path / "file" / "cache"),
                      "--pipeline-model-parallel-size", "2"], tmp_path)
    text = done.stdout + done.stderr
    assert done.returncode == 2, text
    assert "Traceback" not in text
    assert text.count("error: ") == 1, text
    assert "--data-cache-path" in text


@pytest.mark.parametrize(("version", "reason"), [("0.18.9", "too old"), ("0.19.2", "too old"), ("0.20.0", "newer")])
def test_other_versions_of_deepspeed_are_refused(version: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bert_ds.compat.installed_version", lambda package: version)
    with pytest.raises(ConfigError, match=reason):
        check_deepspeed_version()
