"""fp16 with DeepSpeed's real loss scaler on a CPU, and bf16 with fp32 accumulation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from ranks import run_ranks
from tiny_runs import Case, EngineRun, allow_fp16_on_cpu, losses_of, reference
from tolerances import BF16, BF16_GRADIENT

from bert_ds.training.engine import LossScaleCollapse, loss_scale, train_step
from bert_ds.training.fragments import fragments, moments


def overflow_on_one_rank(case: Case) -> dict[str, object]:
    """Steps 1, 2 and 4 of 5 meet an infinite gradient on the last rank alone."""
    allow_fp16_on_cpu()
    run = EngineRun(case)
    poisoned = {"now": False}
    last = run.ctx.rank == run.ctx.world_size - 1
    victim = next(local.parameter for local in run.pipeline.local_parameters() if "layers" in local.name)
    victim.register_hook(lambda grad: torch.full_like(grad, float("inf")) if poisoned["now"] and last else grad)
    scales, skipped, weights = [], [], []
    for step in range(5):
        poisoned["now"] = step in {1, 2, 4}
        before = victim.detach().clone()
        run.step()
        scales.append(loss_scale(run.engine))
        skipped.append(run.state.skipped_steps)
        weights.append(bool((victim.detach() == before).all()))
    result = {"scales": scales, "skipped": skipped, "unchanged": weights,
              "samples": (run.state.consumed_samples, run.state.successful_samples)}
    run.close()
    return result


@pytest.mark.proves("overflow on one rank skips the step on all; the scale follows DeepSpeed's table", "EXACT")
@pytest.mark.parametrize("case", [Case(pp=2, precision="fp16"), Case(tp=2, precision="fp16"),
                                  Case(micro_batch=8, precision="fp16"),
                                  Case(pp=2, precision="fp16", schedule="dualpipev")],
                         ids=["pp2", "tp2", "dp2", "dualpipev"])
def test_overflow_on_one_rank_skips_the_step_on_all(case: Case) -> None:
    for rank, found in enumerate(run_ranks(overflow_on_one_rank, 2, case)):
        # Hysteresis 2: the first overflow is free, every further one halves the scale.
        assert found["scales"] == [2.0**16, 2.0**16, 2.0**15, 2.0**15, 2.0**14], rank
        assert found["skipped"] == [0, 1, 2, 2, 3], rank
        assert found["unchanged"] == [False, True, True, False, True], rank
        assert found["samples"] == (80, 32), rank


@pytest.mark.proves("bf16 and fp16 follow fp32", "BF16")
def test_bf16_and_fp16_follow_fp32() -> None:
    cases = [Case(pp=2, precision="bf16"), Case(tp=2, precision="bf16"), Case(pp=2, precision="fp16"),
             Case(pp=2, precision="bf16", schedule="dualpipev"), Case(pp=2, precision="fp16", schedule="dualpipev")]
    wanted = torch.tensor(reference(Case())[0].losses)
    for results in run_ranks(losses_of, 2, cases):
        for case, losses in zip(cases, results, strict=True):
            torch.testing.assert_close(torch.tensor(losses), wanted, **BF16, msg=lambda t, case=case: f"{case}: {t}")


def first_moments(case: Case) -> dict[str, np.ndarray]:
    """Adam's first moment of what this rank owns, flat, after one step: a tenth of the clipped gradient."""
    run = EngineRun(case)
    run.steps(1)
    found = {fragment.local.name: fragment.of(moments(run.engine, fragment.master)["exp_avg"]).numpy().copy()
             for fragment in fragments(run.engine)}
    run.close()
    return found


UNTIED = {"untie_embeddings_and_output_weights": True}


@pytest.mark.proves("every gradient of a step in bf16 is that of fp32", "BF16_GRADIENT")
@pytest.mark.parametrize("case", [Case(), Case(model=UNTIED), Case(pp=2), Case(pp=2, schedule="dualpipev")],
                         ids=["one rank", "untied", "pp2", "dualpipev"])
def test_no_gradient_is_lost_in_bf16(case: Case) -> None:
    ranks = run_ranks(first_moments, case.pp, replace(case, precision="bf16"))
    found = {name: moment for rank in ranks for name, moment in rank.items()}
    _, kept = reference(Case(steps=1, model=case.model))
    wanted = {name: state["exp_avg"].flatten().numpy() for name, state in kept.items()}
    assert found.keys() == wanted.keys()
    for name, moment in wanted.items():
        # The bias of the keys has no gradient in exact arithmetic.
        difference = np.linalg.norm(found[name] - moment) / max(float(np.linalg.norm(moment)), 1e-4)
        assert difference < BF16_GRADIENT, f"{name}: {difference}"


def collapse_of_the_loss_scale(case: Case) -> list[str]:
    """Every gradient is infinite and the scale is at its floor from the start."""
    allow_fp16_on_cpu()
    run = EngineRun(case)
    run.engine.optimizer.loss_scaler.cur_scale = run.engine.optimizer.loss_scaler.min_scale
    for local in run.pipeline.local_parameters():
        local.parameter.register_hook(lambda grad: torch.full_like(grad, float("inf")))
    weights = [local.parameter.detach().clone() for local in run.pipeline.local_parameters()]
    met = []
    for _ in range(2):
        try:
            met.append(str(train_step(run.engine, run.micro_batches())))
        except LossScaleCollapse as collapse:
            met.append(type(collapse).__name__)
    met.append(str(all(torch.equal(local.parameter, before)
                       for local, before in zip(run.pipeline.local_parameters(), weights, strict=True))))
    run.close()
    return met


def test_a_loss_scale_that_cannot_fall_is_told_on_all_ranks() -> None:
    # The first overflow is free (hysteresis), the second would halve the scale. No weight moves.
    for met in run_ranks(collapse_of_the_loss_scale, 2, Case(pp=2, precision="fp16")):
        assert met == ["True", "LossScaleCollapse", "True"]
