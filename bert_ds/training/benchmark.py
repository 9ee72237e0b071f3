"""Measures optimizer steps of the real engine on random rows, without a data loader in the way.

B rows, S positions, P predictions kept a row, M sequences a row.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from bert_ds.cli.deepspeed_json import engine_json
from bert_ds.config.run import RunConfig
from bert_ds.data.samples import UNUSED_LABEL
from bert_ds.model.loss import LossSums
from bert_ds.parallel.context import ParallelContext
from bert_ds.training.batches import MicroBatch
from bert_ds.training.engine import build_engine, build_pipeline, train_step
from bert_ds.training.kernel_times import KernelTimes, kernel_times
from bert_ds.training.throughput import peak_flops, row_flops

BATCHES = 4
"""Different windows that are dealt out in turn."""
SHORTEST = 0.25
"""Share of a row that its shortest neighbour fills."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is measured."""

    steps: int
    """Steps whose durations are taken, one by one."""
    warmup: int
    """Steps before, in which kernels are compiled and the loss scale settles."""
    short_rows: float
    """Share of the rows that are padded, to lengths spread evenly from a quarter of the row on."""
    profile: bool
    """Whether three more steps are traced, and their time given to kinds of kernels."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One run's figures, of all ranks together."""

    step_s: float
    """Median duration of a step."""
    spread: float
    """Distance of the quartiles of the durations, as a share of the median."""
    rows_per_s: float
    tokens_per_s: float
    """Tokens that are not padding."""
    tflops: float
    """Useful 10^12 FLOP/s of each rank; formula in training/throughput.py, whole rows counted."""
    mfu: float | None
    """Share of the device's dense 16-bit peak; None where it is not known."""
    peak_gib: float | None
    """Largest allocation on this rank's GPU; None on a CPU."""
    first_step_s: float
    """From the start of the model's construction to the end of the first step."""
    kernels: KernelTimes | None


def measure(run: RunConfig, ctx: ParallelContext, workload: Workload) -> Measurement:
    """Builds the run's engine, steps it, takes it down again; every rank of the default group calls it alike."""
    started = time.monotonic()
    if ctx.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(ctx.device)
    sums = LossSums(ctx.device)
    pipeline = build_pipeline(run, ctx, sums)
    engine = build_engine(run, ctx, pipeline, engine_json(run, ctx.world_size))
    windows = [_window(run, ctx, workload.short_rows, seed) for seed in range(BATCHES)]
    steps = iter(range(10**9))

    def step() -> None:
        number = next(steps)
        pipeline.begin_step(number)
        train_step(engine, _dealt(windows[number % BATCHES], ctx))

    _timed(step, ctx)
    first_step_s = time.monotonic() - started
    for _ in range(workload.warmup - 1):
        step()
    durations = torch.tensor([_timed(step, ctx) for _ in range(workload.steps)], dtype=torch.float64)
    peak_bytes = torch.cuda.max_memory_allocated(ctx.device) if ctx.device.type == "cuda" else None
    kernels = kernel_times(step, ctx.device) if workload.profile else None
    engine.destroy()
    low, median, high = torch.quantile(durations, torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)).tolist()
    rows = run.engine.global_batch_size
    sequences = run.data.sequences_per_row
    flops = rows * row_flops(run.model, run.data.predictions_per_row(run.model.seq_length, sequences), sequences)
    tflops, peak = flops / median / ctx.world_size / 1e12, peak_flops(ctx.device)
    real = sum(float((inputs[2] != 0).sum()) for window in windows for inputs, _ in window) / BATCHES * ctx.dp_size
    return Measurement(
        step_s=median, spread=(high - low) / median, rows_per_s=rows / median, tokens_per_s=real / median,
        tflops=tflops, mfu=None if peak is None else tflops * 1e12 / peak,
        peak_gib=None if peak_bytes is None else peak_bytes / 2**30, first_step_s=first_step_s, kernels=kernels)


def _timed(step: Callable[[], None], ctx: ParallelContext) -> float:
    """Seconds of one step on the slowest rank."""
    if ctx.device.type == "cuda":
        torch.cuda.synchronize(ctx.device)
    started = time.monotonic()
    step()
    if ctx.device.type == "cuda":
        torch.cuda.synchronize(ctx.device)
    seconds = torch.tensor(time.monotonic() - started, device=ctx.device, dtype=torch.float32)
    if ctx.world_size > 1:
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


def _dealt(window: list[MicroBatch], ctx: ParallelContext) -> Iterator[MicroBatch] | None:
    return iter(window) if ctx.is_first_stage or ctx.is_last_stage else None


def _window(run: RunConfig, ctx: ParallelContext, short_rows: float, seed: int) -> list[MicroBatch]:
    """Random micro-batches of one step on this rank's device; tensor-parallel ranks and stages draw the same."""
    generator = torch.Generator().manual_seed(seed * 100_003 + ctx.dp_rank)
    return [_micro_batch(run, ctx, short_rows, generator) for _ in range(run.engine.accumulation(ctx.dp_size))]


def _micro_batch(run: RunConfig, ctx: ParallelContext, short_rows: float, generator: torch.Generator) -> MicroBatch:
    model, rows = run.model, run.engine.micro_batch_size
    M, S = run.data.sequences_per_row, run.model.seq_length
    P = run.data.predictions_per_row(S, M)

    def integers(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape, generator=generator)

    lengths_B = torch.full((rows,), S)
    is_short_B = torch.rand(rows, generator=generator) < short_rows
    shortest = max(int(S * SHORTEST), 2)
    lengths_B[is_short_B] = shortest + integers(S - shortest, int(is_short_B.sum()))
    places_S = torch.arange(S)
    segments_BS = (places_S < lengths_B[:, None]) * (1 + places_S * M // S)
    predicted_B = (lengths_B * run.data.mask_prob).round().clamp(min=1)
    labels_BP = integers(model.vocab_size, rows, P).masked_fill(torch.arange(P) >= predicted_B[:, None], UNUSED_LABEL)
    order_BM = integers(2, rows, M) if model.binary_head else torch.full((rows, M), UNUSED_LABEL)
    counts_2 = torch.tensor([float((labels != UNUSED_LABEL).sum()) for labels in (labels_BP, order_BM)])
    inputs = (integers(model.vocab_size, rows, S), integers(2, rows, S), segments_BS.int(), integers(shortest, rows, P))
    # The counts of the whole batch, since the loss is divided by them.
    counts_2 = counts_2 * run.engine.global_batch_size / rows
    return _on(ctx.device, inputs), _on(ctx.device, (labels_BP, order_BM, counts_2))


def _on(device: torch.device, tensors: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
    return tuple(tensor.to(device) for tensor in tensors)
