"""Micro batch, global batch and accumulation: any two give the third."""

from __future__ import annotations

from bert_ds.cli.settings import Given, Settings
from bert_ds.errors import Problem

MICRO = "engine.micro_batch_size"
GLOBAL = "engine.global_batch_size"


def settle_batch(settings: Settings, accumulation: Given | None, world_size: int) -> None:
    """Completes the two batch sizes from `accumulation`, the JSON's gradient_accumulation_steps.

    A single batch size means an accumulation of 1, as in DeepSpeed. Flags that fix both sizes displace the JSON's
    accumulation. Layouts that do not fit the world size are left to `ParallelConfig.problems`.
    """
    copies = _data_parallel_size(settings, world_size)
    micro, total = settings.values.get(MICRO), settings.values.get(GLOBAL)
    if micro is not None and total is not None:
        if accumulation is not None:
            _check(settings, micro, total, accumulation, copies)
        return
    steps = 1 if accumulation is None else accumulation.value
    origin = (accumulation or micro or total or Given(value=0, origin="", written="")).origin
    if steps < 1:
        settings.problems.append(Problem("gradient_accumulation_steps", steps, "must be at least 1", "use 1"))
    elif micro is not None:
        settings.values[GLOBAL] = Given(value=micro.value * steps * copies, origin=f"derived ({origin})",
                                        written="train_batch_size")
    elif total is not None:
        if total.value % (steps * copies):
            settings.problems.append(_indivisible(total.value, f"accumulation {steps}", steps * copies, copies))
        settings.values[MICRO] = Given(value=max(total.value // (steps * copies), 1), origin=f"derived ({origin})",
                                       written="train_micro_batch_size_per_gpu")


def _check(settings: Settings, micro: Given, total: Given, accumulation: Given, copies: int) -> None:
    product = micro.value * accumulation.value * copies
    if product == total.value:
        return
    if settings.is_from_flag(MICRO) or settings.is_from_flag(GLOBAL):
        settings.remarks.append(f"batch sizes given as flags replace gradient_accumulation_steps="
                                f"{accumulation.value} of {accumulation.origin}")
        return
    settings.problems.append(Problem(
        "train_batch_size", total.value,
        f"is not micro batch {micro.value} x accumulation {accumulation.value} x data-parallel size {copies} = "
        f"{product}",
        f"use {product}, or leave gradient_accumulation_steps out"))


def _indivisible(total: int, factor: str, unit: int, copies: int) -> Problem:
    lower = total // unit * unit
    return Problem("train_batch_size", total, f"is not a multiple of {factor} x data-parallel size {copies}",
                   f"use {lower} or {lower + unit}" if lower > 0 else f"use {unit}")


def _data_parallel_size(settings: Settings, world_size: int) -> int:
    """Copies of the model; 1 when the layout does not fit, which is reported elsewhere."""
    ranks = 1
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
        given = settings.values.get(f"parallel.{name}")
        ranks *= 1 if given is None else given.value
    return max(world_size // ranks, 1) if ranks > 0 else 1
