"""Agreement between ranks over the TCP store, for everything that is not a step: no collective can hang in it.

Whoever waits says for what, gives up after a limit, and stops at once when another rank reports a failure.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

from bert_ds.errors import UserError, tell

T = TypeVar("T")
_ABORT = "bert_ds/abort"
_POLL_S = 0.02
_LONGEST_POLL_S = 0.5


class PeerError(UserError):
    """Another rank stopped; it has printed why."""

    headline = "stopped because another rank failed"


class TimeLimitError(UserError):
    """A rank did not arrive within the limit."""

    headline = "gave up waiting"


class Coordinator:
    """The ranks of one job. All ranks call the same methods in the same order."""

    def __init__(self, rank: int, world_size: int, limit_s: float, store: dist.Store | None = None) -> None:
        self.rank = rank
        self.world_size = world_size
        self._limit_s = limit_s
        self._store = store
        self._calls = 0

    @classmethod
    def of_default_group(cls, limit_s: float) -> Coordinator:
        """The ranks of the initialised default process group, over the store it was initialised with."""
        store = dist.distributed_c10d._get_default_store()
        return cls(dist.get_rank(), dist.get_world_size(), limit_s, store)

    def abort(self, reason: str) -> bool:
        """Tells all ranks that this one cannot go on; returns whether it is the first to say so."""
        if self._store is None or self.world_size == 1:
            return True
        own = f"rank {self.rank}: {reason}"
        return self._store.compare_set(_ABORT, "", own).decode() == own

    def leaders_first(self, what: str, work: Callable[[], T], *, leader: bool) -> T:
        """Runs `work` on the leaders, then, when all of them are done, on the others: for files that leaders write."""
        call = self._next_call(what)
        if leader:
            result = self.guarded(work)
            self._set(f"{call}/{self.rank}", "led")
            self._wait_for_all(call, what)
            return result
        self._set(f"{call}/{self.rank}", "waits")
        self._wait_for_all(call, what)
        return self.guarded(work)

    def on_leader(self, what: str, work: Callable[[], T], *, leader: bool) -> T:
        """Runs `work` on the one leader, rank 0, and hands its JSON result to every rank."""
        assert leader == (self.rank == 0)
        return self.gather(what, self.guarded(work) if leader else None)[0]

    def guarded(self, work: Callable[[], T]) -> T:
        """Runs `work`; if it fails, tells the other ranks before the error goes on.

        Where several ranks meet the same `UserError`, only the first one's goes on as it is.
        """
        try:
            return work()
        except PeerError:
            raise
        except UserError as error:
            if not self.abort(str(error)):
                raise self._peer_failed("this rank too") from error
            # Told at once: a launcher ends this rank as soon as the first of those that wait has gone.
            tell(error)
            self._let_others_read()
            raise
        except BaseException as error:
            self.abort(f"{type(error).__name__}: {error}")
            self._let_others_read()
            raise

    @contextmanager
    def entered(self, held: AbstractContextManager[T]) -> Iterator[T]:
        """Enters `held`; if that fails, tells the other ranks."""
        with ExitStack() as stack:
            yield self.guarded(lambda: stack.enter_context(held))

    def gather(self, what: str, value: Any) -> list[Any]:
        """Every rank's JSON value, in rank order, on every rank; also a barrier."""
        call = self._next_call(what)
        self._set(f"{call}/{self.rank}", json.dumps(value))
        return [json.loads(text) for text in self._wait_for_all(call, what)]

    def barrier(self, what: str) -> None:
        """Returns when all ranks have called it."""
        self.gather(what, None)

    def _let_others_read(self) -> None:
        """Rank 0 keeps the store: it stays until whoever waits has seen the message."""
        if self.rank == 0 and self.world_size > 1:
            time.sleep(2 * _LONGEST_POLL_S)

    def _peer_failed(self, what: str) -> UserError:
        assert self._store is not None
        return PeerError.of("waiting for", what, self._store.get(_ABORT).decode(), "see the message of that rank")

    def _next_call(self, what: str) -> str:
        self._calls += 1
        return f"bert_ds/{self._calls}/{what}"

    def _set(self, key: str, value: str) -> None:
        if self._store is not None:
            self._store.set(key, value)
        else:
            self._alone = value

    def _wait_for_all(self, call: str, what: str) -> list[str]:
        if self._store is None:
            return [self._alone]
        try:
            return self._poll(self._store, call, what)
        except dist.DistError as error:
            raise PeerError.of("waiting for", what, f"rank 0, which keeps the store, is gone ({error})".split("\n")[0],
                               "see the message of that rank") from error

    def _poll(self, store: dist.Store, call: str, what: str) -> list[str]:
        keys = [f"{call}/{rank}" for rank in range(self.world_size)]
        deadline, pause = time.monotonic() + self._limit_s, _POLL_S
        while not store.check(keys):
            if store.check([_ABORT]):
                raise self._peer_failed(what)
            if time.monotonic() > deadline:
                missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
                raise TimeLimitError.of(what, f"ranks {missing}", f"did not arrive within {self._limit_s:.0f} s",
                                       "look at the last lines of these ranks")
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_POLL_S)
        return [store.get(key).decode() for key in keys]
