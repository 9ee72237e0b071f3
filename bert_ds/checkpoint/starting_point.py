"""Which checkpoint a run starts from, and what it takes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from bert_ds.checkpoint import files
from bert_ds.checkpoint.format import EXP_AVG, EXP_AVG_SQ, Manifest, tag_for
from bert_ds.checkpoint.reader import Checkpoint, find_latest, is_checkpoint, no_such_step, tags_in
from bert_ds.config.output import OutputConfig
from bert_ds.errors import CheckpointError, Problem

Found = TypeVar("Found")


@dataclass(frozen=True)
class StartingPoint:
    """A checkpoint and how much of it a run takes beside the weights."""

    checkpoint: Checkpoint
    continues: bool
    """Whether the run goes on at the checkpoint's iteration, in its order of samples; otherwise it starts at 0."""
    with_optimizer: bool
    """Whether it takes the moments of AdamW and the loss scale."""

    @property
    def continued(self) -> Manifest | None:
        """What is known of the run that this one continues; None where it only starts from its weights."""
        return self.checkpoint.manifest if self.continues else None

    def problems(self) -> Iterator[Problem]:
        """What the run wants to take and the checkpoint does not hold."""
        if self.with_optimizer and not {EXP_AVG, EXP_AVG_SQ} <= set(self.checkpoint.manifest.kinds):
            yield Problem("checkpoint", self.checkpoint.folder, "holds weights without the optimizer's moments",
                          "start the moments afresh with --no-load-optim, or start a run at iteration 0 from the "
                          "weights with --finetune")


def folder_to_start_from(output: OutputConfig) -> tuple[Path, bool] | None:
    """The folder of the checkpoint, and whether the run continues that checkpoint's run; None starts a new run.

    Raises:
        CheckpointError: there is no such checkpoint where there has to be one.
    """
    return choose_start(output, lambda load, step: _newest(load) if step is None else _saved_at(load, step))


def choose_start(
    output: OutputConfig, find: Callable[[Path, int | None], Found | None]
) -> tuple[Found, bool] | None:
    """The checkpoint, and whether the run continues that checkpoint's run; None starts a new run.

    Args:
        output: what the run was told.
        find: the newest usable checkpoint of a folder, or the one of an iteration.

    Raises:
        CheckpointError: there is no such checkpoint where there has to be one.
    """
    if output.load is None:
        return None
    if output.finetune and output.save is not None and (own := find(Path(output.save), None)) is not None:
        return own, True
    load = Path(output.load)
    found = find(load, output.ckpt_step)
    if found is not None:
        return found, not output.finetune
    if output.load == output.save and not output.exit_on_missing_checkpoint:
        return None
    raise CheckpointError.of(
        "output.load", load, "holds no checkpoint" if load.is_dir() else "is no folder",
        "name the folder of an earlier run, or leave --load out to start a new one" if output.load != output.save else
        "name the folder of an earlier run, or leave --exit-on-missing-checkpoint out to start a new one")


def _newest(folder: Path) -> Path | None:
    if is_checkpoint(folder):
        return folder
    return find_latest(folder) if folder.is_dir() else None


def _saved_at(load: Path, step: int) -> Path:
    folder = load / tag_for(step)
    if folder.is_dir():
        return folder
    with files.os_errors_reported("output.load", load):
        raise no_such_step(step, load, tags_in(load))
