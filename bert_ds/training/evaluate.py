"""Evaluation over a fixed window of a split, so that two evaluations can be compared."""

from __future__ import annotations

from collections.abc import Callable

import torch

from bert_ds.config.run import RunConfig
from bert_ds.data.samples import SampleSource
from bert_ds.model.loss import METRICS, LossSums
from bert_ds.parallel.context import ParallelContext
from bert_ds.training.batches import evaluation_source
from bert_ds.training.metrics import SUMS, Losses, reduce_sums
from bert_ds.training.pipeline_engine import BertPipelineEngine


def evaluate(
    run: RunConfig, ctx: ParallelContext, engine: BertPipelineEngine, sums: LossSums, dataset: SampleSource,
    before_batch: Callable[[int], None] = lambda batch: None,
) -> Losses:
    """Losses and accuracies over the first `eval_iters` global batches of a split, without dropout.

    Leaves training as it was, to the bit. `before_batch` is called with the number of each.
    """
    total = torch.zeros(len(SUMS), dtype=torch.float64, device=ctx.device)
    source = evaluation_source(run, ctx, dataset)
    with engine.evaluation(run.eval_accumulation(ctx.dp_size)):
        for batch in range(run.schedule.eval_iters):
            before_batch(batch)
            engine.eval_batch(source.next().micro_batches)
            total[: len(METRICS)] += sums.take()
    source.close()
    return Losses.from_sums(reduce_sums(total, ctx))
