"""Global batches that grow: Megatron-LM's formulas, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_runs import Case, run_config

from bert_ds.config.batch_sizes import BatchSizes


def megatron_ramp(consumed: int, start: int, increment: int, samples: int, size: int) -> int:
    """core/num_microbatches_calculator.py up to 0.17."""
    steps = (size - start) / increment
    per_step = samples / steps
    return size if consumed > samples else min(start + int(consumed / per_step) * increment, size)


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 9), st.integers(9, 3000), st.integers(0, 4000))
def test_a_ramp_is_megatrons(start: int, increment: int, steps: int, samples: int, consumed: int) -> None:
    size = start + increment * steps
    ramp = BatchSizes.ramp((str(start), str(increment), str(samples)), size)
    # Where consumed / (samples / steps) is a whole number, Megatron-LM's division may fall short of it by a rounding.
    if consumed * steps % samples:
        assert ramp.at(consumed) == megatron_ramp(consumed, start, increment, samples, size)


@given(st.lists(st.tuples(st.integers(1, 90), st.integers(1, 7)), max_size=5), st.integers(0, 300), st.integers(0, 60))
def test_stretches_are_the_batches_one_by_one(steps: list[tuple[int, int]], consumed: int, iterations: int) -> None:
    starts = [0]
    for gap, _ in steps:
        starts.append(starts[-1] + gap)
    sizes = BatchSizes(tuple(starts), (3, *(size for _, size in steps)))
    one_by_one, place = [], consumed
    for _ in range(iterations):
        one_by_one.append((place, sizes.at(place)))
        place += one_by_one[-1][1]
    together = [(first + number * size, size) for first, size, count in sizes.stretches(consumed, iterations)
                for number in range(count)]
    assert together == one_by_one
    assert sizes.after(consumed, iterations) == place


def test_steps_are_in_tokens() -> None:
    sizes = BatchSizes.stepwise(("0:768", "250B:1536", "0.5T:2048"), 512)
    assert sizes == BatchSizes((0, 250 * 10**9 // 512, 500 * 10**9 // 512), (768, 1536, 2048))


@pytest.mark.parametrize(("schedule", "message"), [
    ({"rampup_batch_size": ("8", "4")}, "is not START INCREMENT SAMPLES"),
    ({"rampup_batch_size": ("8", "3", "100")}, "does not lead from 8 to the global batch 16 in whole steps of 3"),
    ({"rampup_batch_size": ("5", "11", "100")}, "global batches of 5 rows, which are no multiples of micro batch"),
    ({"step_batch_size_schedule": ("0:8", "1K")}, "is not a list of TOKENS:SIZE"),
    ({"step_batch_size_schedule": ("0:8", "1K:12")}, "does not end with the global batch 16"),
    ({"step_batch_size_schedule": ("1:16",), "rampup_batch_size": ("8", "4", "9")}, "contradicts"),
    ({"train_minutes": 0.0}, "schedule.train_minutes=0.0: is not positive"),
    ({"skip_train": True}, "leaves nothing to do"),
])
def test_what_cannot_be_is_refused(schedule: dict[str, Any], message: str) -> None:
    run = run_config(Case())
    run = replace(run, schedule=replace(run.schedule, **schedule))
    assert any(message in str(problem) for problem in run.problems(1)), list(map(str, run.problems(1)))


def test_a_pipeline_that_needs_more_micro_batches_refuses_a_small_start() -> None:
    run = run_config(Case(pp=2, schedule="dualpipev"))
    run = replace(run, schedule=replace(run.schedule, rampup_batch_size=("4", "4", "24")))
    assert any("begins with too few micro-batches" in str(problem) for problem in run.problems(2))
