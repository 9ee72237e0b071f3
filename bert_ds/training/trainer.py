"""The training loop. The order of a step stands here and nowhere else."""

from __future__ import annotations

import logging
import signal
from dataclasses import dataclass
from typing import Any

from bert_ds.config.run import RunConfig
from bert_ds.data.bert_dataset import Datasets
from bert_ds.errors import EXIT_DONE, GuardError
from bert_ds.model.loss import LossSums
from bert_ds.parallel.context import ParallelContext
from bert_ds.training.batches import training_source
from bert_ds.training.consistency import check_copies
from bert_ds.training.engine import LossScaleCollapse, loss_scale, set_learning_rate, train_step
from bert_ds.training.evaluate import evaluate
from bert_ds.training.lr_schedule import LearningRate
from bert_ds.training.metrics import Interval, Losses, Reporter, reduce_sums
from bert_ds.training.saver import Saver
from bert_ds.training.state import TrainingState
from bert_ds.training.stop import StopRequest

log = logging.getLogger(__name__)
CHECK_INTERVAL = 100
"""Iterations between two comparisons of what ranks hold alike; one takes about a pass over the weights."""


@dataclass(frozen=True)
class Job:
    """Everything that stays the same while a run trains."""

    run: RunConfig
    ctx: ParallelContext
    engine: Any
    sums: LossSums
    datasets: Datasets
    reporter: Reporter
    saver: Saver | None
    """None where nothing is saved."""
    has_launcher: bool
    """Whether the parent process is a launcher, without which the run has to end."""
    train_samples: int
    """Samples of the training set that are consumed when the run ends."""


def train(job: Job, state: TrainingState) -> int:
    """Trains from `state` to the end, evaluating and saving on the way.

    Returns:
        The exit code: 0, or 128 + the signal's number after a signal, with a checkpoint saved.

    Raises:
        GuardError: training has stopped itself.
        SaveError: the run has ended and its last state could not be saved.
    """
    run, ctx, engine = job.run, job.ctx, job.engine
    rates = LearningRate(run.schedule, run.engine.lr, run.engine.global_batch_size)
    source = training_source(run, ctx, job.datasets.train, state.consumed_samples, job.train_samples)
    interval = Interval(ctx.device)
    losses: Losses | None = None
    stopped: signal.Signals | None = None
    with StopRequest(watch_parent=job.has_launcher) as stop:
        if state.step == 0 and run.schedule.eval_interval:
            losses = _evaluate(job, state, "valid")
            interval = Interval(ctx.device)
        ended = state.step >= run.schedule.train_iters
        if ended:
            log.info("nothing left to train: iteration %d of %d", state.step, run.schedule.train_iters)
        while not ended:
            inputs = source.next()
            set_learning_rate(engine, rates.after_updates(state.updates))
            engine.module.begin_step(state.step)
            try:
                skipped = train_step(engine, inputs.micro_batches)
            except LossScaleCollapse as collapse:
                raise _loss_scale_collapsed(job, state, losses) from collapse
            state = state.after_step(run.engine.global_batch_size, skipped=skipped)
            if _every(state.step, CHECK_INTERVAL):
                check_copies(engine, ctx)
            interval.add(job.sums.take(), inputs.real_tokens, skipped=skipped, data_wait_s=inputs.wait_s)
            job.reporter.advance(1)
            stopped = stop.agreed(ctx.device, ctx.world_size)
            ended = stopped is not None or state.step == run.schedule.train_iters or _every(
                state.step, run.schedule.exit_interval)
            if ended or _every(state.step, run.output.log_interval):
                _report(job, state, interval, rates)
                interval = Interval(ctx.device)
            if stopped is None and _every(state.step, run.schedule.eval_interval):
                losses = _evaluate(job, state, "valid")
                interval = Interval(ctx.device)
            if job.saver and (ended or _every(state.step, run.output.save_interval)):
                job.saver.save(state, _metrics(losses))
                interval = Interval(ctx.device) if interval.steps == 0 else interval
        source.close()
        return _end(job, state, losses, stopped)


def _end(job: Job, state: TrainingState, losses: Losses | None, stopped: signal.Signals | None) -> int:
    """What remains after the last step, while the last checkpoint is being written; the exit code."""
    if stopped is None:
        _final_evaluations(job, state, losses)
    is_saved = job.saver is not None and job.saver.wait()
    if stopped is not None:
        log.info("stopped by %s after iteration %d; %s", stopped.name, state.step,
                 f"resume with --load {job.run.output.save}" if is_saved else "nothing was saved")
        return 128 + stopped.value
    if job.saver:
        job.saver.finish()
    return EXIT_DONE


def _evaluate(job: Job, state: TrainingState, split: str) -> Losses:
    losses = evaluate(job.run, job.ctx, job.engine, job.sums, getattr(job.datasets, split))
    job.reporter.evaluation(split, state.step, state.consumed_samples, losses)
    return losses


def _final_evaluations(job: Job, state: TrainingState, losses: Losses | None) -> None:
    """After the last step: validation unless it has just been done, and the test split where there is one."""
    interval = job.run.schedule.eval_interval
    if not interval or state.step < job.run.schedule.train_iters:
        return
    if losses is None or not _every(state.step, interval):
        _evaluate(job, state, "valid")
    if job.datasets.test is not None:
        _evaluate(job, state, "test")


def _report(job: Job, state: TrainingState, interval: Interval, rates: LearningRate) -> None:
    norm = job.engine.get_global_grad_norm()
    job.reporter.steps(
        state.step, state.consumed_samples, interval, reduce_sums(interval.sums, job.ctx),
        learning_rate=rates.after_updates(state.updates), grad_norm=None if norm is None else float(norm),
        loss_scale=loss_scale(job.engine))


def _metrics(losses: Losses | None) -> dict[str, float]:
    return {name: value for name, value in (losses.__dict__ if losses else {}).items() if value is not None}


def _loss_scale_collapsed(job: Job, state: TrainingState, losses: Losses | None) -> GuardError:
    """Saves what the last good update left behind and says what can be done."""
    kept = "nothing was saved, since there is no folder to save to"
    if job.saver:
        job.saver.save(state, _metrics(losses))
        kept = f"the state before it is saved in {job.run.output.save}" if job.saver.wait() else "saving has failed"
    return GuardError.of(
        "loss scale", loss_scale(job.engine),
        f"cannot fall any further, and the gradients of iteration {state.step + 1} still overflow; {kept}",
        "train in bf16 (--bf16), which needs no loss scale, or lower the learning rate, warm up longer, or start again "
        "from an earlier checkpoint")


def _every(step: int, interval: int | None) -> bool:
    return interval is not None and step % interval == 0
