"""Ends a job in which a rank is stuck or gone, after every rank has said where it stands.

A thread of each rank looks every few seconds whether its rank has come on, and shows in the TCP store that it lives.
No collective is needed to end a job that hangs in one.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import TextIO

from bert_ds.errors import EXIT_STUCK
from bert_ds.training.coordination import Coordinator

_PULSE_S = 5.0
_SILENCE_S = 120.0
"""Without a sign of life, after which a rank counts as gone. Launchers end a job with a dead rank sooner."""
_LEAVING_S = 150.0
"""How long ranks wait after one has reported a failure: it may be completing a checkpoint (training/saver.py)."""


@dataclass(frozen=True)
class _Position:
    step: int
    what: str
    """What the rank does, and what it waits for in that."""
    since: float
    is_limited: bool


class Watchdog:
    """Watches this rank while it is entered; ranks tell each other through the store."""

    def __init__(
        self, ranks: Coordinator, limit_s: float, *, end: Callable[[int], None] = os._exit, out: TextIO = sys.stderr,
        pulse_s: float = _PULSE_S, silence_s: float = _SILENCE_S,
    ) -> None:
        """
        Args:
            ranks: the coordinator of the main thread.
            limit_s: seconds that one position may last; infinite to wait for ever.
            end: ends the process with an exit code.
            out: where positions and stacks go; a file, as faulthandler wants it.
            pulse_s: seconds between two looks.
            silence_s: seconds without a sign of life from which a rank counts as gone.
        """
        self._ranks = ranks.beside("watchdog")
        self._limit_s, self._silence_s, self._pulse_s = limit_s, silence_s, pulse_s
        self._end, self._out = end, out
        self._position = _Position(0, "starts", time.monotonic(), False)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def at(self, step: int, what: str, *, is_limited: bool = True) -> None:
        """Says that this rank has come to a new position: in iteration `step`, doing `what`."""
        self._position = _Position(step, what, time.monotonic(), is_limited)

    @contextmanager
    def unlimited(self, step: int, what: str) -> Iterator[None]:
        """A position that may last as long as it takes, such as writing to a slow disk."""
        self.at(step, what, is_limited=False)
        yield
        self.at(step, f"after {what}")

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        pulses, heard, failed_since = 0, _Pulses(self._ranks.world_size), None
        while not self._closed.wait(self._pulse_s):
            pulses += 1
            try:
                self._ranks.put("alive", str(pulses))
                failure = self._ranks.failure()
                alarm = self._ranks.peek("alarm") or (self._own_alarm(heard) if failure is None else None)
            except Exception as error:  # noqa: BLE001 - whatever the store meets: rank 0, which keeps it, has gone
                alarm, failure = f"rank 0, which keeps the store, is gone ({error})".splitlines()[0], None
            if failure is not None and failed_since is None:
                failed_since = time.monotonic()
            if failed_since is not None and time.monotonic() - failed_since > _LEAVING_S:
                alarm = alarm or f"another rank has failed: {failure}"
            if alarm and not self._closed.is_set():
                self._give_up(alarm)
                return

    def _own_alarm(self, heard: _Pulses) -> str | None:
        """Why the job cannot go on as far as this rank knows; told to all ranks."""
        position, reason = self._position, None
        lasts = time.monotonic() - position.since
        if position.is_limited and lasts > self._limit_s:
            reason = f"rank {self._ranks.rank} has not come on for {lasts:.0f} s"
        elif self._ranks.rank == 0 and (silent := heard.silent(self._ranks.peek_all("alive"), self._silence_s)):
            reason = f"no sign of life for {self._silence_s:.0f} s from ranks {silent}"
        if reason is not None:
            self._ranks.put_first("alarm", reason)
        return reason

    def _give_up(self, alarm: str) -> None:
        """Says where this rank stands and ends it. Rank 0 keeps the store, so it leaves last."""
        position = self._position
        lasts = time.monotonic() - position.since
        print(f"error: the watchdog ends the job: {alarm}. Rank {self._ranks.rank} stands in iteration "
              f"{position.step}, {position.what}, since {lasts:.0f} s; its threads:", file=self._out, flush=True)
        faulthandler.dump_traceback(self._out, all_threads=True)
        self._out.flush()
        if self._ranks.rank == 0:
            time.sleep(3 * self._pulse_s)
        self._end(EXIT_STUCK)


class _Pulses:
    """When each rank's pulse was last seen to change."""

    def __init__(self, world_size: int) -> None:
        self._last: list[tuple[str | None, float]] = [(None, time.monotonic())] * world_size

    def silent(self, pulses: list[str | None], limit_s: float) -> list[int]:
        """The ranks whose pulse has been the same for `limit_s`."""
        now = time.monotonic()
        for rank, pulse in enumerate(pulses):
            if pulse != self._last[rank][0]:
                self._last[rank] = (pulse, now)
        return [rank for rank, (_, since) in enumerate(self._last) if now - since > limit_s]
