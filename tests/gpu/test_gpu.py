"""What only a GPU can show: half-precision kernels against the formula, and runs that repeat to the bit.

Run them with `pytest -m gpu tests/gpu` on a machine with one NVIDIA GPU.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from launched import launch, make_data, outputs, records, tensor_hashes
from tolerances import HALF_KERNEL

from bert_ds.ops.attention import BACKENDS, AttentionBackend, AttentionQuery, visible_mask
from bert_ds.random_keys import hash_places, seed_generator

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
B, N, S, D = 4, 8, 512, 64


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", ["full", "padded", "packed"])
def test_backends_agree_with_the_formula(rows: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    segments = torch.ones(B, S, dtype=torch.int32, device="cuda")
    if rows == "packed":
        segments[:, 250:] = 2
    if rows != "full":
        segments[::2, 400:] = 0
    real = (segments != 0)[:, None, :, None]
    q, k, v = (torch.randn(B, N, S, D, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3))
    upstream = torch.randn(B, N, S, D, device="cuda", dtype=dtype)
    query = AttentionQuery(rows=rows, dtype=dtype, device_type="cuda", head_dim=D, dropout=0.0)
    results = {}
    for backend in BACKENDS:
        if backend.refusal(query) is None:
            context = backend.kernel(q, k, v, visible_mask(segments, rows), 0.0, None) * real
            results[backend.name] = (context, *torch.autograd.grad(context, (q, k, v), upstream))
    assert {"fused", "unfused", "local"} <= set(results)
    assert ("flash" in results) == (rows == "full")
    for name, tensors in results.items():
        for found, wanted in zip(tensors, results["local"], strict=True):
            relative = float((found - wanted).float().norm() / wanted.float().norm())
            assert relative < HALF_KERNEL[dtype], (name, relative)


def dropped(backend: AttentionBackend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seed: int) -> torch.Tensor:
    """Attention with a quarter dropped."""
    seed_generator(q.device, seed)
    hashes_BN = hash_places(torch.tensor(seed, dtype=torch.int32, device=q.device), torch.arange(
        q.size(0) * q.size(1), dtype=torch.int32, device=q.device).view(q.shape[:2]))
    return backend.kernel(q, k, v, None, 0.25, hashes_BN)


@pytest.mark.parametrize("backend", BACKENDS,
                         ids=lambda backend: backend.name)
def test_dropout_follows_its_seed(backend: AttentionBackend) -> None:
    q, k = (torch.zeros(B, N, S, D, device="cuda", dtype=torch.float16) for _ in range(2))
    v = torch.ones_like(q)
    first, again, other = (dropped(backend, q, k, v, seed) for seed in (5, 5, 6))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert float(first.float().mean()) == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("precision", ["--fp16", "--bf16", "--fp32"])
def test_resume_repeats_the_run_to_the_bit(precision: str, tmp_path: Path) -> None:
    data = make_data(tmp_path)
    run = [*data, precision, "--deterministic-mode", "--train-iters", "12", "--hidden-dropout", "0.1",
           "--attention-dropout", "0.1", "--hidden-size", "256"]
    straight = launch(1, [*run, *outputs(tmp_path / "straight")], tmp_path, gpu=True)
    assert straight.returncode == 0, straight.stdout + straight.stderr
    for stop in (["--exit-interval", "6"], []):
        part = launch(1, [*run, *stop, *outputs(tmp_path / "resumed")], tmp_path, gpu=True)
        assert part.returncode == 0, part.stdout + part.stderr
    for found, wanted in zip(records(tmp_path / "resumed"), records(tmp_path / "straight"), strict=True):
        assert (found["lm_loss"], found["grad_norm"]) == (wanted["lm_loss"], wanted["grad_norm"])
    assert tensor_hashes(tmp_path / "resumed") == tensor_hashes(tmp_path / "straight")
