"""Whether the run has been asked to end: by a signal, or because its launcher has gone; and what time it is."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType

import torch
import torch.distributed as dist

from bert_ds.errors import EXIT_REQUEUE

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def exit_code_of(number: signal.Signals) -> int:
    """What a run ends with after a signal: as a shell reports it, or the wish to be started again after SIGUSR1."""
    return EXIT_REQUEUE if number is signal.SIGUSR1 else 128 + number


@dataclass(frozen=True)
class Agreement:
    """What ranks know alike after a step."""

    signal: signal.Signals | None
    """One that any rank was sent."""
    training_s: float
    """Seconds of training, on the rank with the most."""
    run_s: float
    """Seconds since the run was started on the first rank."""


class StopRequest:
    """Notes signals while it is entered; ranks agree at the end of a step, so that all save the same step.

    Launchers that do not pass a signal on are watched: when the parent process has gone, or the `deepspeed` command
    behind it, the run ends as by SIGTERM.
    """

    def __init__(self, *, watch_parent: bool, started: float = 0.0, trained_s: float = 0.0) -> None:
        """
        Args:
            watch_parent: whether the run ends with its parent process.
            started: the monotonic clock when the run was started.
            trained_s: seconds of training before a resume.
        """
        self.signal: signal.Signals | None = None
        self._launchers = _launchers() if watch_parent else ()
        self._previous: dict[signal.Signals, object] = {}
        self._training_since = time.monotonic() - trained_s
        self._started = started

    def __enter__(self) -> StopRequest:
        for number in SIGNALS:
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def agreed(self, device: torch.device, world_size: int) -> Agreement:
        """The signal that any rank was sent and the latest time on any, on all ranks alike."""
        own = self.signal
        if own is None and self._launchers and _launchers()[: len(self._launchers)] != self._launchers:
            own = signal.SIGTERM
        now = time.monotonic()
        values = torch.tensor([int(own or 0), now - self._training_since, now - self._started],
                              dtype=torch.float64, device=device)
        if world_size > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX)
        number, training_s, run_s = values.tolist()
        return Agreement(signal.Signals(int(number)) if number else None, training_s, run_s)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)


def _launchers() -> tuple[int, ...]:
    """The parent process and, where it is one of DeepSpeed's, the one that started it (known on Linux only)."""
    parent = os.getppid()
    try:
        fields = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()
        command = Path(f"/proc/{parent}/cmdline").read_bytes()
    except OSError:
        return (parent,)
    return (parent, int(fields[1])) if b"deepspeed" in command else (parent,)
