"""The flat step of ZeRO 1 gives DeepSpeed's numbers."""

from __future__ import annotations

import numpy as np
import pytest
from ranks import run_ranks
from tiny_runs import Case, EngineRun, Outcome, allow_fp16_on_cpu
from tolerances import ADAM_STEPS, FP16_STEPS, OTHER_KERNEL, REDUCTION_ORDER

from bert_ds.training.flat_optimizer import FlatZeroOptimizer

FP32 = [Case(steps=4), Case(pp=2, steps=4), Case(tp=2, sequence_parallel=True, clipping=0.0, steps=4)]
FP16 = [Case(precision="fp16", steps=4, micro_batch=4), Case(precision="fp16", tp=2, steps=4, loss_scale=2.0**10)]


def both_steps(cases: list[Case]) -> list[list[tuple[Outcome, list[np.ndarray]]]]:
    """Runs on every rank: outcome and masters of each case by the flat step and by DeepSpeed's own."""
    allow_fp16_on_cpu()
    with pytest.MonkeyPatch.context() as patch:
        flat = [outcome_and_masters(case, FlatZeroOptimizer) for case in cases]
        patch.setattr(FlatZeroOptimizer, "serves", staticmethod(lambda optimizer: False))
        own = [outcome_and_masters(case, FlatZeroOptimizer.__bases__[0]) for case in cases]
    return [list(pair) for pair in zip(flat, own, strict=True)]


def outcome_and_masters(case: Case, kind: type) -> tuple[Outcome, list[np.ndarray]]:
    run = EngineRun(case)
    assert type(run.engine.optimizer) is kind
    outcome = run.steps(case.steps)
    masters = [master.detach().numpy().copy() for master in run.engine.optimizer.single_partition_of_fp32_groups]
    run.close()
    return outcome, masters


@pytest.mark.proves("the flat ZeRO step gives the losses, norms and masters of DeepSpeed's own, in fp32 / fp16",
                    "REDUCTION_ORDER", "FP16_STEPS")
def test_losses_norms_and_masters_are_deepspeeds() -> None:
    for rank in run_ranks(both_steps, 2, FP32 + FP16):
        for case, ((found, masters), (wanted, wanted_masters)) in zip(FP32 + FP16, rank, strict=True):
            close = REDUCTION_ORDER if case.precision == "fp32" else OTHER_KERNEL
            assert found.losses == pytest.approx(wanted.losses, rel=close["rtol"]), case
            assert found.norms == pytest.approx(wanted.norms, rel=close["rtol"]), case
            masters_close = ADAM_STEPS if case.precision == "fp32" else FP16_STEPS
            for master, wanted_master in zip(masters, wanted_masters, strict=True):
                np.testing.assert_allclose(master, wanted_master, **masters_close, err_msg=str(case))
