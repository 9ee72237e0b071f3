"""torch.compile of the layer: the same numbers, one graph for all layers, and none after the first steps."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from ranks import run_ranks
from tiny_runs import Batch, Case, EngineRun, run_config
from tolerances import OTHER_KERNEL

from bert_ds.model.bert import BertModel, ComputeSettings
from bert_ds.model.dropout import BatchKey
from bert_ds.model.loss import LossSums, PretrainingLoss
from bert_ds.parallel.context import ParallelContext
from bert_ds.training import engine

CASE = Case(dropout=0.1, backend="local", steps=4)
TWO_RANKS = [
    replace(CASE, pp=2, recompute=2),
    replace(CASE, tp=2, sequence_parallel=True, recompute=1, norm="post"),
]


def graphs() -> int:
    """Graphs that this process has compiled so far."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def losses_and_gradients(compile: bool) -> tuple[list[float], dict[str, torch.Tensor], list[int]]:
    """Three training steps with an evaluation after each, in one process; and the graphs compiled by each."""
    run, ctx = run_config(replace(CASE, compile=compile)), ParallelContext.single_process()
    model = BertModel(run.model, ctx, ComputeSettings(rows="padded"))
    model.initialize(run.schedule.seed)
    loss_of = PretrainingLoss(run.model, ctx, LossSums(ctx.device), averaged_over=1)
    losses, counts = [], []
    for step in range(3):
        inputs, labels = next(Batch.draw(step, CASE).micro_batches(4, 0, 1))
        loss = loss_of(model(inputs, BatchKey(7, step, 0)), labels)
        loss.backward()
        with torch.no_grad():
            evaluated = loss_of(model(inputs), labels)
        losses += [float(loss.detach()), float(evaluated)]
        counts.append(graphs())
    return losses, {name: p.grad for name, p in model.named_logical_parameters() if p.grad is not None}, counts


@pytest.mark.proves(
    "a compiled layer: losses and gradients of the plain one, one graph, none after the first "
    "step",
    "OTHER_KERNEL")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_a_compiled_layer_computes_what_the_plain_one_does(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`aot_eager` traces as `inductor` does, and needs no minute of a C++ compiler."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    wanted, gradients, none = losses_and_gradients(compile=False)
    found, compiled_gradients, counts = losses_and_gradients(compile=True)
    assert none == [0, 0, 0]
    assert counts == [2, 2, 2], "one graph for training and one for evaluation, shared by all layers"
    assert not torch._dynamo.utils.counters["graph_break"]
    assert found == pytest.approx(wanted, rel=OTHER_KERNEL["rtol"])
    for name, wanted_gradient in gradients.items():
        scale = float(wanted_gradient.abs().max())
        torch.testing.assert_close(compiled_gradients[name], wanted_gradient, rtol=OTHER_KERNEL["rtol"],
                                   atol=max(OTHER_KERNEL["rtol"] * scale, OTHER_KERNEL["atol"]), msg=name)


def losses_and_graphs(cases: list[Case]) -> list[tuple[list[float], list[float], int]]:
    """Runs on every rank: losses of each case without and with compilation, and the graphs made after two steps."""
    results = []
    for case in cases:
        plain, compiled = EngineRun(case), EngineRun(replace(case, compile=True))
        wanted = plain.steps(case.steps).losses
        first = compiled.steps(2).losses
        before = graphs()
        found = first + compiled.steps(case.steps - 2).losses
        results.append((wanted, found, graphs() - before))
        plain.close()
        compiled.close()
    return results


@pytest.mark.proves("compiled layers with stages, shards and recomputation", "OTHER_KERNEL")
@pytest.mark.long
def test_compilation_serves_stages_shards_and_recomputation() -> None:
    for rank in run_ranks(losses_and_graphs, 2, TWO_RANKS, limit_s=400.0):
        for case, (wanted, found, late) in zip(TWO_RANKS, rank, strict=True):
            assert found == pytest.approx(wanted, rel=OTHER_KERNEL["rtol"]), case
            assert late == 0, case


@pytest.mark.parametrize(("model", "device", "deterministic", "compiler", "compiled"), [
    ({}, "cuda", False, None, True),
    ({}, "cpu", False, None, False),
    ({"compile": True}, "cpu", False, None, True),
    ({"compile": False}, "cuda", False, None, False),
    ({}, "cuda", True, None, False),
    ({"transformer_impl": "transformer_engine"}, "cuda", False, None, False),
    ({}, "cuda", False, "the package triton", False),
])
def test_when_layers_are_compiled(
    model: dict[str, object], device: str, deterministic: bool, compiler: str | None, compiled: bool,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(engine, "missing_compiler", lambda device_type: compiler)
    config = replace(run_config(CASE).model, **{"compile": None, **model})
    settled = engine.settle_compilation(config, torch.device(device), ComputeSettings(deterministic=deterministic))
    assert settled.compile is compiled
    assert ("this machine lacks the package triton" in caplog.text) == (compiler is not None)
