"""Saving a run: what this rank writes, and in which order the ranks do it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bert_ds import __version__
from bert_ds.checkpoint.format import FileRecord, LayoutRecord, Manifest, SliceRecord, VocabularyRecord, tag_for
from bert_ds.checkpoint.parameters import parameter_shapes
from bert_ds.checkpoint.run_config import run_config_as_dict
from bert_ds.checkpoint.writer import (
    TensorSlice,
    commit,
    incomplete_folder,
    prepare_folder,
    write_rank_file,
    write_vocabulary,
)
from bert_ds.compat import installed_version
from bert_ds.config.run import RunConfig
from bert_ds.data.vocabulary import Vocabulary
from bert_ds.parallel.context import ParallelContext
from bert_ds.training.coordination import Coordinator
from bert_ds.training.engine import scaler_state
from bert_ds.training.fragments import fragments, saved_buffers, torch_optimizer
from bert_ds.training.state import TrainingState

log = logging.getLogger(__name__)


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
    slices = _own_slices(engine, ctx, with_moments=run.output.save_optim)
    record = coordinator.guarded(lambda: write_rank_file(folder, ctx.rank, slices))
    records = coordinator.gather(f"writing {folder}", asdict(record))

    def finish() -> None:
        files = tuple(_file_record(one) for one in records if one["slices"])
        commit(save_dir, tag, _manifest(run, ctx, engine, state, vocabulary_record, metrics, files))

    coordinator.on_leader(f"committing {folder}", finish, leader=leader)
    seconds, size = time.monotonic() - started, sum(one["bytes"] for one in records)
    log.info("saved checkpoint %s (%.2f GB in %.1f s, %.2f GB/s)", save_dir / tag, size / 1e9, seconds,
             size / 1e9 / max(seconds, 1e-9))


def _own_slices(engine: Any, ctx: ParallelContext, *, with_moments: bool) -> Iterator[TensorSlice]:
    """What this rank saves: its fragments, each replica of one by the first rank that has it."""
    for fragment in fragments(engine):
        sharding = fragment.sharding
        replicated = sharding.dim is None and ctx.tp_rank > 0
        if replicated or (fragment.is_whole and ctx.dp_rank > 0):
            continue
        for kind, buffer in saved_buffers(engine, fragment, with_moments=with_moments).items():
            yield TensorSlice(kind, fragment.local.name, sharding.index, sharding.count, fragment.start,
                              fragment.start + fragment.numel, fragment.of(buffer))


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
