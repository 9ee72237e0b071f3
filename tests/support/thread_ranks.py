"""Ranks as threads of one process, over a store in memory: for what ranks agree on without a process group."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from bert_ds.training.coordination import Coordinator


def on_ranks(body: Callable[[Coordinator], Any], *, ranks: int = 3, limit_s: float = 20.0) -> list[Any]:
    """Runs `body` once a rank, each in a thread; what it returns or raises, in rank order."""
    store, found = dist.HashStore(), [None] * ranks

    def enter(rank: int) -> None:
        try:
            found[rank] = body(Coordinator(rank, ranks, limit_s, store))
        except Exception as error:  # noqa: BLE001 - the test looks at it
            found[rank] = error

    threads = [threading.Thread(target=enter, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found
