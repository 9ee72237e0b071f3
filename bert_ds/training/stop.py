"""Whether the run has been asked to end: by a signal, or because its launcher has gone."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import FrameType, TracebackType

import torch
import torch.distributed as dist

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """Notes signals while it is entered; ranks agree at the end of a step, so that all save the same step.

    Launchers that do not pass a signal on are watched: when the parent process has gone, or the `deepspeed` command
    behind it, the run ends as by SIGTERM.
    """

    def __init__(self, *, watch_parent: bool) -> None:
        self.signal: signal.Signals | None = None
        self._launchers = _launchers() if watch_parent else ()
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopRequest:
        for number in SIGNALS:
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def agreed(self, device: torch.device, world_size: int) -> signal.Signals | None:
        """The signal that any rank was sent, on all ranks alike; None to go on."""
        own = self.signal
        if own is None and self._launchers and _launchers()[: len(self._launchers)] != self._launchers:
            own = signal.SIGTERM
        if world_size == 1:
            return own
        flag = torch.tensor(int(own or 0), device=device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return signal.Signals(int(flag)) if int(flag) else None

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
