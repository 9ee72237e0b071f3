"""Saving and resuming a run: what this rank writes and reads, and in which order the ranks do it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bert_ds import __version__
from bert_ds.checkpoint.format import (
    EXP_AVG,
    EXP_AVG_SQ,
    WEIGHT,
    FileRecord,
    LayoutRecord,
    Manifest,
    SliceRecord,
    VocabularyRecord,
    tag_for,
)
from bert_ds.checkpoint.parameters import parameter_shapes
from bert_ds.checkpoint.reader import Checkpoint, find_latest
from bert_ds.checkpoint.run_config import model_problems, run_config_as_dict, vocabulary_problems
from bert_ds.checkpoint.writer import (
    TensorSlice,
    commit,
    incomplete_folder,
    prepare_folder,
    write_rank_file,
    write_vocabulary,
)
from bert_ds.compat import installed_version
from bert_ds.config.output import OutputConfig
from bert_ds.config.run import RunConfig
from bert_ds.data.vocabulary import Vocabulary
from bert_ds.errors import CheckpointError, raise_if_any
from bert_ds.parallel.context import ParallelContext
from bert_ds.training.coordination import Coordinator
from bert_ds.training.engine import load_scaler_state, scaler_state
from bert_ds.training.fragments import MOMENTS, Fragment, fragments, moments, refresh_model_weights, torch_optimizer
from bert_ds.training.state import TrainingState

log = logging.getLogger(__name__)
_KIND_OF_MOMENT = dict(zip(MOMENTS, (EXP_AVG, EXP_AVG_SQ), strict=True))


def save_checkpoint(
    run: RunConfig, ctx: ParallelContext, coordinator: Coordinator, engine: Any, state: TrainingState,
    vocabulary: Vocabulary, metrics: Mapping[str, float],
) -> None:
    """Writes SAVE/iter_N and moves `latest` to it, after the files of all ranks are on the disk.

    Raises:
        CheckpointError: the disk refuses; the checkpoint before stays the latest.
    """
    assert run.output.save is not None
    started = time.monotonic()
    save_dir, tag = Path(run.output.save), tag_for(state.step)
    leader = ctx.rank == 0
    folder = incomplete_folder(save_dir, tag)

    def prepare() -> dict[str, Any]:
        prepare_folder(save_dir, tag)
        return asdict(write_vocabulary(folder, Path(run.data.vocab_file), size=len(vocabulary.tokens),
                                       tokenizer_type=run.data.tokenizer_type))

    vocabulary_record = coordinator.on_leader(f"preparing {folder}", prepare, leader=leader)
    record = coordinator.guarded(lambda: write_rank_file(folder, ctx.rank, _own_slices(engine, ctx)))
    records = coordinator.gather(f"writing {folder}", asdict(record))

    def finish() -> None:
        files = tuple(_file_record(one) for one in records if one["slices"])
        commit(save_dir, tag, _manifest(run, ctx, engine, state, vocabulary_record, metrics, files))

    coordinator.on_leader(f"committing {folder}", finish, leader=leader)
    seconds, size = time.monotonic() - started, sum(one["bytes"] for one in records)
    log.info("saved checkpoint %s (%.2f GB in %.1f s, %.2f GB/s)", save_dir / tag, size / 1e9, seconds,
             size / 1e9 / max(seconds, 1e-9))


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


def _own_slices(engine: Any, ctx: ParallelContext) -> Iterator[TensorSlice]:
    """What this rank saves: its fragments, each replica of one by the first rank that has it."""
    for fragment in fragments(engine):
        sharding = fragment.sharding
        replicated = sharding.dim is None and ctx.tp_rank > 0
        if replicated or (fragment.is_whole and ctx.dp_rank > 0):
            continue
        for kind, buffer in _buffers(engine, fragment).items():
            yield TensorSlice(kind, fragment.local.name, sharding.index, sharding.count, fragment.start,
                              fragment.start + fragment.numel, fragment.of(buffer))


def _buffers(engine: Any, fragment: Fragment) -> dict[str, Tensor]:
    """The flat buffers that hold the fragment, by their kind in a checkpoint."""
    state = moments(engine, fragment.master)
    return {WEIGHT: fragment.master, **{_KIND_OF_MOMENT[name]: state[name] for name in MOMENTS}}


@torch.no_grad()
def _restore(checkpoint: Checkpoint, engine: Any, ctx: ParallelContext) -> None:
    """Fills this rank's masters and moments."""
    for fragment in fragments(engine):
        moments(engine, fragment.master)["step"].fill_(checkpoint.manifest.optimizer_step)
        for kind, buffer in _buffers(engine, fragment).items():
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


def _manifest(
    run: RunConfig, ctx: ParallelContext, engine: Any, state: TrainingState, vocabulary: Mapping[str, Any],
    metrics: Mapping[str, float], files: tuple[FileRecord, ...],
) -> Manifest:
    return Manifest(
        step=state.step, consumed_samples=state.consumed_samples, successful_samples=state.successful_samples,
        skipped_steps=state.skipped_steps, optimizer_step=_optimizer_step(engine), loss_scaler=scaler_state(engine),
        config=run_config_as_dict(run), layout=LayoutRecord(ctx.tp_size, ctx.pp_size, ctx.dp_size),
        versions={"bert_ds": __version__, "torch": torch.__version__,
                  "deepspeed": installed_version("deepspeed") or ""},
        vocabulary=VocabularyRecord(**vocabulary), metrics=metrics, parameters=parameter_shapes(run.model),
        files=files)


def _optimizer_step(engine: Any) -> int:
    """Updates that AdamW has counted; the same in every group."""
    states = [state for state in torch_optimizer(engine).state.values() if "step" in state]
    return int(states[0]["step"]) if states else 0


def _file_record(content: Mapping[str, Any]) -> FileRecord:
    slices = {key: SliceRecord(**where) for key, where in content["slices"].items()}
    return FileRecord(content["name"], content["bytes"], content["sha256"], slices)
