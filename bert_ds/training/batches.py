"""From the loader's windows to what the pipeline engine pulls: micro-batches with the denominators of the loss."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from bert_ds.data.loader import Window, WindowLoader
from bert_ds.parallel.context import ParallelContext

MicroBatch = tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]


@dataclass(frozen=True)
class StepInputs:
    """The micro-batches of one optimizer step on this rank."""

    micro_batches: Iterator[MicroBatch] | None
    """None on stages that read no data."""
    real_tokens: int
    """Tokens of this rank's rows that are not padding; 0 on stages that read no data."""
    wait_s: float
    """Seconds this rank waited for the loader."""


class StepSource:
    """Draws one accumulation window after another; on stages between the first and the last it draws nothing.

    The denominators, masked tokens and labelled pairs of the global batch, are summed over the data-parallel ranks of
    the last stage before the first micro-batch runs, since they scale its loss.
    """

    def __init__(self, loader: WindowLoader | None, ctx: ParallelContext) -> None:
        self._windows = iter(loader) if loader is not None else None
        self._loader = loader
        self._ctx = ctx

    def next(self) -> StepInputs:
        """The inputs of the next step."""
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
