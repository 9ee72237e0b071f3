"""Which ranks save to the same disk: one shared by all, or one a machine. Found out by looking, never configured."""

from __future__ import annotations

import secrets
import socket
from dataclasses import dataclass
from pathlib import Path

from bert_ds.checkpoint.files import os_errors_reported
from bert_ds.checkpoint.format import DiskRecord
from bert_ds.training.coordination import Coordinator


@dataclass(frozen=True)
class Disks:
    """The disks behind the folder of checkpoints. A disk has the number of the smallest rank that sees it."""

    of_rank: tuple[int, ...]
    hosts: tuple[str, ...]
    """Name of each rank's machine."""

    def leads(self, rank: int) -> bool:
        """Whether `rank` is the one that prepares and commits on its disk."""
        return self.of_rank[rank] == rank

    def ranks_with(self, rank: int) -> tuple[int, ...]:
        """The ranks on the disk of `rank`, itself among them."""
        return tuple(other for other, disk in enumerate(self.of_rank) if disk == self.of_rank[rank])

    def records(self) -> tuple[DiskRecord, ...]:
        """What the manifest says of them: nothing where there is only one."""
        leaders = sorted(set(self.of_rank))
        if len(leaders) == 1:
            return ()
        return tuple(DiskRecord(self.hosts[leader], self.ranks_with(leader)) for leader in leaders)


def find_disks(folder: Path, coordinator: Coordinator) -> Disks:
    """Makes `folder` on every disk and finds the ranks that share one.

    Every rank leaves a file there under a name that no one has seen before, and looks for those of the others: whose it
    sees, it shares the disk with.

    Raises:
        CheckpointError: a rank cannot make or write the folder.
    """
    rank, what = coordinator.rank, f"looking at the disks of {folder}"
    token = coordinator.gather(what, secrets.token_hex(8))[0]

    def path_of(other: int) -> Path:
        return folder / f".disk_of_rank_{other}_{token}"

    def leave() -> None:
        with os_errors_reported("output.save", folder):
            folder.mkdir(parents=True, exist_ok=True)
            path_of(rank).touch()

    coordinator.guarded(leave)
    coordinator.barrier(what)
    seen = next(other for other in range(coordinator.world_size) if path_of(other).exists())
    found = coordinator.gather(what, [seen, socket.gethostname()])
    path_of(rank).unlink()
    return Disks(tuple(disk for disk, _ in found), tuple(host for _, host in found))
