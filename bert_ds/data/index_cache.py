"""Arrays that are computed once and then mapped from disk by every process.

`<name>-<key>.npy` holds the array; `<name>-<key>.json`, written after it, says what it was computed from and how its
bytes must look. A file that is cut short, altered or from other data is computed again. One process of a job should
call first. Several jobs may build the same array at once, on machines that share the folder: they write the same bytes,
each under a name of its own, and the first to finish gives its file the name. A sound file is never replaced: on a
network file system that would take it away under the other machines that have mapped it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import mmap
import os
import socket
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bert_ds.errors import DataError

logger = logging.getLogger(__name__)

_FLEETING = (errno.ENOENT, errno.ESTALE)
"""What opening a file gives that another machine has just replaced."""
_ATTEMPTS = 5
_SECONDS_BETWEEN_ATTEMPTS = 0.5


def load_or_build(folder: Path, name: str, description: Mapping[str, object],
                  build: Callable[[], NDArray[Any]]) -> NDArray[Any]:
    """The array that `build` computes, mapped read-only from the cache, where it is put when it is not there.

    description: everything the array depends on, the version of its algorithm included; it becomes the key.
    Raises DataError when the folder cannot be written, and what `build` raises.
    """
    text = json.dumps(description, sort_keys=True)
    path = folder / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.npy"
    try:
        cached = _load(path, text)
        if cached is None:
            logger.info("building the index %s", path)
            _store(path, text, build())
            cached = _load_stored(path, text)
    except OSError as error:
        raise DataError.of("--data-cache-path", folder, f"cannot hold the index cache ({error.strerror})",
                           "name a folder that is writable and has free space") from error
    assert cached is not None, f"{path} is not what was written"
    return cached


def _load(path: Path, description: str) -> NDArray[Any] | None:
    """The cached array, or None when there is none that can be trusted."""
    seal = path.with_suffix(".json")
    try:
        content = seal.read_bytes()
        measured = _measure(path)
        cached = np.load(path, mmap_mode="r", allow_pickle=False) if _seal(description, measured) == content else None
    except OSError as error:
        if error.errno in _FLEETING:
            return None
        raise
    if cached is None:
        logger.warning("the index cache %s is damaged or from other data; it is built again", path)
        return None
    return np.asarray(cached)


def _load_stored(path: Path, description: str) -> NDArray[Any] | None:
    """What was stored a moment ago; a network file system may need some time to show it."""
    for _ in range(_ATTEMPTS - 1):
        cached = _load(path, description)
        if cached is not None:
            return cached
        time.sleep(_SECONDS_BETWEEN_ATTEMPTS)
    return _load(path, description)


def _store(path: Path, description: str, array: NDArray[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{socket.gethostname()}-{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            np.save(file, array, allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
        measured = _measure(partial)
        _give_name(partial, path, measured)
        partial.write_bytes(_seal(description, measured))
        partial.replace(path.with_suffix(".json"))
    finally:
        partial.unlink(missing_ok=True)


def _give_name(partial: Path, path: Path, measured: Mapping[str, int]) -> None:
    """Names the file `path`, and removes its former name, unless the same content lies there already."""
    try:
        os.link(partial, path)
    except FileExistsError:
        if not _has(path, measured):
            partial.replace(path)
    except OSError:
        # A file system without links.
        partial.replace(path)
    partial.unlink(missing_ok=True)


def _has(path: Path, measured: Mapping[str, int]) -> bool:
    try:
        return _measure(path) == measured
    except OSError as error:
        if error.errno in _FLEETING:
            return False
        raise


def _seal(description: str, measured: Mapping[str, int]) -> bytes:
    return json.dumps({"description": description, **measured}).encode()


def _measure(path: Path) -> dict[str, int]:
    """Size and CRC-32 of a file; reads all of it, about a second a GB."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if not size:
            return {"bytes": 0, "crc32": 0}
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return {"bytes": size, "crc32": zlib.crc32(content)}
