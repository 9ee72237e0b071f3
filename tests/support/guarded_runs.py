"""The training loop itself on made-up samples, in any layout, with something that goes wrong on the way."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tiny_runs import GLOBAL_BATCH, PREDICTIONS, SEQUENCE, Batch, Case, EngineRun, vocabulary

from bert_ds.config.guards import GuardConfig
from bert_ds.config.output import OutputConfig
from bert_ds.data.bert_dataset import Datasets
from bert_ds.data.samples import SampleBatch


class MadeUp:
    """Sample i is row i % GLOBAL_BATCH of `Batch.draw(i // GLOBAL_BATCH)`; notes what is read."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self.read: list[int] = []

    def __len__(self) -> int:
        return 10**6

    def build_batch(self, indices: Any) -> SampleBatch:
        self.read.extend(indices.tolist())
        rows = SampleBatch.empty(len(indices), SEQUENCE, PREDICTIONS)
        for place, index in enumerate(indices.tolist()):
            batch = Batch.draw(index // GLOBAL_BATCH, self._case)
            row = [tensor[index % GLOBAL_BATCH].numpy() for tensor in (*batch.inputs, *batch.labels)]
            for target, source in zip(rows[:6], row, strict=True):
                target[place] = source.astype(np.int32)
            rows.truncated[place] = False
        return rows


class Records:
    """A reporter that keeps what it is told."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self.on_line: Callable[[int], None] = lambda step: None
        self.evaluations: list[tuple[str, int]] = []

    def advance(self, steps: int) -> None: ...

    def steps(self, step: int, consumed_samples: int, interval: Any, sums: dict[str, float], **values: Any) -> Any:
        self.lines.append({
            "iteration": step, "consumed_samples": consumed_samples, "rows": interval.rows,
            "skipped": interval.skipped, "lm_loss": sums["lm_loss"] / max(sums["lm_count"], 1), **values})
        self.on_line(step)
        return self.lines[-1]

    def evaluation(self, split: str, step: int, *_: Any) -> None:
        self.evaluations.append((split, step))


class GuardedRun:
    """One run of `train` on this rank; the process group has to be initialised."""

    def __init__(self, case: Case, folder: Path | None = None, *, guards: dict[str, Any] | None = None,
                 **schedule: Any) -> None:
        self.inner = EngineRun(case)
        run = self.inner.run
        saves = None if folder is None else str(folder)
        self.run = replace(
            run, guards=GuardConfig(**(guards or {})),
            schedule=replace(run.schedule, **{"train_iters": 6, "lr_warmup_iters": 2, **schedule}),
            output=OutputConfig(save=saves, save_interval=2 if saves else None, log_interval=1))
        self.folder, self.records, self.data = folder, Records(), MadeUp(case)
        self.outcome: Any = None

    def train(self, vocab_file: str, state: Any = None) -> GuardedRun:
        """Trains; `outcome` becomes the exit code, or the message of what stopped the run."""
        from bert_ds.errors import UserError  # noqa: PLC0415
        from bert_ds.training.disks import find_disks  # noqa: PLC0415
        from bert_ds.training.saver import Saver  # noqa: PLC0415
        from bert_ds.training.state import TrainingState  # noqa: PLC0415
        from bert_ds.training.trainer import Job, train  # noqa: PLC0415

        inner, run = self.inner, replace(self.run, data=replace(self.run.data, vocab_file=vocab_file))
        saver = None
        if self.folder is not None:
            ranks = inner.coordinator.beside("saves")
            saver = Saver(run, inner.ctx, ranks, inner.engine, vocabulary(), find_disks(self.folder, ranks))
        job = Job(run, inner.ctx, inner.coordinator, inner.engine, inner.sums,
                  Datasets(train=self.data, valid=MadeUp(inner.case), test=MadeUp(inner.case)), self.records,  # type: ignore
                  saver, has_launcher=False, started=time.monotonic())
        try:
            self.outcome = train(job, state or TrainingState())
        except UserError as error:
            self.outcome = str(error)
        return self

    def resume(self, vocab_file: str) -> GuardedRun:
        """Trains on from the newest checkpoint."""
        from bert_ds.training.resume import load_checkpoint, newest_own_checkpoint  # noqa: PLC0415

        inner = self.inner
        start = newest_own_checkpoint(self.run, inner.ctx, inner.coordinator)
        assert start is not None
        return self.train(vocab_file, load_checkpoint(start, inner.ctx, inner.coordinator, inner.engine))

    def at_step(self, step: int, harm: Callable[[Any], Any]) -> GuardedRun:
        """Changes what encoder.layers.3 makes in iteration `step` (from 0), on one data-parallel rank."""
        pipeline, ctx = self.inner.pipeline, self.inner.ctx
        layer = 5  # behind the word table, the embedding tail and three more
        if ctx.dp_rank == ctx.dp_size - 1 and hasattr(pipeline, str(layer)):
            def changed(module: Any, arguments: Any, output: Any) -> Any:
                return (harm(output[0]), *output[1:]) if pipeline._step == step else output

            getattr(pipeline, str(layer)).register_forward_hook(changed)
        return self

    def weights(self) -> list[torch.Tensor]:
        return [local.parameter.detach().clone() for local in self.inner.pipeline.local_parameters()]

    def close(self) -> None:
        self.inner.close()


def weights_after(case: Case, run: Any, batches: list[int]) -> list[torch.Tensor]:
    """What the run's updates give on these batches alone; a batch's number is that of its iteration, for dropout."""
    from bert_ds.training.engine import set_learning_rate, train_step  # noqa: PLC0415
    from bert_ds.training.lr_schedule import LearningRate  # noqa: PLC0415

    plain = EngineRun(case)
    rates = LearningRate(run.schedule, run.engine.lr, run.engine.global_batch_size)
    for updates, batch in enumerate(batches):
        set_learning_rate(plain.engine, rates.after_updates(updates))
        plain.pipeline.begin_step(batch)
        train_step(plain.engine, Batch.draw(batch, case).micro_batches(
            case.micro_batch, plain.ctx.dp_rank, plain.ctx.dp_size))
    found = [local.parameter.detach().clone() for local in plain.pipeline.local_parameters()]
    plain.close()
    return found
