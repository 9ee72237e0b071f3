"""Kernels compared on a CPU: what serves is trained, what does not is written down."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launched import make_data

import compare_kernels

pytestmark = pytest.mark.long


def test_losses_of_what_serves_and_reasons_of_what_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    data = make_data(tmp_path)
    code = compare_kernels.main([
        "--recipe", "tiny", *data, "--steps", "3", "--micro-batch-size", "2", "--global-batch-size", "4",
        "--output", str(tmp_path / "kernels"), "--only", "bf16 PyTorch unfused", "bf16 PyTorch flash",
        "bf16 Transformer Engine fused", "bf16 PyTorch local"])
    assert code == 0
    runs = json.loads((tmp_path / "kernels.json").read_text())["runs"]
    unfused, flash, fused, local = runs.values()
    assert len(unfused["losses"]) == 3
    assert unfused["attention"].startswith("unfused (PyTorch math, key mask) for padded rows in bfloat16")
    assert local["losses"] == pytest.approx(unfused["losses"], rel=1e-2)
    assert "model.attention_backend=flash" in flash["refused"]
    assert "Transformer Engine is not installed" in fused["refused"]
    assert (tmp_path / "kernels.png").stat().st_size > 10_000
