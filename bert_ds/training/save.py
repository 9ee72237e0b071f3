"""What this rank saves of a run, and the order in which the ranks make a checkpoint of it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bert_ds import __version__
from bert_ds.checkpoint import files
from bert_ds.checkpoint.format import (
    FP8_STATE,
    FileRecord,
    LayoutRecord,
    Manifest,
    SliceRecord,
    VocabularyRecord,
    tag_for,
)
from bert_ds.checkpoint.parameters import parameter_shapes
from bert_ds.checkpoint.run_config import run_config_as_dict
from bert_ds.checkpoint.writer import (
    TensorSlice,
    incomplete_folder,
    move_latest,
    prepare_folder,
    prove_file,
    publish,
    remove,
    superseded,
    write_rank_file,
    write_vocabulary_text,
)
from bert_ds.compat import installed_version
from bert_ds.config.output import OutputConfig
from bert_ds.config.run import RunConfig
from bert_ds.errors import CheckpointError, raise_if_any
from bert_ds.parallel.context import ParallelContext
from bert_ds.training.coordination import Coordinator
from bert_ds.training.disks import Disks
from bert_ds.training.engine import scaler_state
from bert_ds.training.fragments import Fragment, fragments, saved_buffers, torch_optimizer
from bert_ds.training.state import TrainingState

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Target:
    """Where a run's checkpoints go; the same for all of them."""

    output: OutputConfig
    disks: Disks
    vocabulary: bytes
    """Content of the vocabulary file."""
    needed_bytes: int
    """Tensors that the ranks on this rank's disk write."""

    @property
    def folder(self) -> Path:
        assert self.output.save is not None
        return Path(self.output.save)


def write_checkpoint(
    target: Target, ranks: Coordinator, manifest: Manifest, slices: list[TensorSlice]
) -> int:
    """Makes SAVE/iter_N on every disk and moves `latest` to it, after the files of all ranks are on their disks; then
    deletes the checkpoints that are no longer kept. Returns the size of all files.

    Args:
        target: where it goes.
        ranks: coordinator of the calling thread.
        manifest: what the checkpoint says of the run, `files` still empty.
        slices: what this rank saves.

    Raises:
        CheckpointError: on all ranks, where the disk of one refuses; the checkpoint before stays the latest, the ranks
            can go on.
    """
    tag = tag_for(manifest.step)
    folder, leads = incomplete_folder(target.folder, tag), target.disks.leads(ranks.rank)
    try:
        size, names = _write(target, ranks, manifest, slices)
    except CheckpointError:
        if leads:
            with contextlib.suppress(OSError):
                files.remove_folder(folder)
        raise
    if leads:
        _remove(target.folder, names)
    return size


def _write(
    target: Target, ranks: Coordinator, manifest: Manifest, slices: list[TensorSlice]
) -> tuple[int, list[str]]:
    """The files of all ranks and what makes them a checkpoint; their size, and the folders that may go now."""
    tag, save_dir = tag_for(manifest.step), target.folder
    folder, leads = incomplete_folder(save_dir, tag), target.disks.leads(ranks.rank)
    keep_last, keep_every = target.output.keep_last, target.output.keep_every

    def prepare() -> list[str] | None:
        if not leads:
            return None
        prepare_folder(save_dir, tag, target.needed_bytes)
        write_vocabulary_text(folder, target.vocabulary, size=manifest.vocabulary.size,
                              tokenizer_type=manifest.vocabulary.tokenizer_type)
        return list(superseded(save_dir, manifest.step, keep_last=keep_last, keep_every=keep_every))

    # Rank 0 decides for all disks, which hold the same checkpoints.
    names = ranks.attempt(f"preparing {folder}", prepare, CheckpointError)[0]
    written: list[FileRecord] = []

    def write() -> None:
        written.append(write_rank_file(folder, ranks.rank, slices))
        if names:
            prove_file(folder, written[0])

    ranks.attempt(f"writing {folder}", write, CheckpointError)
    records = ranks.gather(f"the records of {folder}", asdict(written[0]), for_all=False)
    complete: list[str] = []

    def join() -> None:
        if ranks.rank == 0:
            complete.append(_complete(manifest, records, target.disks))

    ranks.attempt(f"joining the records of {folder}", join, CheckpointError)
    manifests = ranks.gather(f"the manifest of {folder}", complete, wanted=leads)

    def finish() -> int:
        if leads:
            publish(save_dir, tag, manifests[0][0].encode())
        return written[0].bytes

    sizes = ranks.attempt(f"publishing {save_dir / tag}", finish, CheckpointError)
    ranks.attempt(f"moving latest to {tag}", lambda: move_latest(save_dir, tag) if leads else None, CheckpointError)
    return sum(sizes), names


def _complete(manifest: Manifest, records: list[dict[str, Any]], disks: Disks) -> str:
    """The JSON text of the manifest with the files of all ranks."""
    found = tuple(_file_record(one) for one in records if one["slices"])
    manifest = replace(manifest, files=found, disks=disks.records())
    raise_if_any(CheckpointError, manifest.problems())
    return manifest.to_json().decode()


def _remove(save_dir: Path, names: list[str]) -> None:
    """Deletes what is no longer kept; a folder that resists does no harm to the checkpoint that was saved."""
    try:
        remove(save_dir, names)
    except CheckpointError as error:
        log.warning("an old checkpoint could not be deleted: %s", error)


def own_slices(
    engine: Any, ctx: ParallelContext, disks: Disks, *, with_moments: bool
) -> Iterator[TensorSlice]:
    """What this rank saves: its fragments, each replica of one by the first rank on this disk that has it, and its FP8
    scaling factors."""
    for fragment in fragments(engine):
        sharding = fragment.sharding
        if ctx.rank != min(set(_holders(fragment, ctx)).intersection(disks.ranks_with(ctx.rank))):
            continue
        for kind, buffer in saved_buffers(engine, fragment, with_moments=with_moments).items():
            yield TensorSlice(kind, fragment.local.name, sharding.index, sharding.count, fragment.start,
                              fragment.start + fragment.numel, fragment.of(buffer))
    if engine.module.fp8 is not None:
        for name, tensor in engine.module.fp8.state().items():
            yield TensorSlice(FP8_STATE, name, 0, 1, 0, tensor.numel(), tensor.flatten())


def _holders(fragment: Fragment, ctx: ParallelContext) -> Iterator[int]:
    """The ranks that hold the same numbers."""
    for dp_rank in range(ctx.dp_size) if fragment.is_whole else (ctx.dp_rank,):
        for tp_rank in range(ctx.tp_size) if fragment.sharding.dim is None else (ctx.tp_rank,):
            yield (ctx.pp_rank * ctx.dp_size + dp_rank) * ctx.tp_size + tp_rank


def draft_manifest(
    run: RunConfig, ctx: ParallelContext, engine: Any, state: TrainingState, vocabulary: VocabularyRecord,
    metrics: Mapping[str, float],
) -> Manifest:
    """What a checkpoint says of the run as it stands; the files are still to come."""
    return Manifest(
        step=state.step, consumed_samples=state.consumed_samples, successful_samples=state.successful_samples,
        skipped_steps=state.skipped_steps, optimizer_step=_optimizer_step(engine), loss_scaler=scaler_state(engine),
        config=run_config_as_dict(run), layout=LayoutRecord(ctx.tp_size, ctx.pp_size, ctx.dp_size),
        versions={"bert_ds": __version__, "torch": torch.__version__,
                  "deepspeed": installed_version("deepspeed") or ""},
        vocabulary=vocabulary, metrics=metrics, parameters=parameter_shapes(run.model), files=(),
        training_s=state.training_s)


def _optimizer_step(engine: Any) -> int:
    """Updates that AdamW has counted; the same in every group."""
    states = [state for state in torch_optimizer(engine).state.values() if "step" in state]
    return int(states[0]["step"]) if states else 0


def _file_record(content: Mapping[str, Any]) -> FileRecord:
    slices = {key: SliceRecord(**where) for key, where in content["slices"].items()}
    return FileRecord(content["name"], content["bytes"], content["sha256"], slices)
