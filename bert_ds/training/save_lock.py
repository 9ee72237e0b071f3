"""One run a folder of checkpoints: two that save into one would delete each other's unfinished files."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bert_ds.errors import CheckpointError

LOCK_FILE = ".in_use"


@contextmanager
def save_lock(save: str | None) -> Iterator[None]:
    """Holds the folder `save` while entered; the system lets go when the process ends, however it ends.

    Raises:
        CheckpointError: another process of this machine holds it.
    """
    if save is None:
        yield
        return
    folder = Path(save)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK_FILE).open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.seek(0)
            raise CheckpointError.of("output.save", save, f"another run saves there (process {lock.read().strip()})",
                                     "wait for its end, stop it, or save elsewhere") from error
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield
