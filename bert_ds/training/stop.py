"""Whether the run has been asked to end: by a signal, or because its launcher has gone."""

from __future__ import annotations

import os
import signal
from types import FrameType, TracebackType

import torch
import torch.distributed as dist

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """Notes signals while it is entered; ranks agree at the end of a step, so that all save the same step.

    Launchers that do not pass a signal on are watched: when the parent process has gone, the run ends as by SIGTERM.
    """

    def __init__(self, *, watch_parent: bool) -> None:
        self.signal: signal.Signals | None = None
        self._parent = os.getppid() if watch_parent else None
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
        if own is None and self._parent not in {None, os.getppid()}:
            own = signal.SIGTERM
        if world_size == 1:
            return own
        flag = torch.tensor(int(own or 0), device=device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return signal.Signals(int(flag)) if int(flag) else None

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)
