"""Two machines in small: a launcher for each, with one rank, on this one."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from launched import ROOT, SMALL, environment, make_data, outputs, records
from tolerances import REDUCTION_ORDER

from bert_ds.checkpoint.reader import find_latest
from bert_ds.errors import CheckpointError

pytestmark = pytest.mark.long

PROGRAM = [str(ROOT / "bert_ds" / "pretrain.py"), "--deepspeed_config", "ds_configs/tiny.json", *SMALL,
           "--hidden-dropout", "0", "--attention-dropout", "0", "--eval-interval", "none"]
BIN = Path(sys.executable).parent


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    make_data(folder)
    return folder


def data_flags(folder: Path) -> list[str]:
    return ["--data-path", str(folder / "corpus_text_sentence"), "--vocab-file", str(folder / "vocab.txt"),
            "--split", "80,10,10"]


def run_together(commands: Sequence[Sequence[str]], cwd: Path) -> list[str]:
    """Starts all commands and returns what each has printed; all have to end well."""
    started = [subprocess.Popen(command, cwd=cwd, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                text=True) for command in commands]
    try:
        printed = [process.communicate(timeout=280)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * len(started), "\n\n".join(printed)
    return printed


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return str(free.getsockname()[1])


def losses(folder: Path) -> list[object]:
    return [record[name] for record in records(folder) for name in ("lm_loss", "sop_loss", "grad_norm")]


@pytest.fixture(scope="module")
def losses_of_one(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    """Losses of six iterations on one rank."""
    folder = tmp_path_factory.mktemp("one")
    run_together([[sys.executable, *PROGRAM, *data_flags(data), *outputs(folder), "--train-iters", "6"]], folder)
    return losses(folder)


@pytest.mark.proves("two nodes started by `deepspeed --no_ssh` train as one rank", "REDUCTION_ORDER")
def test_two_nodes_without_ssh_train_as_one(data: Path, losses_of_one: list[object], tmp_path: Path) -> None:
    """`deepspeed --no_ssh` is started on each machine, as pods and containers do."""
    hosts = tmp_path / "hostfile"
    hosts.write_text("first slots=1\nsecond slots=1\n")
    port = free_port()
    run_together([
        [str(BIN / "deepspeed"), "--hostfile", str(hosts), "--no_ssh", "--node_rank", node, "--master_addr",
         "localhost", "--master_port", port, *PROGRAM, *data_flags(data), *outputs(tmp_path), "--train-iters", "6",
         "--pipeline-model-parallel-size", "2"] for node in ("0", "1")], tmp_path)
    assert losses(tmp_path) == pytest.approx(losses_of_one, rel=REDUCTION_ORDER["rtol"])


@pytest.mark.proves("two nodes with disks of their own, data and checkpoints, train and go on as one rank; the parts "
                    "of their checkpoint are one", "REDUCTION_ORDER", "EXACT")
def test_two_nodes_that_share_no_disk_train_and_go_on_as_one(
    data: Path, losses_of_one: list[object], tmp_path: Path
) -> None:
    """torchrun is started on each machine; data, index and checkpoints lie on disks of its own."""
    nodes = [tmp_path / "first", tmp_path / "second"]
    for node in nodes:
        shutil.copytree(data, node / "data", ignore=shutil.ignore_patterns("cache*"))

    def train(iterations: str) -> list[str]:
        port = free_port()
        return run_together([
            [str(BIN / "torchrun"), "--nproc_per_node", "1", "--nnodes", "2", "--node_rank", str(rank), "--master_addr",
             "localhost", "--master_port", port, *PROGRAM, *data_flags(node / "data"), *outputs(node),
             "--train-iters", "6", "--exit-interval", iterations, "--pipeline-model-parallel-size", "2"]
            for rank, node in enumerate(nodes)], tmp_path)

    train("4")
    files = [{path.name for path in node.glob("checkpoints/iter_*/*.safetensors")} for node in nodes]
    assert files == [{"rank_00000.safetensors"}, {"rank_00001.safetensors"}]
    with pytest.raises(CheckpointError, match=r"rank_00001.safetensors: is missing; it was saved on the disk of"):
        find_latest(nodes[0] / "checkpoints", verify_hashes=True)

    told = train("6")
    assert "at iteration 4," in told[0]
    assert losses(nodes[0]) == pytest.approx(losses_of_one, rel=REDUCTION_ORDER["rtol"])
    assert not (nodes[1] / "run" / "metrics.jsonl").exists()
    for node in nodes:
        shutil.copytree(node / "checkpoints", tmp_path / "merged", dirs_exist_ok=True)
    assert find_latest(tmp_path / "merged", verify_hashes=True) == tmp_path / "merged" / "iter_0000006"
