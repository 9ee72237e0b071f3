"""What only a GPU can show: runs that repeat to the bit.

Run them with `pytest -m gpu tests/gpu` on a machine with one NVIDIA GPU.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from launched import launch, make_data, outputs, records, tensor_hashes

from bert_ds.compat import transformer_engine_version

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
NEEDS_TE = pytest.mark.skipif(transformer_engine_version() is None, reason="Transformer Engine is not installed")
FP8 = pytest.param("--bf16 --transformer-impl transformer_engine --fp8-format hybrid", id="fp8", marks=NEEDS_TE)


@pytest.mark.proves("resume on a GPU repeats the run in fp16, bf16, fp32 and FP8", "EXACT")
@pytest.mark.parametrize("precision", ["--fp16", "--bf16", "--fp32", FP8])
def test_resume_repeats_the_run_to_the_bit(precision: str, tmp_path: Path) -> None:
    data = make_data(tmp_path)
    run = [*data, *precision.split(), "--deterministic-mode", "--train-iters", "12", "--hidden-dropout", "0.1",
           "--attention-dropout", "0.1", "--hidden-size", "256"]
    straight = launch(1, [*run, *outputs(tmp_path / "straight")], tmp_path, gpu=True)
    assert straight.returncode == 0, straight.stdout + straight.stderr
    for stop in (["--exit-interval", "6"], []):
        part = launch(1, [*run, *stop, *outputs(tmp_path / "resumed")], tmp_path, gpu=True)
        assert part.returncode == 0, part.stdout + part.stderr
    for found, wanted in zip(records(tmp_path / "resumed"), records(tmp_path / "straight"), strict=True):
        assert (found["lm_loss"], found["grad_norm"]) == (wanted["lm_loss"], wanted["grad_norm"])
    assert tensor_hashes(tmp_path / "resumed") == tensor_hashes(tmp_path / "straight")
