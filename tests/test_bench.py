"""The bench steps real engines, one line a variant."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SIZES = ["--recipe", "tiny", "--num-layers", "1", "--micro-batch-size", "2", "--global-batch-size", "4"]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-m", "bert_ds.bench", *SIZES, *arguments], capture_output=True, text=True,
                          check=False, env=environment, timeout=200)


def test_each_variant_is_a_line_and_a_record(tmp_path: Path) -> None:
    done = bench("--steps", "3", "--warmup", "1", "--short-rows", "0.5", "--out", str(tmp_path / "bench.json"),
                 "--variant=--fp32", "--variant=--bf16 --rows-are-full")
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("--")]
    assert [line.split("  ")[0] for line in lines] == ["--fp32", "--bf16 --rows-are-full"]
    runs = json.loads((tmp_path / "bench.json").read_text())["runs"]
    for run in runs:
        assert run["rows_per_s"] == pytest.approx(4 / run["step_s"])
        # Half of the rows are cut to lengths between a quarter of the row and the whole.
        assert 0.5 * 64 * run["rows_per_s"] < run["tokens_per_s"] < 64 * run["rows_per_s"]
        assert run["mfu"] is run["peak_gib"] is run["kernels"] is None


def test_bad_flags_are_one_message() -> None:
    done = bench("--variant=--hidden-sze 8")
    assert done.returncode == 2
    assert "--hidden-size" in done.stderr
    assert "Traceback" not in done.stderr
