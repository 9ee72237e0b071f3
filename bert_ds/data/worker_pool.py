"""Worker processes that end with the process which started them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context, parent_process


@contextmanager
def worker_pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """A pool of spawned processes (threads of libraries do not survive a fork); leaving it drops the work not begun.

    Ctrl-C reaches the calling process only.
    """
    pool = ProcessPoolExecutor(workers, get_context("spawn"), initializer=_end_with_parent)
    try:
        # Workers start when work is handed in, and inherit that Ctrl-C is blocked.
        old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            for _ in range(workers):
                pool.submit(_nothing)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _nothing() -> None:
    """The work for which the workers are started."""


def _end_with_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    parent = parent_process()
    assert parent is not None, "runs in a worker process"
    parent.join()
    os._exit(1)
