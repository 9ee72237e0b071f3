"""Evaluation over a fixed window of a split, so that two evaluations can be compared."""

from __future__ import annotations

from typing import Any

import torch

from bert_ds.config.run import RunConfig
from bert_ds.model.loss import METRICS, LossSums
from bert_ds.parallel.context import ParallelContext
from bert_ds.training.batches import StepSource
from bert_ds.training.metrics import SUMS, Losses, reduce_sums


def evaluate(run: RunConfig, ctx: ParallelContext, engine: Any, sums: LossSums, source: StepSource) -> Losses:
    """Losses and accuracies over the first `eval_iters` global batches of a split, without dropout."""
    total = torch.zeros(len(SUMS), dtype=torch.float64, device=ctx.device)
    for _ in range(run.schedule.eval_iters):
        inputs = source.next()
        engine.eval_batch(inputs.micro_batches)
        total[: len(METRICS)] += sums.take()
    return Losses.from_sums(reduce_sums(total, ctx))
