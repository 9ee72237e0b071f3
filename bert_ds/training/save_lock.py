"""One run a folder of checkpoints: two that save into one would delete each other's unfinished files."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bert_ds.checkpoint.files import os_errors_reported
from bert_ds.errors import CheckpointError

log = logging.getLogger(__name__)
LOCK_FILE = ".in_use"


@contextmanager
def save_lock(save: str | None) -> Iterator[None]:
    """Holds the folder `save` while entered; the system lets go when the process ends, however it ends.

    Raises:
        CheckpointError: another process holds it, or the folder cannot be made or written.
    """
    if save is None:
        yield
        return
    folder = Path(save)
    with os_errors_reported("output.save", folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / LOCK_FILE).open("a+")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.seek(0)
            raise CheckpointError.of("output.save", save, f"another run saves there (process {lock.read().strip()})",
                                     "wait for its end, stop it, or save elsewhere") from error
        except OSError as error:
            log.warning("the disk of %s has no locks (%s): see to it that no other run saves there", folder, error)
        lock.truncate(0)
        lock.write(f"{os.getpid()} on {socket.gethostname()}\n")
        lock.flush()
        yield
