"""Saving in the background: the same files and the same training, and what happens when a disk or a rank fails."""

from __future__ import annotations

import errno
import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from tiny_runs import Case, EngineRun, Outcome, vocabulary, write_vocabulary

from bert_ds.checkpoint import files
from bert_ds.checkpoint.reader import Checkpoint, find_latest
from bert_ds.checkpoint.writer import TensorSlice
from bert_ds.errors import CheckpointError, SaveError
from bert_ds.training.host_memory import available_bytes
from bert_ds.training.saver import HostCopy
from bert_ds.training.state import TrainingState

CASE = Case(pp=2, dropout=0.1)


def saver_of(run: EngineRun, folder: Path, vocab_file: str, **output: Any) -> Any:
    """A saver of `run` into `folder`."""
    from bert_ds.training.disks import find_disks  # noqa: PLC0415
    from bert_ds.training.saver import Saver  # noqa: PLC0415

    ranks = run.coordinator.beside(folder.name)
    config = replace(run.run, data=replace(run.run.data, vocab_file=vocab_file),
                     output=replace(run.run.output, save=str(folder), **output))
    return Saver(config, run.ctx, ranks, run.engine, vocabulary(), find_disks(folder, ranks))


def slowly(real: Any) -> Any:
    def pieces(buffer: Any) -> Any:
        time.sleep(0.005)
        return real(buffer)

    return pieces


def three_ways_to_train(case: Case, root: str, vocab_file: str) -> list[tuple[Outcome, float]]:
    """Without saves, with saves that training waits for, with saves beside it: outcome, seconds until training goes on.
    """
    found = []
    files._pieces = slowly(files._pieces)
    for name, settings in (("none", None), ("waiting", {"async_save": False}), ("beside", {"async_save": True})):
        run, blocked = EngineRun(case), 0.0
        if settings is None:
            outcome = run.steps(6)
        else:
            outcome = Outcome([], [], [])
            with saver_of(run, Path(root) / name, vocab_file, **settings) as saver:
                for _ in range(3):
                    outcome = outcome.then(run.steps(2))
                    saver.wait()
                    started = time.monotonic()
                    saver.save(run.state, {"lm_loss": 1.5})
                    blocked += time.monotonic() - started
                saver.finish()
        found.append((outcome, blocked))
        run.close()
    return found


@pytest.mark.proves("saving beside training changes neither the run nor the files", "EXACT")
def test_saving_beside_training_changes_neither(tmp_path: Path) -> None:
    vocab_file = write_vocabulary(tmp_path / "vocab.txt")
    for none, waiting, beside in run_ranks(three_ways_to_train, 2, CASE, str(tmp_path), str(vocab_file)):
        assert none[0] == waiting[0] == beside[0]
        assert beside[1] < waiting[1] / 3
    for step in (2, 4, 6):
        first, second = (Checkpoint.open(tmp_path / name / f"iter_{step:07d}", verify_hashes=True).manifest
                         for name in ("waiting", "beside"))
        assert first.files == second.files
        assert replace(first, config={}) == replace(second, config={})


def a_disk_that_fills_up(root: str, vocab_file: str) -> list[Any]:
    """Rank 1 runs out of space at its first, second, ... write; ranks go on, and save when there is space again."""
    run, told = EngineRun(CASE), []
    rank, real = run.ctx.rank, files._pieces
    writes = {"left": 0}

    def full(buffer: Any) -> Any:
        writes["left"] -= 1
        if rank == 1 and writes["left"] < 0:
            raise OSError(errno.ENOSPC, "No space left on device", "/disk/rank_00001.safetensors")
        return real(buffer)

    files._pieces = full
    with saver_of(run, Path(root), vocab_file) as saver:
        for failing in range(0, 40, 13):
            run.steps(1)
            writes["left"] = failing
            saver.save(run.state, {})
            assert not saver.wait()
            assert not list(Path(root).glob("*.incomplete"))
        with pytest.raises(SaveError, match=r"No space left on device.*Fix: free space.*--keep-last"):
            saver.finish()
        writes["left"] = 10**6
        run.steps(1)
        saver.save(run.state, {})
        saver.finish()
        told.append(run.state)
    run.close()
    return told


def test_a_full_disk_does_not_end_the_run(tmp_path: Path) -> None:
    vocab_file = write_vocabulary(tmp_path / "vocab.txt")
    states = run_ranks(a_disk_that_fills_up, 2, str(tmp_path / "out"), str(vocab_file))
    assert [state.step for (state,) in states] == [5, 5]
    assert find_latest(tmp_path / "out", verify_hashes=True) == tmp_path / "out" / "iter_0000005"
    assert len(list((tmp_path / "out").glob("iter_*"))) == 1


def a_writer_that_breaks(root: str, vocab_file: str) -> str:
    run = EngineRun(CASE)
    if run.ctx.rank == 1:
        def broken(buffer: Any) -> Any:
            raise ZeroDivisionError("a bug")

        files._pieces = broken
    started = time.monotonic()
    try:
        with saver_of(run, Path(root), vocab_file) as saver:
            saver.save(run.state, {})
            run.steps(1)
            saver.wait()
    except Exception as error:  # noqa: BLE001 - the test looks at it
        return f"{type(error).__name__}: {error}" if time.monotonic() - started < 30 else "too late"
    return "nothing"


def test_a_writer_that_breaks_ends_all_ranks(tmp_path: Path) -> None:
    vocab_file = write_vocabulary(tmp_path / "vocab.txt")
    first, second = run_ranks(a_writer_that_breaks, 2, str(tmp_path / "out"), str(vocab_file))
    assert first.startswith("PeerError") and "rank 1: ZeroDivisionError: a bug" in first
    assert second.startswith("ZeroDivisionError")


NODES = [Case(pp=2, tp=1, dropout=0.1), Case(tp=2, dropout=0.1, precision="bf16"), Case(zero=0, micro_batch=4)]
"""On two machines of two ranks: a pipeline between them, data parallel between them with ZeRO and without."""


def a_disk_a_node(cases: list[Case], root: str, vocab_file: str) -> list[Any]:
    results = []
    for index, case in enumerate(cases):
        folder = Path(root) / str(index) / f"node{torch.distributed.get_rank() // 2}"
        straight = EngineRun(case, folder)
        straight.steps(1)
        straight.save(Path(vocab_file))
        wanted = straight.steps(2)
        straight.close()
        resumed = EngineRun(case, folder)
        resumed.load(Path(vocab_file))
        results.append((wanted, resumed.steps(2)))
        resumed.close()
    return results


def test_nodes_with_disks_of_their_own_resume(tmp_path: Path) -> None:
    vocab_file = write_vocabulary(tmp_path / "vocab.txt")
    for results in run_ranks(a_disk_a_node, 4, NODES, str(tmp_path), str(vocab_file)):
        for case, (wanted, found) in zip(NODES, results, strict=True):
            assert found == wanted, case
    for index in range(len(NODES)):
        parts = [tmp_path / str(index) / node / "iter_0000001" for node in ("node0", "node1")]
        manifests = {(part / "checkpoint.json").read_bytes() for part in parts}
        assert len(manifests) == 1
        with pytest.raises(CheckpointError, match="was saved on the disk of"):
            Checkpoint.open(parts[0])


def one_rank(root: str, vocab_file: str, available: int, free: int) -> list[str]:
    """What one rank says of a save where memory or disk are short."""
    from bert_ds.checkpoint import writer  # noqa: PLC0415
    from bert_ds.training import saver as module  # noqa: PLC0415

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("bert_ds").addHandler(handler)
    logging.getLogger("bert_ds").setLevel(logging.INFO)
    module.available_bytes = lambda: available
    writer.files.free_bytes = lambda folder: free
    run = EngineRun(replace(CASE, pp=1))
    try:
        with saver_of(run, Path(root), vocab_file, keep_last=2) as saver:
            for step in range(1, 4):
                run.state = TrainingState(step=step)
                saver.save(run.state, {})
            saver.finish()
            writer.files.free_bytes = lambda folder: 5
            saver.save(TrainingState(step=9), {})
            saver.wait()
    except CheckpointError as error:
        lines.append(f"refused: {error}")
    return [*lines, *sorted(path.name for path in Path(root).glob("iter*"))]


def test_memory_and_disk_are_looked_at_before(tmp_path: Path) -> None:
    vocab_file = str(write_vocabulary(tmp_path / "vocab.txt"))
    plenty = 10**12
    for name, available in (("short", 1000), ("enough", plenty)):
        said = run_ranks(one_rank, 1, str(tmp_path / name), vocab_file, available, plenty)[0]
        text = "\n".join(said)
        assert ("training waits while one is written" in text) == (available == 1000), text
        assert ("is written while training goes on" in text) == (available == plenty), text
        assert text.count("saved checkpoint") == 3
        assert "NOT saved, training goes on" in text and "and 0.00 MB are free there" in text
        assert said[-2:] == ["iter_0000002", "iter_0000003"]
    said = run_ranks(one_rank, 1, str(tmp_path / "full"), vocab_file, plenty, 1000)[0]
    assert said[-1].startswith("refused: ") and "a checkpoint needs" in said[-1]


def test_the_copy_grows_with_what_is_saved() -> None:
    copy = HostCopy(3, torch.device("cpu"))
    for numel in (3, 5, 2):
        numbers = torch.arange(float(numel))
        (piece,) = copy.of([TensorSlice("weight", "a", 0, 1, 0, numel, numbers)])
        wanted = numbers.clone()
        numbers.zero_()
        assert torch.equal(piece.tensor, wanted)


def test_memory_that_is_available(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 10 kB\nMemAvailable:    8 kB\n")
    assert available_bytes(tmp_path) == 8192
    group = tmp_path / "sys" / "fs" / "cgroup"
    group.mkdir(parents=True)
    statistics = "anon 1\ninactive_file 90\n"
    for name, content in (("memory.max", "max"), ("memory.current", "5000"), ("memory.stat", statistics)):
        (group / name).write_text(content)
    assert available_bytes(tmp_path) == 8192
    (group / "memory.max").write_text("6000\n")
    assert available_bytes(tmp_path) == 6000 - 5000 + 90
