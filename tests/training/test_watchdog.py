"""The watchdog ends jobs that would hang, says where each rank stands, and leaves the others alone."""

from __future__ import annotations

import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from guarded_runs import GuardedRun
from ranks import run_ranks
from tiny_runs import Case, write_vocabulary

from bert_ds.errors import EXIT_STUCK


class Ended(Exception):  # noqa: N818 - what takes the place of the end of a process
    pass


def watched(limit_s: float, silence_s: float, folder: str, scene: str) -> tuple[list[int], str]:
    """Both ranks under a watchdog that looks ten times a second; exit codes of this rank and what it has printed."""
    from bert_ds.training.coordination import Coordinator  # noqa: PLC0415
    from bert_ds.training.watchdog import Watchdog  # noqa: PLC0415

    codes: list[int] = []
    rank, path = dist.get_rank(), Path(folder) / f"{scene}_{dist.get_rank()}"
    ranks = Coordinator.of_default_group(60.0).beside(scene)
    with path.open("w+") as out:
        watchdog = Watchdog(ranks, limit_s, end=codes.append, out=out, pulse_s=0.1, silence_s=silence_s)
        with watchdog:
            for step in range(3):
                watchdog.at(step, "in forward, backward or update")
                time.sleep(0.2)
            if scene == "slow disk":
                with watchdog.unlimited(3, "saving"):
                    time.sleep(1.5)
            elif scene == "stuck":
                watchdog.at(3, "in a step" if rank else "meeting the other ranks")
                _hold(codes)
            elif scene == "gone" and rank == 0:
                _hold(codes)
        ranks.barrier("the end of the scene")
        out.seek(0)
        return codes, out.read()


def _hold(codes: list[int]) -> None:
    until = time.monotonic() + 20
    while not codes and time.monotonic() < until:
        time.sleep(0.05)


def test_a_stuck_rank_ends_all_and_each_says_where_it_stands(tmp_path: Path) -> None:
    for rank, (codes, text) in enumerate(run_ranks(watched, 2, 0.8, math.inf, str(tmp_path), "stuck")):
        assert codes == [EXIT_STUCK]
        assert "has not come on for 1 s" in text
        assert f"Rank {rank} stands in iteration 3, {'in a step' if rank else 'meeting the other ranks'}" in text
        assert "_hold" in text and "Current thread" in text, "the stacks of all threads"


def test_a_slow_disk_is_not_stuck(tmp_path: Path) -> None:
    assert run_ranks(watched, 2, 0.8, math.inf, str(tmp_path), "slow disk") == [([], ""), ([], "")]


def test_a_rank_that_gives_no_sign_of_life_ends_the_others(tmp_path: Path) -> None:
    """Rank 1 has left, rank 0 waits for it."""
    (codes, text), _ = run_ranks(watched, 2, math.inf, 0.5, str(tmp_path), "gone")
    assert codes == [EXIT_STUCK]
    assert "no sign of life for 0 s from ranks [1]" in text or "no sign of life for 1 s from ranks [1]" in text


def killed(root: str, vocab_file: str) -> Any:
    """Rank 1 is killed after iteration 2; rank 0 reports how that ended for it."""
    run = GuardedRun(Case(pp=2), Path(root), train_iters=1000)
    if run.inner.ctx.rank == 1:
        run.records.on_line = lambda step: os.kill(os.getpid(), signal.SIGKILL) if step == 2 else None
    started = time.monotonic()
    try:
        run.train(vocab_file)
    except Exception as error:  # noqa: BLE001 - whatever the collective says
        Path(root, "rank_0").write_text(f"{time.monotonic() - started:.0f} {type(error).__name__}")
    os._exit(EXIT_STUCK)


def test_a_dead_rank_ends_the_job(tmp_path: Path) -> None:
    vocab_file = write_vocabulary(tmp_path / "vocab.txt")
    (tmp_path / "out").mkdir()
    try:
        run_ranks(killed, 2, str(tmp_path / "out"), str(vocab_file), limit_s=60)
    except AssertionError as error:
        assert "died with exit codes" in str(error)
    seconds, _ = (tmp_path / "out" / "rank_0").read_text().split()
    assert int(seconds) < 40
