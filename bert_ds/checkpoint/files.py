"""Writes that survive a crash: every write, fsync and rename of a checkpoint or an export goes through this file.

The order that makes a name on disk trustworthy: write the bytes under a temporary name, fsync the file, rename, fsync
the folder.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bert_ds.errors import CheckpointError, SoundCheckpointError

_PIECE_BYTES = 16 * 2**20
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_NO_PERMISSION = (errno.EACCES, errno.EPERM, errno.EROFS)

Buffer = bytes | memoryview


@dataclass(frozen=True)
class Digest:
    """Size and SHA-256 of a file's content."""

    bytes: int
    sha256: str


def write_durably(path: Path, buffers: Iterable[Buffer]) -> Digest:
    """Writes `buffers` one after another to `path`, hashing on the way, and syncs the file (not its folder)."""
    hasher, size = hashlib.sha256(), 0
    with open(path, "wb") as file:
        for buffer in buffers:
            for piece in _pieces(buffer):
                file.write(piece)
                hasher.update(piece)
                size += len(piece)
        file.flush()
        os.fsync(file.fileno())
    return Digest(size, hasher.hexdigest())


def copy_durably(source: Path, target: Path) -> Digest:
    """Copies a file's content to `target` and syncs it."""
    with open(source, "rb") as file:
        return write_durably(target, iter(lambda: file.read(_PIECE_BYTES), b""))


def replace_durably(path: Path, content: bytes) -> None:
    """Gives `path` new content; whoever looks sees the former content or the whole of this one."""
    temporary = path.with_name(path.name + ".incomplete")
    write_durably(temporary, [content])
    rename_durably(temporary, path)


def rename_durably(source: Path, target: Path) -> None:
    """Renames within one folder and syncs the folder."""
    os.replace(source, target)
    sync_folder(target.parent)


def sync_folder(folder: Path) -> None:
    """Makes the names in `folder` durable."""
    sync_file(folder)


def sync_file(path: Path) -> None:
    """Makes durable what another library wrote to `path`."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_folder(folder: Path) -> None:
    """Removes `folder` with all it holds, if it is there."""
    if folder.exists():
        shutil.rmtree(folder)


def free_bytes(folder: Path) -> int:
    """What this user may still write to the disk of `folder`; a quota is not part of it."""
    return shutil.disk_usage(folder).free


def digest(path: Path, *, from_disk: bool = False) -> Digest:
    """Size and hash of the file at `path`; `from_disk` reads what was written, not what is still in memory of it."""
    hasher, size = hashlib.sha256(), 0
    with open(path, "rb") as file:
        if from_disk and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while piece := file.read(_PIECE_BYTES):
            hasher.update(piece)
            size += len(piece)
    return Digest(size, hasher.hexdigest())


@contextmanager
def os_errors_reported(setting: str, path: Path) -> Iterator[None]:
    """Turns an OSError (no space, no permission, a lost disk) into a CheckpointError with `setting` and `path`."""
    try:
        yield
    except OSError as error:
        reason = f"{error.strerror or error}" + (f" ({error.filename})" if error.filename else "")
        if error.errno in _NO_PERMISSION:
            raise SoundCheckpointError.of(setting, path, reason, "allow this user to read and write there, or choose "
                                          "another folder") from error
        repair = "free space there, keep fewer checkpoints (--keep-last), or choose another disk" \
            if error.errno in _NO_SPACE else "check that the disk works and has space"
        raise CheckpointError.of(setting, path, reason, repair) from error


def _pieces(buffer: Buffer) -> Iterator[memoryview]:
    view = memoryview(buffer)
    for start in range(0, len(view), _PIECE_BYTES):
        yield view[start : start + _PIECE_BYTES]
