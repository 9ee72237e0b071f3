"""Transformer Engine's layers and FP8 on a GPU: against PyTorch's layers, through the engine, and over a checkpoint.

Run them with `pytest -m gpu tests/gpu` where Transformer Engine is installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tiny_runs import Case, EngineRun, write_vocabulary
from tolerances import FP8_LOSS, HALF_KERNEL

from bert_ds.cli.launcher import ProcessPlace
from bert_ds.compat import transformer_engine_version
from bert_ds.ops.te_attention import SWITCHES
from bert_ds.parallel.context import ParallelContext
from bert_ds.parallel.linear import column_parallel_linear, row_parallel_linear

pytestmark = [
    pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.skipif(transformer_engine_version() is None, reason="Transformer Engine is not installed")]
TE = {"transformer_impl": "transformer_engine"}
FP8 = {**TE, "fp8_format": "hybrid", "fp8_amax_history_len": 32, "fp8_amax_compute_algo": "max"}
SIZES = {"hidden_size": 128, "num_attention_heads": 8, "compile": False}
"""Heads of 16 and widths that are multiples of 16: what cuDNN and FP8 ask for."""


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    """The process group of one rank, which DeepSpeed's engine asks for."""
    from bert_ds.training.launch import join_process_group  # noqa: PLC0415

    join_process_group(ProcessPlace(0, 0, 1, 1, "none"), torch.device("cuda", 0), timedelta(seconds=60))
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def switches_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    for switch in SWITCHES.values():
        monkeypatch.setenv(switch, "1")
        monkeypatch.delenv(switch)


def run_of(case: Case, folder: Path | None = None, **model: Any) -> EngineRun:
    return EngineRun(case, folder, device=torch.device("cuda", 0), **SIZES, **model)


def forget_other_runs() -> None:
    """Transformer Engine updates the factors of all layers of a process; a process that trains has one run."""
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager  # noqa: PLC0415

    FP8GlobalStateManager.reset()


@pytest.mark.proves("Transformer Engine's linear layers agree with PyTorch's, forward and gradients", "HALF_KERNEL")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", [column_parallel_linear, row_parallel_linear])
def test_linear_layers_agree_with_pytorchs(make: Any, dtype: torch.dtype) -> None:
    ctx = ParallelContext.single_process("cuda")
    ours, theirs = (make(256, 512, ctx, kind).to("cuda", dtype) for kind in ("local", "transformer_engine"))
    with torch.no_grad():
        for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            other.copy_(own.normal_(std=0.05))
    x = torch.randn(1024, 256, device="cuda", dtype=dtype, requires_grad=True)
    upstream = torch.randn(1024, 512, device="cuda", dtype=dtype)
    results = []
    for layer in (ours, theirs):
        y = layer(x)
        results.append([y, *torch.autograd.grad(y, [x, *layer.parameters()], upstream)])
    for found, wanted in zip(results[1], results[0], strict=True):
        assert float((found - wanted).float().norm() / wanted.float().norm()) < HALF_KERNEL[dtype]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_steps_of_the_engine_agree_with_pytorchs_layers(precision: str, packed: bool) -> None:
    case = Case(precision=precision, packed=packed, backend="auto")
    local, theirs = (run_of(case, transformer_impl=kind).steps(3) for kind in ("local", "transformer_engine"))
    assert theirs.losses == pytest.approx(local.losses, rel=HALF_KERNEL[torch.bfloat16])
    assert theirs.norms == pytest.approx(local.norms, rel=5 * HALF_KERNEL[torch.bfloat16])


@pytest.mark.proves("losses of steps in FP8 are near those in bf16", "FP8_LOSS")
@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_losses_in_fp8_are_near_those_in_bf16(recipe: str) -> None:
    case = Case(precision="bf16", backend="auto", steps=4)
    wanted = run_of(case, **TE).steps(4).losses
    found = run_of(case, **FP8, fp8_recipe=recipe).steps(4).losses
    assert found != wanted
    assert found == pytest.approx(wanted, rel=FP8_LOSS)


def test_recomputation_in_fp8_changes_nothing() -> None:
    losses, states = [], []
    for every in (0, 2):
        forget_other_runs()
        run = run_of(Case(precision="bf16", backend="auto", recompute=every, dropout=0.1), **FP8)
        first = run.step()[0]
        states.append({name: tensor.clone() for name, tensor in run.pipeline.fp8.state().items()})
        losses.append((first, run.step()[0]))
    assert losses[1][0] == pytest.approx(losses[0][0], rel=1e-6)
    assert losses[1][1] == pytest.approx(losses[0][1], rel=1e-3)
    for name, tensor in states[0].items():
        if "scaling_fwd" in name:
            assert torch.equal(tensor, states[1][name]), name
    used = [{name: int((tensor > 0).any(dim=1).sum()) for name, tensor in state.items() if "amax" in name}
            for state in states]
    assert used[0] == used[1]


@pytest.mark.proves("FP8 scaling factors go through a checkpoint", "EXACT")
def test_factors_go_through_a_checkpoint(tmp_path: Path) -> None:
    vocabulary = write_vocabulary(tmp_path / "vocab.txt")
    case = Case(precision="bf16", backend="auto")
    straight = run_of(case, tmp_path, **FP8)
    straight.steps(2)
    straight.save(vocabulary)
    saved = {name: tensor.clone() for name, tensor in straight.pipeline.fp8.state().items()}
    assert any(float(tensor.max()) > 1 for tensor in saved.values())
    resumed = run_of(case, tmp_path, **FP8)
    resumed.load(vocabulary)
    for name, tensor in resumed.pipeline.fp8.state().items():
        assert torch.equal(tensor, saved[name]), name
    wanted = straight.steps(2).losses
    assert resumed.steps(2).losses == pytest.approx(wanted, rel=1e-3)
    afresh = run_of(case, tmp_path, **{**FP8, "fp8_amax_history_len": 1})
    afresh.load(vocabulary)
    assert all(float(tensor.max()) <= 1 for tensor in afresh.pipeline.fp8.state().values())
    of_pytorch = run_of(case, tmp_path)
    of_pytorch.load(vocabulary)
    assert of_pytorch.steps(2).losses == pytest.approx(wanted, rel=FP8_LOSS)
