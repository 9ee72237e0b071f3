"""Agreement between ranks over the TCP store, for everything that is not a step: no collective can hang in it.

Whoever waits says for what, gives up after a limit, and stops at once when another rank reports a failure. Rank 0 alone
looks for the values of all; the others look for the one key under which it hands them on.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict
from typing import Any, TypeVar

import torch.distributed as dist

from bert_ds.errors import Problem, UserError, tell

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

    def __init__(
        self, rank: int, world_size: int, limit_s: float, store: dist.Store | None = None, channel: str = "main"
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._limit_s = limit_s
        self._store = store
        self._channel = channel
        self._calls = 0
        self._read_by_all: list[str] = []

    @classmethod
    def of_default_group(cls, limit_s: float) -> Coordinator:
        """The ranks of the initialised default process group, over the store it was initialised with."""
        store = dist.distributed_c10d._get_default_store()
        return cls(dist.get_rank(), dist.get_world_size(), limit_s, store)

    def beside(self, channel: str) -> Coordinator:
        """The same ranks for another thread: its calls are counted apart, failures are told to all threads."""
        store = self._store
        if store is not None and hasattr(store, "clone"):  # torch 2.7 and older: one connection for both
            store = store.clone()
        return Coordinator(self.rank, self.world_size, self._limit_s, store, f"{self._channel}/{channel}")

    def abort(self, reason: str) -> bool:
        """Tells all ranks that this one cannot go on; returns whether it is the first to say so."""
        if self._store is None or self.world_size == 1:
            return True
        own = f"rank {self.rank}: {reason}"
        return self._store.compare_set(_ABORT, "", own).decode() == own

    def leaders_first(self, what: str, work: Callable[[], T], *, leader: bool) -> T:
        """Runs `work` on the leaders, then, when all of them are done, on the others: for files that leaders write."""
        if leader:
            result = self.guarded(work)
            self.barrier(what)
            return result
        self.barrier(what)
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

    def attempt(self, what: str, work: Callable[[], Any], error: type[UserError]) -> list[Any]:
        """Runs `work` on every rank and returns all results, JSON values, in rank order.

        Raises:
            UserError: `error` with the problems of all ranks whose `work` raised one, on every rank alike; unlike
                after `guarded`, the ranks can go on together.
        """
        def tried() -> dict[str, Any]:
            try:
                return {"result": work()}
            except error as failure:
                return {"problems": [{**asdict(problem), "value": str(problem.value)} for problem in failure.problems]}

        outcomes = self.gather(what, self.guarded(tried))
        problems = [Problem(**problem) for outcome in outcomes for problem in outcome.get("problems", ())]
        if problems:
            raise error(*dict.fromkeys(problems))
        return [outcome["result"] for outcome in outcomes]

    @contextmanager
    def entered(self, held: AbstractContextManager[T]) -> Iterator[T]:
        """Enters `held`; if that fails, tells the other ranks."""
        with ExitStack() as stack:
            yield self.guarded(lambda: stack.enter_context(held))

    def gather(self, what: str, value: Any, *, wanted: bool = True, for_all: bool = True) -> list[Any]:
        """Every rank's JSON value, in rank order, on the ranks that want them; also a barrier.

        With `for_all` false, alike on all ranks, rank 0 does not hand the values on: nobody else gets any.
        """
        if self._store is None:
            return [json.loads(json.dumps(value))]
        try:
            values = self._exchange(self._store, what, json.dumps(value), wanted, for_all)
        except dist.DistError as error:
            raise PeerError.of("waiting for", what, f"rank 0, which keeps the store, is gone ({error})".split("\n")[0],
                               "see the message of that rank") from error
        return [json.loads(text) for text in values]

    def barrier(self, what: str) -> None:
        """Returns when all ranks have called it."""
        self.gather(what, None, wanted=False, for_all=False)

    def leave(self, what: str) -> None:
        """The last barrier: rank 0, which may keep the store, leaves after all others."""
        self.barrier(what)
        if self._store is None or self.world_size == 1:
            return
        key = f"bert_ds/{self._channel}/left"
        if self.rank == 0:
            self._wait_for(self._store, [f"{key}/{rank}" for rank in range(1, self.world_size)], what)
        else:
            self._store.set(f"{key}/{self.rank}", "")

    def put(self, name: str, text: str) -> None:
        """Leaves a text of this rank under a name, for whoever looks; waits for nobody."""
        if self._store is not None:
            self._store.set(f"bert_ds/{self._channel}/{name}/{self.rank}", text)

    def put_first(self, name: str, text: str) -> None:
        """Leaves a text for all ranks under a name, unless one is there."""
        if self._store is not None:
            self._store.compare_set(f"bert_ds/{self._channel}/{name}", "", text)

    def peek(self, name: str) -> str | None:
        """What `put_first` has left."""
        return self._text(f"bert_ds/{self._channel}/{name}")

    def peek_all(self, name: str) -> list[str | None]:
        """What each rank has `put` last."""
        return [self._text(f"bert_ds/{self._channel}/{name}/{rank}") for rank in range(self.world_size)]

    def failure(self) -> str | None:
        """What the first rank has said that could not go on."""
        return self._text(_ABORT)

    def _text(self, key: str) -> str | None:
        if self._store is None or not self._store.check([key]):
            return None
        return self._store.get(key).decode()

    def _let_others_read(self) -> None:
        """Rank 0 keeps the store: it stays until whoever waits has seen the message."""
        if self.rank == 0 and self.world_size > 1:
            time.sleep(2 * _LONGEST_POLL_S)

    def _peer_failed(self, what: str) -> UserError:
        assert self._store is not None
        return PeerError.of("waiting for", what, self._store.get(_ABORT).decode(), "see the message of that rank")

    def _exchange(self, store: dist.Store, what: str, own: str, wanted: bool, for_all: bool) -> list[str]:
        self._calls += 1
        call = f"bert_ds/{self._channel}/{self._calls}"
        keys, together = [f"{call}/{rank}" for rank in range(self.world_size)], f"{call}/all"
        store.set(keys[self.rank], own)
        if self.rank == 0:
            self._wait_for(store, keys, what)
            values = [store.get(key).decode() for key in keys]
            store.set(together, json.dumps(values if for_all else []))
        else:
            self._wait_for(store, [together], what, names=keys)
            values = json.loads(store.get(together)) if wanted else []
        # That all have come here means that all have read the call before this one.
        for key in self._read_by_all:
            store.delete_key(key)
        self._read_by_all = [keys[self.rank], together] if self.rank == 0 else [keys[self.rank]]
        return values

    def _wait_for(self, store: dist.Store, keys: list[str], what: str, names: list[str] | None = None) -> None:
        """Waits until `keys` are there; `names` are the keys of the ranks, by which a missing one is told."""
        names = names or keys
        deadline, pause = time.monotonic() + self._limit_s, _POLL_S
        while not store.check(keys):
            if store.check([_ABORT]):
                raise self._peer_failed(what)
            if time.monotonic() > deadline:
                missing = [int(name.rpartition("/")[2]) for name in names if not store.check([name])]
                raise TimeLimitError.of(what, f"ranks {missing}", f"did not arrive within {self._limit_s:.0f} s",
                                       "look at the last lines of these ranks")
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_POLL_S)
