"""Resuming a run: which checkpoint it goes on from, and what this rank reads of it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from bert_ds.checkpoint.config_diff import differences
from bert_ds.checkpoint.format import LayoutRecord, Manifest
from bert_ds.checkpoint.parameters import parameter_shapes
from bert_ds.checkpoint.reader import Checkpoint
from bert_ds.checkpoint.run_config import model_problems, vocabulary_problems
from bert_ds.checkpoint.starting_point import StartingPoint, choose_start
from bert_ds.config.run import RunConfig
from bert_ds.config.schedule import ScheduleConfig
from bert_ds.data.vocabulary import Vocabulary
from bert_ds.errors import CheckpointError, raise_if_any
from bert_ds.parallel.context import ParallelContext
from bert_ds.training.coordination import Coordinator
from bert_ds.training.engine import load_scaler_state
from bert_ds.training.fragments import fragments, moments, refresh_model_weights, saved_buffers
from bert_ds.training.intact import find_intact
from bert_ds.training.lr_schedule import LearningRate
from bert_ds.training.state import TrainingState

log = logging.getLogger(__name__)


def find_starting_point(
    run: RunConfig, ctx: ParallelContext, coordinator: Coordinator, vocabulary: Vocabulary
) -> StartingPoint | None:
    """The checkpoint that the settings under `output` mean, on every rank; None where a new run starts.

    Raises:
        CheckpointError: the checkpoint is damaged or belongs to another model or vocabulary.
    """
    if run.output.load is None:
        return None
    layout = LayoutRecord(ctx.tp_size, ctx.pp_size, ctx.dp_size)
    found = choose_start(run.output, lambda load, step: find_intact(load, layout, coordinator, step=step))
    if found is None:
        log.info("no checkpoint in %s: a new run starts", run.output.load)
        return None
    checkpoint, continues = found
    return coordinator.guarded(lambda: _checked(run, checkpoint, continues, vocabulary))


def newest_own_checkpoint(run: RunConfig, ctx: ParallelContext, coordinator: Coordinator) -> StartingPoint | None:
    """The newest intact checkpoint that the run itself has saved; None before the first."""
    assert run.output.save is not None
    layout = LayoutRecord(ctx.tp_size, ctx.pp_size, ctx.dp_size)
    found = find_intact(Path(run.output.save), layout, coordinator, step=None)
    return None if found is None else StartingPoint(found, continues=True, with_optimizer=True)


def load_checkpoint(
    start: StartingPoint, ctx: ParallelContext, coordinator: Coordinator, engine: Any
) -> TrainingState:
    """Puts the engine where the checkpoint's run was, or gives it the checkpoint's weights alone.

    Every rank reads the ranges it needs, whatever the layout that saved them.

    Raises:
        CheckpointError: a file cannot be read.
    """
    checkpoint, manifest = start.checkpoint, start.checkpoint.manifest
    coordinator.guarded(lambda: _restore(start, engine, ctx))
    coordinator.barrier(f"reading {checkpoint.folder}")
    refresh_model_weights(engine)
    if not start.continues:
        log.info("the weights of %s are loaded; the run starts at iteration 0", checkpoint.folder)
        return TrainingState()
    state = TrainingState(manifest.step, manifest.consumed_samples, manifest.successful_samples,
                          manifest.skipped_steps, manifest.training_s)
    engine.global_steps, engine.skipped_steps = state.step, state.skipped_steps
    engine.global_samples = state.consumed_samples
    coordinator.guarded(lambda: _restore_fp8(checkpoint, engine, ctx))
    if start.with_optimizer and manifest.loss_scaler is not None:
        load_scaler_state(engine, manifest.loss_scaler)
    log.info("resumed from %s at iteration %d, %d samples consumed%s", checkpoint.folder, state.step,
             state.consumed_samples, "" if start.with_optimizer else "; the optimizer starts afresh")
    return state


def tell_what_differs(start: StartingPoint, run: RunConfig, ctx: ParallelContext) -> None:
    """Logs what the run does otherwise than the one that saved the checkpoint, one line each; nothing if nothing."""
    saved = start.continued
    if saved is None:
        lines = list(_heads_that_differ(start.checkpoint.manifest, run))
        title = f"not every tensor of {start.checkpoint.folder} has its place in this run:"
    else:
        lines = [str(one) for one in differences(saved, run, LayoutRecord(ctx.tp_size, ctx.pp_size, ctx.dp_size))]
        lines += _learning_rates(saved, run)
        title = "differs from the run that saved the checkpoint (saved -> now):"
    for line in [title, *(f"  {line}" for line in lines)] if lines else []:
        log.info(line)


def _heads_that_differ(saved: Manifest, run: RunConfig) -> Iterator[str]:
    wanted = parameter_shapes(run.model)
    missing = [name for name in wanted if name not in saved.parameters]
    unused = [name for name in saved.parameters if name not in wanted]
    if missing:
        yield f"initialised from the seed: {', '.join(missing)}"
    if unused:
        yield f"not used: {', '.join(unused)}"


def _learning_rates(saved: Manifest, run: RunConfig) -> Iterator[str]:
    """The rate of the next update by the saved schedule and by this one, where they differ."""
    schedule, engine = saved.config.get("schedule"), saved.config.get("engine")
    if not schedule or not engine:
        return
    known = {field.name for field in fields(ScheduleConfig)}
    former = ScheduleConfig(**{name: value for name, value in schedule.items() if name in known})
    updates = saved.step - saved.skipped_steps
    before = LearningRate(former, engine["lr"], engine["global_batch_size"]).after_updates(updates)
    after = LearningRate(run.schedule, run.engine.lr, run.engine.global_batch_size).after_updates(updates)
    if before != after:
        yield f"learning rate of the next update: {before:.3e} -> {after:.3e}"


@torch.no_grad()
def _restore(start: StartingPoint, engine: Any, ctx: ParallelContext) -> None:
    """Fills this rank's masters and, with the optimizer, its moments; what the checkpoint lacks keeps its values."""
    checkpoint, manifest = start.checkpoint, start.checkpoint.manifest
    for fragment in fragments(engine):
        name = fragment.local.name
        if name not in manifest.parameters:
            assert not start.continues, f"{name}: model_problems admits no missing parameter"
            continue
        if start.with_optimizer:
            moments(engine, fragment.master)["step"].fill_(manifest.optimizer_step)
        for kind, buffer in saved_buffers(engine, fragment, with_moments=start.with_optimizer).items():
            fragment.of(buffer).copy_(checkpoint.read(
                kind, name, tp_index=fragment.sharding.index, tp_count=fragment.sharding.count,
                start=fragment.start, stop=fragment.start + fragment.numel))


def _restore_fp8(checkpoint: Checkpoint, engine: Any, ctx: ParallelContext) -> None:
    """Goes on with the scaling factors of the checkpoint's run, where it had the same layers on each rank."""
    fp8 = engine.module.fp8
    if fp8 is None or not fp8.state():
        return
    same_layout = checkpoint.manifest.layout == LayoutRecord(ctx.tp_size, ctx.pp_size, ctx.dp_size)
    if same_layout and fp8.restore(checkpoint.fp8_state(ctx.rank)):
        log.info("FP8 scaling factors go on from the checkpoint")
    else:
        log.info("FP8 scaling factors start afresh: the checkpoint has none for these layers in this layout")


def _checked(run: RunConfig, checkpoint: Checkpoint, continues: bool, vocabulary: Vocabulary) -> StartingPoint:
    start = StartingPoint(checkpoint, continues, with_optimizer=continues and run.output.load_optim)
    manifest = checkpoint.manifest
    raise_if_any(CheckpointError, model_problems(manifest.config["model"], run.model, heads_may_differ=not continues))
    raise_if_any(CheckpointError, vocabulary_problems(
        manifest.vocabulary, vocab_file=run.data.vocab_file, sha256=vocabulary.sha256,
        tokenizer_type=run.data.tokenizer_type))
    raise_if_any(CheckpointError, start.problems())
    return start
