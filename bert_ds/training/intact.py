"""The newest intact checkpoint, agreed on by all ranks before anything of it is loaded.

Every rank reads the manifest on its own disk and hashes its share of that disk's files. A checkpoint is taken when all
ranks hold the same manifest, no file has changed, and each rank finds on its disk what it needs.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bert_ds.checkpoint.files import os_errors_reported
from bert_ds.checkpoint.format import LayoutRecord, Manifest, rank_file, tag_for
from bert_ds.checkpoint.reader import (
    Checkpoint,
    folders_of,
    in_order,
    is_checkpoint,
    latest_tag,
    no_such_step,
    step_of,
    tags_in,
)
from bert_ds.errors import CheckpointError, Problem, SoundCheckpointError, raise_if_any
from bert_ds.training.coordination import Coordinator

log = logging.getLogger(__name__)


def find_intact(
    load: Path, layout: LayoutRecord, coordinator: Coordinator, *, step: int | None = None
) -> Checkpoint | None:
    """The checkpoint to go on from, the same on all ranks; None where `load` holds none at all.

    That is the one that `latest` names or, where it is damaged, the newest intact one; the log says which is taken and
    why those before it are not. A named one, by `step` or because `load` is the checkpoint's own folder, is taken or
    refused.

    Args:
        load: a folder of checkpoints, or a checkpoint; on every rank its own, where machines have disks of their own.
        layout: the process grid of this run.
        coordinator: the ranks.
        step: iteration of the one checkpoint that will do.

    Raises:
        CheckpointError: on all ranks alike: none is intact, or the first one cannot be read for another reason than
            damage.
    """
    found = coordinator.attempt(f"looking for checkpoints in {load}", lambda: _listing(load), CheckpointError)
    if any(one["is_checkpoint"] for one in found):
        folders = {load.name: [load]}
    else:
        tags = sorted({tag for one in found for tag in one["tags"]}, key=_step, reverse=True)
        latest = max((one["latest"] for one in found if one["latest"]), key=_step, default=None)
        order = in_order(tags, latest)
        if step is not None:
            if tag_for(step) not in tags:
                raise no_such_step(step, load, tags)
            order = [tag_for(step)]
        elif order and order[0] == latest:
            _tell_newer(tags, latest)
        folders = {tag: folders_of(load, tag) for tag in order}
    rejected: list[Problem] = []
    for tag, places in folders.items():
        checkpoint, problems = _examined(places, layout, coordinator)
        if checkpoint is not None:
            if rejected and coordinator.rank == 0:
                log.warning("going on from %s, the newest intact checkpoint", checkpoint.folder)
            return checkpoint
        rejected += problems
        if coordinator.rank == 0:
            more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            log.warning("checkpoint %s is not taken: %s%s", tag, problems[0], more)
    raise_if_any(CheckpointError, rejected)
    return None


def _listing(load: Path) -> dict[str, Any]:
    """What this rank sees in `load`."""
    with os_errors_reported("output.load", load):
        return {"is_checkpoint": is_checkpoint(load), "tags": tags_in(load), "latest": latest_tag(load)}


def _tell_newer(tags: Iterable[str], latest: str) -> None:
    for tag in tags:
        if _step(tag) > _step(latest):
            log.info("checkpoint %s is not taken: `latest` names %s; --ckpt-step %d would take it", tag, latest,
                     _step(tag))


def _step(tag: str) -> int:
    step = step_of(tag)
    assert step is not None
    return step


def _examined(
    places: list[Path], layout: LayoutRecord, coordinator: Coordinator
) -> tuple[Checkpoint | None, list[Problem]]:
    """The checkpoint that lies at one of `places` on every disk, or what keeps it from being used; on all ranks alike.

    Raises:
        CheckpointError: it cannot be read, though nothing says that it is damaged.
    """
    opened: dict[str, Checkpoint] = {}
    problems: list[Problem] = []

    def open_all() -> list[Any]:
        for place in places:
            try:
                checkpoint = Checkpoint.of_folder(place)
            except SoundCheckpointError:
                raise
            except CheckpointError as error:
                problems.extend(error.problems)
            else:
                opened.setdefault(checkpoint.identity, checkpoint)
        where = {identity: checkpoint.place_on_disk() for identity, checkpoint in opened.items()}
        return [where, _as_json(problems), socket.gethostname()]

    reports = coordinator.attempt(f"opening {places[0]}", open_all, SoundCheckpointError)
    shared = [identity for identity in reports[0][0] if all(identity in found for found, *_ in reports)]
    if not shared:
        return None, _where_it_lacks(reports) or [Problem(
            "checkpoint", places[0], "is not the same on the disks of all machines", "use an earlier checkpoint")]
    checkpoint = opened[shared[0]]
    disks = [found[shared[0]] for found, *_ in reports]
    together = [rank for rank, disk in enumerate(disks) if disk == disks[coordinator.rank]]
    share = checkpoint.manifest.files[together.index(coordinator.rank) :: len(together)]

    def check() -> list[Any]:
        try:
            absent, damage = checkpoint.examine(share, hashes=True)
        except SoundCheckpointError:
            raise
        except CheckpointError as error:
            absent, damage = [], list(error.problems)
        return [absent, _as_json(damage)]

    outcomes = coordinator.attempt(f"checking {checkpoint.folder}", check, SoundCheckpointError)
    absent_of = {tuple(disk): {name for rank, other in enumerate(disks) if other == disk for name in outcomes[rank][0]}
                 for disk in disks}
    missing = [absent_of[tuple(disk)] for disk in disks]
    found = _told(outcomes) or [*_misplaced(checkpoint, missing, layout)]
    return (None, found) if found else (checkpoint.without(missing[coordinator.rank]), [])


def _misplaced(checkpoint: Checkpoint, missing: list[set[str]], layout: LayoutRecord) -> Iterator[Problem]:
    """Files that no rank sees, or that a rank needs and does not see.

    Args:
        checkpoint: the checkpoint by its manifest.
        missing: names of the files that are not on the disk of each rank.
        layout: the process grid of this run.
    """
    manifest: Manifest = checkpoint.manifest
    yield from map(checkpoint.missing, sorted(set.intersection(*missing)))
    if not any(missing) or set.intersection(*missing):
        return
    if layout != manifest.layout:
        yield Problem("checkpoint", checkpoint.folder, "is spread over the disks of several machines and can only be "
                      "resumed in the layout that saved it",
                      f"copy the folders {checkpoint.folder.name} of all machines into one on a disk that all share")
        return
    for rank, absent in enumerate(missing):
        disk = manifest.disk_of(rank)
        needed = {rank_file(other) for other in disk.ranks} if disk else {file.name for file in manifest.files}
        if disk and absent & needed:
            yield Problem("checkpoint", checkpoint.folder, f"the part of rank {rank} was saved on the disk of "
                          f"{disk.host}, where this rank does not run",
                          "start the ranks on the same machines in the same order, or copy the folders of all machines "
                          "into one on a disk that all share")
            return
        if absent & needed:
            yield from map(checkpoint.missing, sorted(absent))


def _where_it_lacks(reports: list[Any]) -> list[Problem]:
    """The problems of a checkpoint that some ranks can open, or none, with the machine where only some cannot."""
    if not any(found for found, *_ in reports):
        return _told(reports)
    return [replace(problem, reason=f"{problem.reason} on {host}, the machine of rank {rank}")
            for rank, (found, problems, host) in enumerate(reports) if not found
            for problem in _told([(found, problems)])]


def _as_json(problems: Iterable[Problem]) -> list[dict[str, str]]:
    return [{**asdict(problem), "value": str(problem.value)} for problem in problems]


def _told(reports: Iterable[Any]) -> list[Problem]:
    """The problems of all ranks, each once."""
    return list(dict.fromkeys(Problem(**problem) for _, problems, *_ in reports for problem in problems))
