"""Runs a function on several gloo ranks, each a process of its own, and brings back what each returns.

The processes are forked from a server that has imported torch and DeepSpeed once, so that eight ranks start in seconds.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import signal
import socket
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from processes import descendants, kill_with_descendants

_OTHERS_S = 10.0
"""How long the others have to report after the first failure."""
_PRELOADED = ["torch", "deepspeed", "bert_ds.training.trainer"]


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, limit_s: float = 240.0, join: bool = True
) -> list[Any]:
    """Calls `function(*args)` on `world_size` ranks with an initialised process group; results in rank order.

    Without `join` the ranks have a launcher's environment, and the function joins them itself.

    Raises:
        AssertionError: a rank failed, with its traceback, or did not finish within the limit.
    """
    os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    results: Any = context.Queue()
    port = _free_port()
    ranks = [context.Process(target=_enter, args=(function, rank, world_size, port, args, results, join),
                             daemon=True)
             for rank in range(world_size)]
    for process in ranks:
        process.start()
    try:
        return _collect(ranks, results, world_size, time.monotonic() + limit_s)
    finally:
        for process in ranks:
            if process.pid is not None:
                kill_with_descendants(process.pid)
            process.join()


def _collect(ranks: list[Any], results: Any, world_size: int, deadline: float) -> list[Any]:
    found: dict[int, Any] = {}
    while len(found) < world_size:
        try:
            rank, result, failure = results.get(timeout=1)
        except queue.Empty:
            dead = [rank for rank, process in enumerate(ranks) if process.exitcode and rank not in found]
            assert not dead or found, f"ranks {dead} died with exit codes {[ranks[rank].exitcode for rank in dead]}"
            if time.monotonic() < deadline:
                continue
            missing = sorted(set(range(world_size)) - set(found))
            failures = [failure for _, failure in found.values()]
            raise AssertionError(f"ranks {missing} did not finish; {failures}") from None
        found[rank] = (result, failure)
        if failure is not None:
            deadline = min(deadline, time.monotonic() + _OTHERS_S)
    failures = "\n".join(f"rank {rank} failed:\n{failure}" for rank, (_, failure) in sorted(found.items()) if failure)
    assert not failures, failures
    return [found[rank][0] for rank in range(world_size)]


def _enter(
    function: Callable[..., Any], rank: int, world_size: int, port: int, args: tuple[Any, ...], results: Any,
    join: bool,
) -> None:
    try:
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port), DS_ACCELERATOR="cpu", RANK=str(rank),
                          LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size))
        import torch  # noqa: PLC0415

        from bert_ds.cli.launcher import ProcessPlace  # noqa: PLC0415
        from bert_ds.compat import import_deepspeed  # noqa: PLC0415
        from bert_ds.training.launch import join_process_group  # noqa: PLC0415

        torch.set_num_threads(1)
        import_deepspeed()
        if join:
            join_process_group(ProcessPlace(rank, rank, world_size, world_size, "test"), torch.device("cpu"),
                               timedelta(seconds=60))
        results.put((rank, function(*args), None))
    except BaseException:  # noqa: BLE001 - whatever it was, the test has to show it
        results.put((rank, None, traceback.format_exc()))
    if rank == 0:
        # It keeps the store, which others may be reading from; all are killed as soon as the last has reported.
        time.sleep(_OTHERS_S)
    for child in descendants(os.getpid()):
        # Libraries leave workers behind, who would keep the output of the tests open.
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return int(free.getsockname()[1])
