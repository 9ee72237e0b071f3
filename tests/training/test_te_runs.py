"""Runs whose layers a stand-in for Transformer Engine computes: layouts, checkpoints, scaling factors."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import fake_te
import pytest
import torch
from ranks import run_ranks
from tiny_runs import Case, EngineRun, write_vocabulary
from tolerances import REDUCTION_ORDER

FP8: dict[str, Any] = {"transformer_impl": "transformer_engine", "fp8_format": "hybrid", "fp8_amax_history_len": 4}
SEQUENCE_PARALLEL, DATA_PARALLEL = Case(tp=2, sequence_parallel=True, recompute=2), Case()


def install() -> None:
    """The stand-in, for the life of this rank; its attention would need a GPU."""
    from bert_ds.ops import attention  # noqa: PLC0415

    fake_te.install(pytest.MonkeyPatch(), Path(tempfile.mkdtemp()))
    attention.BACKENDS["transformer_engine"] = attention.BACKENDS["local"]  # type: ignore[index]


def trained_and_resumed(folder: str, vocab_file: str) -> dict[str, Any]:
    """Two steps by each implementation; then the saved run goes on in its layout, in another, and without FP8."""
    install()
    vocabulary = Path(vocab_file)
    local = EngineRun(SEQUENCE_PARALLEL)
    local_losses = local.steps(4).losses
    run = EngineRun(SEQUENCE_PARALLEL, Path(folder), **FP8)
    losses = run.steps(2).losses
    for tensor in run.pipeline.fp8.state().values():
        tensor.uniform_(1 + run.ctx.rank, 2 + run.ctx.rank)
    saved = {name: tensor.clone() for name, tensor in run.pipeline.fp8.state().items()}
    run.save(vocabulary)
    resumed, elsewhere, without = (EngineRun(case, Path(folder), **settings) for case, settings in (
        (SEQUENCE_PARALLEL, FP8), (DATA_PARALLEL, FP8), (SEQUENCE_PARALLEL, {})))
    for one in (resumed, elsewhere, without):
        one.load(vocabulary)
    return {
        "losses": losses + resumed.steps(2).losses, "local": local_losses, "without": without.steps(2).losses,
        "restored": all(torch.equal(saved[name], tensor) for name, tensor in resumed.pipeline.fp8.state().items()),
        "afresh": all(float(tensor.max()) <= 1 for tensor in elsewhere.pipeline.fp8.state().values()),
        "tensors": len(saved)}


@pytest.mark.proves("layers of Transformer Engine train as PyTorch's, with a stand-in; FP8 factors over a checkpoint",
                    "REDUCTION_ORDER", "EXACT")
def test_transformer_engine_fills_the_slots_and_keeps_its_own_state(tmp_path: Path) -> None:
    vocab_file = write_vocabulary(tmp_path / "vocab.txt")
    for found in run_ranks(trained_and_resumed, 2, str(tmp_path / "saved"), str(vocab_file)):
        assert found["losses"] == pytest.approx(found["local"], rel=REDUCTION_ORDER["rtol"])
        assert found["without"] == pytest.approx(found["local"][2:], rel=REDUCTION_ORDER["rtol"])
        assert found["restored"] and found["afresh"]
        assert found["tensors"] == 5 * 4 * 4
