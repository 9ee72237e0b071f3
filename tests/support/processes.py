"""Processes of other processes, so that nothing a test has started outlives it."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path


def kill_with_descendants(process: int) -> None:
    """SIGKILL for a process and for all that it has started, at once: what a lost machine looks like."""
    for one in (process, *descendants(process)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(one, signal.SIGKILL)


def descendants(process: int) -> list[int]:
    """All that a process has started, and what they have started in turn."""
    parents = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(status.parent.name)] = int(status.read_text().rpartition(")")[2].split()[1])
    found = [process]
    for one in found:
        found.extend(child for child, parent in parents.items() if parent == one)
    return found[1:]
