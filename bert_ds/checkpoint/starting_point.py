"""Which checkpoint a run starts from, and what it takes of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bert_ds.checkpoint import files
from bert_ds.checkpoint.format import EXP_AVG, EXP_AVG_SQ, MANIFEST_FILE, Manifest, step_of, tag_for
from bert_ds.checkpoint.reader import Checkpoint, find_latest
from bert_ds.config.output import OutputConfig
from bert_ds.errors import CheckpointError, Problem


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
    if output.load is None:
        return None
    if output.finetune and output.save is not None and (own := _newest(Path(output.save))) is not None:
        return own, True
    load = Path(output.load)
    found = _newest(load) if output.ckpt_step is None else _saved_at(load, output.ckpt_step)
    if found is not None:
        return found, not output.finetune
    if output.load == output.save and not output.exit_on_missing_checkpoint:
        return None
    raise CheckpointError.of(
        "output.load", load, "holds no checkpoint" if load.is_dir() else "is no folder",
        "name the folder of an earlier run, or leave --load out to start a new one" if output.load != output.save else
        "name the folder of an earlier run, or leave --exit-on-missing-checkpoint out to start a new one")


def _newest(folder: Path) -> Path | None:
    if (folder / MANIFEST_FILE).is_file():
        return folder
    return find_latest(folder) if folder.is_dir() else None


def _saved_at(load: Path, step: int) -> Path:
    folder = load / tag_for(step)
    if folder.is_dir():
        return folder
    with files.os_errors_reported("output.load", load):
        steps = sorted(found for path in load.iterdir() if (found := step_of(path.name)) is not None)
    there = f"{load} holds those of iterations {', '.join(map(str, steps))}" if steps else f"{load} holds none"
    raise CheckpointError.of("output.ckpt_step", step, f"no checkpoint was saved then: {there}",
                             "name one of them, or leave --ckpt-step out to take the newest")
