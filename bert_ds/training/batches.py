"""From the loader's windows to what the pipeline engine pulls: micro-batches with the denominators of the loss."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from bert_ds.config.run import RunConfig
from bert_ds.data.loader import Window, WindowLoader
from bert_ds.data.samples import SampleSource
from bert_ds.parallel.context import ParallelContext

MicroBatch = tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]


@dataclass(frozen=True)
class StepInputs:
    """The micro-batches of one optimizer step on this rank."""

    micro_batches: Iterator[MicroBatch] | None
    """None on ranks that read no data."""
    real_tokens: int
    """Tokens of this rank's rows that are not padding; 0 on ranks that read no data."""
    wait_s: float
    """Seconds this rank waited for the loader."""


def training_source(
    run: RunConfig, ctx: ParallelContext, dataset: SampleSource | None, first: int, stop: int
) -> StepSource:
    """The steps that train on the samples from `first` to `stop` (exclusive); `dataset` may be None if there are none.
    """
    return _source(run, ctx, dataset, first, stop, run.engine.micro_batch_size)


def evaluation_source(run: RunConfig, ctx: ParallelContext, dataset: SampleSource) -> StepSource:
    """The global batches of one evaluation: always the first samples of the split, however they are cut."""
    samples = run.schedule.eval_iters * run.engine.global_batch_size
    return _source(run, ctx, dataset, 0, samples, run.eval_micro_batch_size)


def _source(
    run: RunConfig, ctx: ParallelContext, dataset: SampleSource | None, first: int, stop: int, micro_batch_size: int
) -> StepSource:
    steps = max(stop - first, 0) // run.engine.global_batch_size
    if not ctx.reads_data or steps == 0:
        return StepSource(None, ctx, steps)
    assert dataset is not None
    return StepSource(WindowLoader(
        dataset, first_sample=first, num_samples=stop, micro_batch_size=micro_batch_size,
        accumulation=run.engine.global_batch_size // (micro_batch_size * ctx.dp_size), dp_rank=ctx.dp_rank,
        dp_size=ctx.dp_size, num_workers=max(run.data.num_workers, 1), rows_are_full=run.data.rows_are_full),
        ctx, steps)


class StepSource:
    """Draws one accumulation window after another; on ranks that read no data it draws nothing.

    The denominators, masked tokens and labelled pairs of the global batch, are summed over the data-parallel ranks of
    the last stage before the first micro-batch runs, since they scale its loss.
    """

    def __init__(self, loader: WindowLoader | None, ctx: ParallelContext, steps: int) -> None:
        """Gives `steps` steps. Every rank counts them: a step that one rank begins and another cannot would hang."""
        self._windows = iter(loader) if loader is not None else None
        self._loader = loader
        self._ctx = ctx
        self._steps_left = steps

    def next(self) -> StepInputs:
        """The inputs of the next step."""
        assert self._steps_left > 0, "no step is left, on any rank"
        self._steps_left -= 1
        if self._windows is None:
            return StepInputs(None, 0, 0.0)
        started = time.monotonic()
        window = next(self._windows)
        waited = time.monotonic() - started
        return StepInputs(self._micro_batches(window), window.real_tokens, waited)

    def close(self) -> None:
        """Stops the loader's threads."""
        if self._loader is not None:
            self._loader.close()

    def _micro_batches(self, window: Window) -> Iterator[MicroBatch]:
        device = self._ctx.device
        counts = torch.tensor([window.masked_tokens, window.labelled_pairs], dtype=torch.float32, device=device)
        if self._ctx.dp_group is not None and self._ctx.is_last_stage:
            dist.all_reduce(counts, group=self._ctx.dp_group)
        moved = [tuple(tensor.to(device, non_blocking=True) for tensor in batch) for batch in window.micro_batches]
        return iter([((ids, types, segments, positions), (labels, order, counts))
                     for ids, types, segments, positions, labels, order in moved])
