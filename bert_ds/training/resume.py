"""Resuming a run: which checkpoint it goes on from, and what this rank reads of it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from bert_ds.checkpoint.reader import Checkpoint, find_latest
from bert_ds.checkpoint.run_config import model_problems, vocabulary_problems
from bert_ds.config.output import OutputConfig
from bert_ds.config.run import RunConfig
from bert_ds.data.vocabulary import Vocabulary
from bert_ds.errors import CheckpointError, raise_if_any
from bert_ds.parallel.context import ParallelContext
from bert_ds.training.coordination import Coordinator
from bert_ds.training.engine import load_scaler_state
from bert_ds.training.fragments import fragments, moments, refresh_model_weights, saved_buffers
from bert_ds.training.state import TrainingState

log = logging.getLogger(__name__)


def find_checkpoint(
    run: RunConfig, ctx: ParallelContext, coordinator: Coordinator, vocabulary: Vocabulary
) -> Checkpoint | None:
    """The newest complete checkpoint in `output.load`, on every rank; None where a new run starts.

    Raises:
        CheckpointError: the checkpoint is damaged or belongs to another model or vocabulary.
    """
    if run.output.load is None:
        return None
    folder = coordinator.on_leader("looking for a checkpoint", lambda: _latest(run.output), leader=ctx.rank == 0)
    if folder is None:
        log.info("no checkpoint in %s: a new run starts", run.output.load)
        return None
    return coordinator.guarded(lambda: _open_for(run, Path(folder), vocabulary))


def load_checkpoint(
    checkpoint: Checkpoint, ctx: ParallelContext, coordinator: Coordinator, engine: Any
) -> TrainingState:
    """Puts the engine where the checkpoint's run was.

    Every rank reads the ranges it needs, whatever the layout that saved them.

    Raises:
        CheckpointError: the content of a file is not what was written.
    """
    # Every rank hashes its share of the files: one flipped bit would train on for weeks.
    own_share = checkpoint.manifest.files[ctx.rank :: ctx.world_size]
    coordinator.guarded(lambda: checkpoint.verify(own_share, hashes=True))
    coordinator.guarded(lambda: _restore(checkpoint, engine, ctx))
    coordinator.barrier(f"reading {checkpoint.folder}")
    refresh_model_weights(engine)
    manifest = checkpoint.manifest
    state = TrainingState(manifest.step, manifest.consumed_samples, manifest.successful_samples,
                          manifest.skipped_steps)
    engine.global_steps, engine.skipped_steps = state.step, state.skipped_steps
    engine.global_samples = state.consumed_samples
    if manifest.loss_scaler is not None:
        load_scaler_state(engine, manifest.loss_scaler)
    log.info("resumed from %s at iteration %d, %d samples consumed", checkpoint.folder, state.step,
             state.consumed_samples)
    return state


@torch.no_grad()
def _restore(checkpoint: Checkpoint, engine: Any, ctx: ParallelContext) -> None:
    """Fills this rank's masters and moments."""
    for fragment in fragments(engine):
        moments(engine, fragment.master)["step"].fill_(checkpoint.manifest.optimizer_step)
        for kind, buffer in saved_buffers(engine, fragment).items():
            fragment.of(buffer).copy_(checkpoint.read(
                kind, fragment.local.name, tp_index=fragment.sharding.index, tp_count=fragment.sharding.count,
                start=fragment.start, stop=fragment.start + fragment.numel))


def _open_for(run: RunConfig, folder: Path, vocabulary: Vocabulary) -> Checkpoint:
    checkpoint = Checkpoint.open(folder)
    manifest = checkpoint.manifest
    raise_if_any(CheckpointError, model_problems(manifest.config["model"], run.model))
    raise_if_any(CheckpointError, vocabulary_problems(
        manifest.vocabulary, vocab_file=run.data.vocab_file, sha256=vocabulary.sha256,
        tokenizer_type=run.data.tokenizer_type))
    return checkpoint


def _latest(output: OutputConfig) -> str | None:
    """The checkpoint to go on from. None starts a new run, where a run resumes from the folder that it saves to."""
    load = Path(str(output.load))
    found = find_latest(load) if load.is_dir() else None
    if found is None and output.load != output.save:
        raise CheckpointError.of("output.load", load, "holds no checkpoint" if load.is_dir() else "is no folder",
                                 "name the folder of an earlier run, or leave --load out to start a new one")
    return None if found is None else str(found)
