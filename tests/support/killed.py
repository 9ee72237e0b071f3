"""A process that dies at a chosen touch of the disk, as by kill -9 or a loss of power: nothing runs after it."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from bert_ds.checkpoint import files

TOUCHES = ((os, "fsync"), (os, "replace"), (os, "mkdir"), (os, "unlink"), (os, "rmdir"), (files, "_pieces"))
"""Every sync, rename, making and removal, and (`_pieces`) every write."""
_KILLED, _FAILED = 9, 1


def without_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets fsync return at once: what a killed process has written stays written, and hundreds of saves are made."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def deaths(body: Callable[[], Any], prepare: Callable[[int], Any]) -> Iterator[tuple[int, bool]]:
    """Runs `body` in forked processes that die at their first, second, ... touch of the disk, until one survives.

    Before each, `prepare` is called with its number. Yields that number and whether the process has finished.
    """
    for point in itertools.count():
        prepare(point)
        finished = _survives(body, point)
        yield point, finished
        if finished:
            return


def _survives(body: Callable[[], Any], point: int) -> bool:
    child = os.fork()
    if child == 0:
        code = _FAILED
        try:
            _die_at(point)
            body()
            code = 0
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, _KILLED), f"the saver failed with {code} at touch {point}"
    return code == 0


def _die_at(point: int) -> None:
    signal.alarm(60)
    count = itertools.count()  # its next() is atomic: several threads may write

    def deadly(real: Callable[..., Any]) -> Callable[..., Any]:
        def touch(*arguments: Any, **keywords: Any) -> Any:
            if next(count) >= point:
                os._exit(_KILLED)
            return real(*arguments, **keywords)

        return touch

    for module, name in TOUCHES:
        setattr(module, name, deadly(getattr(module, name)))
