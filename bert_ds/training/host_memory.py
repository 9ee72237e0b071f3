"""Memory of this machine that is free for the taking, in bytes."""

from __future__ import annotations

from pathlib import Path

_GROUPS = (("memory.max", "memory.current", "inactive_file"),
           ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"))
"""Limit, use, and the use that the system gives back on demand, in version 2 and 1 of Linux's control groups."""


def available_bytes(root: Path = Path("/")) -> int | None:
    """What can be allocated without swapping, within the limit of a container; None where the system does not say."""
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    free = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    groups = root / "sys/fs/cgroup"
    for limit, used, reclaimable in _GROUPS:
        try:
            statistics = (groups / limit).with_name("memory.stat").read_text().splitlines()
            spare = sum(int(line.split()[1]) for line in statistics if line.split()[0] == reclaimable)
            free.append(int((groups / limit).read_text()) - int((groups / used).read_text()) + spare)
        except (OSError, ValueError):
            continue  # no such version, or no limit ("max")
    return min(free, default=None)
