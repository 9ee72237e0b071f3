"""Ranks agree over a store; whoever waits is told what for, and hears of others' failures."""

from __future__ import annotations

import socket
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
from thread_ranks import on_ranks

from bert_ds.cli.launcher import ProcessPlace
from bert_ds.errors import ConfigError, DataError
from bert_ds.training.coordination import Coordinator, PeerError, TimeLimitError
from bert_ds.training.launch import choose_device, join_process_group


def test_values_are_gathered_in_rank_order() -> None:
    assert on_ranks(lambda ranks: ranks.gather("values", {"rank": ranks.rank})) == [[{"rank": r} for r in range(3)]] * 3


def test_leaders_go_first() -> None:
    order: list[int] = []

    def body(ranks: Coordinator) -> None:
        ranks.leaders_first("index", lambda: order.append(ranks.rank), leader=ranks.rank == 1)

    on_ranks(body)
    assert order[0] == 1
    assert sorted(order) == [0, 1, 2]


def test_a_failure_reaches_all_that_wait() -> None:
    def body(ranks: Coordinator) -> None:
        def work() -> None:
            raise DataError.of("--data-path", "x", "is torn", "copy it again")

        ranks.leaders_first("index", work, leader=ranks.rank == 0)

    failed, *waiting = on_ranks(body)
    assert isinstance(failed, DataError)
    assert failed.is_told
    for error in waiting:
        assert isinstance(error, PeerError)
        assert "rank 0" in str(error)
        assert "is torn" in str(error)


def test_the_same_failure_on_all_ranks_is_told_once() -> None:
    def body(ranks: Coordinator) -> None:
        def work() -> None:
            raise DataError.of("--load", "x", "belongs to another model", "load another")

        ranks.guarded(work)

    kinds = sorted(type(error).__name__ for error in on_ranks(body))
    assert kinds == ["DataError", "PeerError", "PeerError"]


def test_a_missing_rank_is_named_when_the_limit_is_over() -> None:
    def body(ranks: Coordinator) -> None:
        if ranks.rank != 2:
            ranks.barrier("the checkpoint")

    first, second, absent = on_ranks(body, limit_s=0.3)
    assert absent is None
    for error in (first, second):
        assert isinstance(error, TimeLimitError)
        assert "the checkpoint=ranks [2]" in str(error)


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    with pytest.raises(ConfigError, match=r"--num_gpus=8: this machine has 4 visible GPU\(s\)"):
        choose_device(ProcessPlace(5, 5, 8, 8, "deepspeed"))


def test_a_port_that_another_program_holds_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = str(other.getsockname()[1])
        for name, value in {"MASTER_ADDR": "localhost", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, value)
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):  # written by join_process_group, taken back after the test
            monkeypatch.setenv(name, "")
        with pytest.raises(ConfigError, match=f"MASTER_PORT={port}: is in use by another program"):
            join_process_group(ProcessPlace(0, 0, 1, 1, "test"), torch.device("cpu"), timedelta(seconds=5))


def test_a_problem_of_some_ranks_is_raised_on_all_and_they_go_on() -> None:
    def body(ranks: Coordinator) -> Any:
        def work() -> int:
            if ranks.rank:
                raise DataError.of("--data-path", ranks.rank, "is torn", "copy it again")
            return 1

        with pytest.raises(DataError, match=r"(?s)--data-path=1.*--data-path=2"):
            ranks.attempt("reading", work, DataError)
        return ranks.attempt("counting", lambda: ranks.rank, DataError)

    assert on_ranks(body) == [[0, 1, 2]] * 3


def test_a_failure_reaches_the_other_threads() -> None:
    def body(ranks: Coordinator) -> None:
        beside = ranks.beside("save")
        if ranks.rank == 1:
            ranks.abort("out of memory")
        with pytest.raises(PeerError, match="out of memory"):
            beside.gather("written", ranks.rank) if ranks.rank != 1 else ranks.barrier("step")

    assert on_ranks(body) == [None] * 3


def test_threads_beside_each_other_do_not_mix() -> None:
    def entangled(ranks: Coordinator) -> Any:
        found: list[Any] = []
        beside = ranks.beside("save")
        thread = threading.Thread(target=lambda: found.extend(beside.gather("x", [ranks.rank, i]) for i in range(9)))
        thread.start()
        values = [ranks.gather("x", [i]) for i in range(9)]
        thread.join()
        return values, found

    for values, found in on_ranks(entangled):
        assert values == [[[i]] * 3 for i in range(9)]
        assert found == [[[rank, i] for rank in range(3)] for i in range(9)]


def test_the_store_does_not_grow() -> None:
    stores: list[Any] = []

    def body(ranks: Coordinator) -> None:
        stores.append(ranks._store)
        for number in range(50):
            ranks.gather("values", "x" * number)
        ranks.leave("the end")

    on_ranks(body)
    assert stores[0].num_keys() < 20
