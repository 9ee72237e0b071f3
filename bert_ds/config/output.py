"""What a run writes, where and how often."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bert_ds.errors import Problem


@dataclass(frozen=True, kw_only=True)
class OutputConfig:
    """Checkpoints and logs. Intervals are in iterations."""

    save: str | None = None
    """Folder of the checkpoints; None saves nothing."""
    load: str | None = None
    """Folder to resume from; a folder without a checkpoint starts a new run."""
    save_interval: int | None = None
    """Iterations between checkpoints; the last iteration is saved as well."""
    tensorboard_dir: str | None = None
    """Folder of the TensorBoard events and of metrics.jsonl; None writes neither."""
    log_interval: int = 100
    """Iterations between log lines; metrics are means over them."""

    def problems(self) -> Iterator[Problem]:
        """Everything that is wrong with these settings."""
        if self.save_interval is not None and self.save is None:
            yield Problem("output.save_interval", self.save_interval, "has no folder to save to", "set output.save")
        for name in ("save_interval", "log_interval"):
            value = getattr(self, name)
            if value is not None and value < 1:
                yield Problem(f"output.{name}", value, "must be at least 1", "give a positive number")
