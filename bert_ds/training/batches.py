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
from bert_ds.training.coordination import PeerError

MicroBatch = tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]


@dataclass(frozen=True)
class StepInputs:
    """The micro-batches of one optimizer step on this rank."""

    rows: list[MicroBatch] | None
    """None on ranks that read no data."""
    real_tokens: int
    """Tokens of this rank's rows that are not padding; 0 on ranks that read no data."""
    wait_s: float
    """Seconds this rank waited for the loader."""

    @property
    def micro_batches(self) -> Iterator[MicroBatch] | None:
        """Once more from the first."""
        return None if self.rows is None else iter(self.rows)


class TrainingSource:
    """The steps of a run's training, whose global batches may grow; see StepSource."""

    def __init__(
        self, run: RunConfig, ctx: ParallelContext, dataset: SampleSource | None, consumed: int, iterations: int
    ) -> None:
        """So many iterations on the samples that come after the `consumed` ones; `dataset` may be None for no
        iterations."""
        self._run, self._ctx, self._dataset = run, ctx, dataset
        self._stretches = run.batch_sizes.stretches(consumed, iterations)
        self._source = self._next_source() if iterations > 0 else StepSource(None, ctx, 0)

    def next(self) -> StepInputs:
        """The inputs of the next step; to be called on all ranks."""
        if not self._source.steps_left:
            self._source.close()
            self._source = self._next_source()
        return self._source.next()

    def close(self) -> None:
        """Stops the loader's threads."""
        self._source.close()

    def _next_source(self) -> StepSource:
        """The next batches of equal size."""
        first, size, count = next(self._stretches)
        return _source(self._run, self._ctx, self._dataset, first, first + size * count,
                       self._run.engine.micro_batch_size, size)


def evaluation_source(run: RunConfig, ctx: ParallelContext, dataset: SampleSource) -> StepSource:
    """The global batches of one evaluation: always the first samples of the split, however they are cut."""
    samples = run.schedule.eval_iters * run.engine.global_batch_size
    return _source(run, ctx, dataset, 0, samples, run.eval_micro_batch_size, run.engine.global_batch_size)


def _source(
    run: RunConfig, ctx: ParallelContext, dataset: SampleSource | None, first: int, stop: int, micro_batch_size: int,
    global_batch_size: int,
) -> StepSource:
    steps = (stop - first) // global_batch_size
    if not ctx.reads_data or steps == 0:
        return StepSource(None, ctx, steps)
    assert dataset is not None
    return StepSource(WindowLoader(
        dataset, first_sample=first, num_samples=stop, micro_batch_size=micro_batch_size,
        accumulation=global_batch_size // (micro_batch_size * ctx.dp_size), dp_rank=ctx.dp_rank,
        dp_size=ctx.dp_size, num_workers=max(run.data.num_workers, 1), rows_are_full=run.data.rows_are_full),
        ctx, steps)


class StepSource:
    """Draws one accumulation window after another; on ranks that read no data it draws nothing.

    All ranks meet before each step, for two things. The denominators, masked tokens and labelled pairs of the global
    batch, scale the loss of the first micro-batch already. And where a rank's data fail, no rank begins the step, in
    which the others would wait for it.
    """

    def __init__(self, loader: WindowLoader | None, ctx: ParallelContext, steps: int) -> None:
        """Gives `steps` steps; every rank counts them."""
        self._windows = iter(loader) if loader is not None else None
        self._loader = loader
        self._ctx = ctx
        self.steps_left = steps

    def next(self) -> StepInputs:
        """The inputs of the next step; to be called on all ranks.

        Raises:
            PeerError: another rank could not read its data. That rank raises what it met.
        """
        assert self.steps_left > 0, "no step is left, on any rank"
        self.steps_left -= 1
        started = time.monotonic()
        window, failure = self._draw()
        waited = time.monotonic() - started
        denominators = self._agree(window, failure)
        if window is None:
            return StepInputs(None, 0, 0.0)
        return StepInputs(self._micro_batches(window, denominators), window.real_tokens, waited)

    def close(self) -> None:
        """Stops the loader's threads."""
        if self._loader is not None:
            self._loader.close()

    def _draw(self) -> tuple[Window | None, Exception | None]:
        """This rank's next window, or why there is none."""
        if self._windows is None:
            return None, None
        try:
            return next(self._windows), None
        except Exception as failure:  # noqa: BLE001 - whatever it is, the other ranks have to hear of it first
            return None, failure

    def _agree(self, window: Window | None, failure: Exception | None) -> torch.Tensor:
        """Masked tokens and labelled pairs of the global batch, [2]; raises when a rank has failed."""
        ctx = self._ctx
        counts = torch.tensor([0, 0, int(failure is not None)], dtype=torch.float32)
        if window is not None and ctx.is_last_stage and ctx.tp_rank == 0:
            counts[:2] = torch.tensor([window.masked_tokens, window.labelled_pairs])
        counts = counts.to(ctx.device)
        if ctx.world_size > 1:
            dist.all_reduce(counts)
        if failure is not None:
            raise failure
        if ctx.world_size > 1 and counts[2]:
            raise PeerError.of("the data of this step", "not read", "another rank could not read its part",
                               "see the message of that rank")
        return counts[:2]

    def _micro_batches(self, window: Window, denominators: torch.Tensor) -> list[MicroBatch]:
        moved = [tuple(tensor.to(self._ctx.device, non_blocking=True) for tensor in batch)
                 for batch in window.micro_batches]
        return [((ids, types, segments, positions), (labels, order, denominators))
                for ids, types, segments, positions, labels, order in moved]
