"""The training loop. The order of a step stands here and nowhere else."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from typing import Any

from bert_ds.config.run import RunConfig
from bert_ds.data.bert_dataset import Datasets
from bert_ds.errors import EXIT_DONE, GuardError
from bert_ds.model.loss import LossSums
from bert_ds.parallel.context import ParallelContext
from bert_ds.training.batches import StepInputs, TrainingSource
from bert_ds.training.consistency import check_copies
from bert_ds.training.coordination import Coordinator
from bert_ds.training.engine import (
    LossScaleCollapse,
    loss_scale,
    set_global_batch_size,
    set_learning_rate,
    train_step,
)
from bert_ds.training.evaluate import evaluate
from bert_ds.training.guards import LossGuard, PlateauHint, first_layer_not_finite, where_not_finite
from bert_ds.training.lr_schedule import LearningRate
from bert_ds.training.metrics import Interval, Losses, Reporter, reduce_sums
from bert_ds.training.resume import load_checkpoint, newest_own_checkpoint
from bert_ds.training.saver import Saver
from bert_ds.training.state import TrainingState
from bert_ds.training.stop import Agreement, StopRequest, exit_code_of
from bert_ds.training.watchdog import Watchdog

log = logging.getLogger(__name__)
CHECK_INTERVAL = 100
"""Iterations between two comparisons of what ranks hold alike; one takes about a pass over the weights."""
_MINUTE_S = 60


@dataclass(frozen=True)
class Job:
    """Everything that stays the same while a run trains."""

    run: RunConfig
    ctx: ParallelContext
    coordinator: Coordinator
    engine: Any
    sums: LossSums
    datasets: Datasets
    reporter: Reporter
    saver: Saver | None
    """None where nothing is saved."""
    has_launcher: bool
    """Whether the parent process is a launcher, without which the run has to end."""
    started: float
    """The monotonic clock when the run was started."""


@dataclass(frozen=True)
class End:
    """Why the run ends here."""

    reason: str
    exit_code: int = EXIT_DONE
    is_complete: bool = False
    """Whether it has trained as long as it was meant to."""
    is_urgent: bool = False
    """Whether there is time for nothing but a checkpoint."""


def train(job: Job, state: TrainingState) -> int:
    """Trains from `state` to the end, evaluating and saving on the way.

    Returns:
        The exit code: 0, or after a signal, with a checkpoint saved, 75 for SIGUSR1 and 128 + its number for others.

    Raises:
        GuardError: training has stopped itself.
        SaveError: the run has ended and its last state could not be saved.
    """
    run, schedule, output = job.run, job.run.schedule, job.run.output
    limit_s = run.guards.step_limit_mins * _MINUTE_S or math.inf
    with (StopRequest(watch_parent=job.has_launcher, started=job.started, trained_s=state.training_s) as stop,
          Watchdog(job.coordinator, limit_s) as watchdog):
        loop = Loop(job, state, watchdog)
        if schedule.skip_train:
            return loop.evaluate_only()
        if state.step == 0 and schedule.eval_interval:
            loop.evaluate("valid")
        end = _end_of_plan(run, state, resumed=True)
        while end is None:
            inputs = loop.draw()
            skipped = loop.step(inputs)
            loop.count(inputs, skipped=skipped)
            loop.answer_bad_loss(inputs)
            end = loop.meet(stop)
            if end or _every(loop.state.step, output.log_interval):
                loop.report()
            if not (end and end.is_urgent) and _every(loop.state.step, schedule.eval_interval):
                loop.evaluate("valid")
            if end or _every(loop.state.step, output.save_interval):
                loop.save()
        return loop.finish(end)


class Loop:
    """What changes while a run trains, and the parts of a step in the order in which `train` calls them."""

    def __init__(self, job: Job, state: TrainingState, watchdog: Watchdog) -> None:
        self.state = state
        self._job, self._watchdog = job, watchdog
        run, ctx = job.run, job.ctx
        self._rates = LearningRate(run.schedule, run.engine.lr, run.engine.global_batch_size)
        iterations = 0 if run.schedule.skip_train else run.schedule.train_iters - state.step
        self._source = TrainingSource(run, ctx, job.datasets.train, state.consumed_samples, iterations)
        self._guard = LossGuard(run.guards, ctx, job.sums)
        job.engine.allows_update = self._guard_allows_update
        self._plateau = PlateauHint()
        self._interval = Interval(ctx.device)
        self._losses: Losses | None = None
        self._evaluated = -1
        self._before = state
        self._culprits = ""

    def draw(self) -> StepInputs:
        """The data of the next step; all ranks meet here, so that none begins a step that another cannot."""
        self._watchdog.at(self.state.step + 1, "waiting for data, its own or those of other ranks")
        inputs = self._source.next()
        if inputs.wait_s > self._job.run.guards.data_wait_s:
            log.warning("iteration %d waited %.1f s for its data: the loader is slower than training, or a disk hangs; "
                        "see data_wait_share in metrics.jsonl, and give --num-workers more threads",
                        self.state.step + 1, inputs.wait_s)
        return inputs

    def step(self, inputs: StepInputs) -> bool:
        """Forward, backward and update; returns whether the update was skipped."""
        engine, state = self._job.engine, self.state
        self._watchdog.at(state.step + 1, "in forward, backward or update, whose messages go between ranks")
        set_global_batch_size(engine, self._rows())
        set_learning_rate(engine, self._learning_rate())
        engine.module.begin_step(state.step)
        try:
            return train_step(engine, inputs.micro_batches)
        except LossScaleCollapse as collapse:
            scale = loss_scale(engine)
            raise self._stopped(
                "loss scale", scale, f"cannot fall any further, and the gradients of iteration {state.step + 1} still "
                f"overflow; {where_not_finite(engine, self._job.run.model, self._job.coordinator)}",
                "train in bf16 (--bf16), which needs no loss scale, or lower the learning rate, warm up longer, or "
                "start again from an earlier checkpoint") from collapse

    def count(self, inputs: StepInputs, *, skipped: bool) -> None:
        """Moves the counters on; now and then compares what ranks hold alike."""
        rows, engine = self._rows(), self._job.engine
        self.state = self.state.after_step(rows, skipped=skipped)
        if _every(self.state.step, CHECK_INTERVAL):
            check_copies(engine, self._job.ctx)
        self._interval.add(self._job.sums.take(), inputs.real_tokens, rows=rows, skipped=skipped,
                           data_wait_s=inputs.wait_s)
        self._job.reporter.advance(1)
        if skipped and self._guard.verdict is None and not engine.fp16_enabled():
            self._guard.gradients_not_finite()

    def answer_bad_loss(self, inputs: StepInputs) -> None:
        """Does what the policy says about the step's loss; its update has been held back already, unless for `warn`.

        Raises:
            GuardError: on all ranks, where the run stops.
        """
        bad, job = self._guard.verdict, self._job
        if bad is None:
            return
        if not bad.allows_update:
            self._watchdog.at(self.state.step, "looking for what is not finite")
            found = first_layer_not_finite(job.engine, job.sums, inputs, job.coordinator)
            self._culprits = f"{self._culprits}; {found}" if self._culprits else found
        if bad.policy == "stop":
            # The state before the step: a resumed run meets the same samples, whatever policy it has then.
            self.state = self._before
            raise self._stopped("loss", bad.reason, f"iteration {self.state.step + 1} is not in the weights; "
                                f"{self._culprits}",
                                "lower the learning rate, warm up longer or train in bf16; to go on from there past "
                                "these samples, use --on-nan-loss or --on-loss-spike with skip or rewind")
        if job.ctx.rank == 0:
            log.warning("iteration %d: %s (%s)%s", self.state.step, bad.reason, bad.policy,
                        f": {self._culprits}" if self._culprits else "")
        if bad.policy == "rewind":
            self._rewind()

    def meet(self, stop: StopRequest) -> End | None:
        """All ranks agree on whether and why the run ends after this step."""
        self._watchdog.at(self.state.step, "meeting the other ranks after the step")
        agreed = stop.agreed(self._job.ctx.device, self._job.ctx.world_size)
        self.state = replace(self.state, training_s=agreed.training_s)
        return _end_of(self._job.run, self.state, agreed)

    def report(self) -> None:
        """Writes the log line of the interval that ends here."""
        job, interval = self._job, self._interval
        norm = job.engine.get_global_grad_norm()
        record = job.reporter.steps(
            self.state.step, self.state.consumed_samples, interval, reduce_sums(interval.sums, job.ctx),
            learning_rate=self._learning_rate(), grad_norm=None if norm is None else float(norm),
            loss_scale=loss_scale(job.engine), clock_left_s=_budget_s(job.run) - self.state.training_s)
        self._plateau.see(self.state.step, record["lm_loss"])
        self._interval = Interval(job.ctx.device)

    def evaluate(self, split: str) -> None:
        """Evaluates a split and reports it; the time does not count as the interval's if that is empty."""
        job, step = self._job, self.state.step
        losses = evaluate(
            job.run, job.ctx, job.engine, job.sums, getattr(job.datasets, split),
            lambda batch: self._watchdog.at(step, f"in batch {batch + 1} of the evaluation on the {split} data"))
        job.reporter.evaluation(split, step, self.state.consumed_samples, losses)
        if split == "valid":
            self._losses, self._evaluated = losses, step
        self._interval = Interval(job.ctx.device)

    def save(self) -> None:
        """Saves the state, if the run saves; training goes on before the files are written."""
        if self._job.saver is None:
            return
        with self._watchdog.unlimited(self.state.step, "saving"):
            self._job.saver.save(self.state, self._metrics())
        if self._interval.steps == 0:
            self._interval = Interval(self._job.ctx.device)

    def finish(self, end: End) -> int:
        """What remains after the last step, while the last checkpoint is being written; the exit code."""
        self._source.close()
        if end.is_complete:
            self._final_evaluations()
        saver, folder = self._job.saver, self._job.run.output.save
        with self._watchdog.unlimited(self.state.step, "waiting for the last checkpoint"):
            is_saved = saver is not None and saver.wait()
            if saver is not None and end.exit_code == EXIT_DONE:
                saver.finish()
        if not end.is_complete:
            log.info("stopped by %s after iteration %d; %s", end.reason, self.state.step,
                     f"resume with --load {folder}" if is_saved else "nothing was saved")
        return end.exit_code

    def evaluate_only(self) -> int:
        """Evaluates on all splits instead of training; the exit code."""
        self._final_evaluations()
        self._source.close()
        return EXIT_DONE

    def _final_evaluations(self) -> None:
        """Validation unless it has just been done, and the test split where there is one."""
        if not self._job.run.schedule.eval_interval:
            return
        if self._evaluated != self.state.step:
            self.evaluate("valid")
        if self._job.datasets.test is not None:
            self.evaluate("test")

    def _rows(self) -> int:
        """Of the next global batch."""
        return self._job.run.batch_sizes.at(self.state.consumed_samples)

    def _learning_rate(self) -> float:
        """Of the next update: by updates or, where that is further on, by the share of the minutes that is over."""
        clock = self.state.training_s / _budget_s(self._job.run) * self._job.run.schedule.train_iters
        return self._rates.after_updates(max(self.state.updates, clock))

    def _guard_allows_update(self) -> bool:
        """Asked by the engine on all ranks before an update, when the gradients are complete."""
        self._before, self._culprits = self.state, ""
        allows = self._guard.allows_update()
        if not allows:
            self._culprits = where_not_finite(self._job.engine, self._job.run.model, self._job.coordinator)
        return allows

    def _rewind(self) -> None:
        """Puts weights and optimizer back to the newest checkpoint; the samples since then are left out."""
        job = self._job
        assert job.saver is not None
        with self._watchdog.unlimited(self.state.step, "going back to the last checkpoint"):
            job.saver.wait()
            start = newest_own_checkpoint(job.run, job.ctx, job.coordinator)
            if start is None:
                log.info("there is no checkpoint to go back to yet; the update is skipped")
                return
            saved = load_checkpoint(start, job.ctx, job.coordinator, job.engine)
        self.state = self.state.rewound_to(saved)
        job.engine.global_steps, job.engine.skipped_steps = self.state.step, self.state.skipped_steps

    def _stopped(self, name: str, value: object, reason: str, repair: str) -> GuardError:
        """Saves the state and says what can be done."""
        kept = "nothing was saved, since there is no folder to save to"
        if self._job.saver:
            with self._watchdog.unlimited(self.state.step, "saving before the run stops"):
                self._job.saver.save(self.state, self._metrics())
                is_saved = self._job.saver.wait()
            kept = f"the state before it is saved in {self._job.run.output.save}" if is_saved else "saving has failed"
        return GuardError.of(name, value, f"{reason}; {kept}", repair)

    def _metrics(self) -> dict[str, float]:
        losses = self._losses.__dict__ if self._losses else {}
        return {name: value for name, value in losses.items() if value is not None}


def _end_of_plan(run: RunConfig, state: TrainingState, *, resumed: bool = False) -> End | None:
    """Whether the run has trained as long as it was meant to."""
    if state.step < run.schedule.train_iters and state.training_s < _budget_s(run):
        return None
    if resumed:
        log.info("nothing left to train: iteration %d of %d", state.step, run.schedule.train_iters)
    return End("the end of its plan", is_complete=True)


def _end_of(run: RunConfig, state: TrainingState, agreed: Agreement) -> End | None:
    """Why the run ends after the step, if it does."""
    if agreed.signal is not None:
        return End(agreed.signal.name, exit_code_of(agreed.signal), is_urgent=True)
    if end := _end_of_plan(run, state):
        return end
    minutes = run.schedule.exit_duration_in_mins
    if minutes is not None and agreed.run_s >= minutes * _MINUTE_S:
        return End(f"exit_duration_in_mins={minutes:g}", is_urgent=True)
    if _every(state.step, run.schedule.exit_interval):
        return End(f"exit_interval={run.schedule.exit_interval}")
    return None


def _budget_s(run: RunConfig) -> float:
    """Seconds that the run may train; infinite without a budget."""
    minutes = run.schedule.train_minutes
    return math.inf if minutes is None else minutes * _MINUTE_S


def _every(step: int, interval: int | None) -> bool:
    return interval is not None and step % interval == 0
