"""The two-phase recipe: what it would start, and a small one that is interrupted in either phase."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from launched import ROOT, environment, make_data

from bert_ds.checkpoint.reader import Checkpoint, find_latest

SCRIPT = ROOT / "recipes" / "two_phases.sh"


def run(arguments: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(SCRIPT), *arguments], env={**os.environ, **environment(), **variables},
                          capture_output=True, text=True, timeout=280, check=False)


def test_both_phases_are_planned(tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in ("checkpoints", "logs", "vocab.txt", "corpus")]
    done = run(["340m", *paths], DRY_RUN="1", FLAGS_1="--micro-batch-size 2")
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = done.stdout.split("Dry run of 340m")[1:]
    for text, wanted in ((first, ("128", "900000", "2")), (second, ("512", "100000", "4"))):
        lines = [line.split() for line in text.splitlines()]
        for setting, value in zip(("model.seq_length", "schedule.train_iters", "engine.micro_batch_size"), wanted,
                                  strict=True):
            assert any(line[:2] == [setting, value] for line in lines), (setting, value, text)
    assert run(["340m"]).returncode == 2


@pytest.mark.long
def test_two_small_phases_interrupted_in_each(tmp_path: Path) -> None:
    _, data, _, vocabulary, *_ = make_data(tmp_path)
    command = ["tiny", str(tmp_path / "saved"), str(tmp_path / "logs"), vocabulary, data, "--micro-batch-size", "2",
               "--global-batch-size", "8", "--lr-warmup-iters", "1", "--eval-iters", "1", "--split", "8,1,1"]
    settings = {"ITERS_1": "6", "ITERS_2": "4", "LENGTH_1": "32", "LENGTH_2": "64", "GPUS_PER_NODE": "1"}

    def step_of(phase: int) -> int:
        found = find_latest(tmp_path / "saved" / f"phase{phase}", verify_hashes=True)
        return Checkpoint.open(found).manifest.step if found else -1

    for flags, wanted in (({"FLAGS_1": "--exit-interval 4"}, (4, -1)), ({"FLAGS_2": "--exit-interval 3"}, (6, 3)),
                          ({}, (6, 4))):
        done = run(command, **settings, **flags)
        assert done.returncode == 0, done.stdout + done.stderr
        assert (step_of(1), step_of(2)) == wanted, done.stdout
