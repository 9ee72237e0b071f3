"""The recipes for Slurm, Docker and machines without a shared disk, with stand-ins for what they start."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "recipes"
HIDDEN = ("CUDA_VISIBLE_DEVICES", "MASTER_ADDR", "MASTER_PORT", "NUM_NODES", "GPUS_PER_NODE", "DRY_RUN", "SLURM_CONF")


def stand_in(folder: Path, name: str, script: str) -> None:
    """A program `name` in `folder`/bin that writes its name and words down, then runs `script`."""
    path = folder / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f'#!/bin/bash\nprintf "%s\\n" "{name} $*" >>"{folder}/called"\n{script}\n')
    path.chmod(0o755)


def run(words: list[str | Path], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if key not in HIDDEN}
    return subprocess.run(
        words, cwd=folder, env={**clean, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", **variables},
        capture_output=True, text=True, timeout=60, check=False)


def called(folder: Path) -> list[str]:
    return (folder / "called").read_text().splitlines()


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """A job of 16 tasks, whose batch script runs from a copy, as Slurm does it."""
    (tmp_path / "spool").mkdir()
    (tmp_path / "spool" / "slurm_script").write_bytes((RECIPES / "slurm.sh").read_bytes())
    (tmp_path / "spool" / "slurm_script").chmod(0o755)
    stand_in(tmp_path, "srun", 'echo "cpus $SRUN_CPUS_PER_TASK addr ${MASTER_ADDR-unset}"\nexit ${SRUN_CODE:-0}')
    stand_in(tmp_path, "scontrol", f'[[ $1 == show ]] && echo "   Command={RECIPES}/slurm.sh 340m"\n'
             '[[ $1 != requeue ]] || exit ${REQUEUE_CODE:-0}')
    return {"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "16", "SLURM_CPUS_PER_TASK": "8"}


def job(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return run([folder / "spool" / "slurm_script", *words], folder, **variables)


def test_a_slurm_job_starts_a_rank_for_each_task(tmp_path: Path, slurm: dict[str, str]) -> None:
    done = job(tmp_path, "340m", "ckpt", "tb", "vocab.txt", "text_sentence", "--lr", "5e-5", **slurm,
               SRUN_FLAGS="--container-image=bert.sqsh --no-container-remap-root")
    assert done.returncode == 0, done.stderr
    assert called(tmp_path)[-1] == (
        "srun --kill-on-bad-exit=0 --wait=60 --container-image=bert.sqsh --no-container-remap-root python3 -u "
        f"{ROOT}/bert_ds/pretrain.py --deepspeed_config {ROOT}/ds_configs/340m.json --save ckpt --load ckpt "
        "--tensorboard-dir tb --vocab-file vocab.txt --data-path text_sentence --lr 5e-5")
    assert done.stdout == "cpus 8 addr unset\n"


@pytest.mark.parametrize(("code", "requeues", "ends_with"), [
    ("0", False, 0), ("75", True, 0), ("138", True, 0), ("2", False, 2), ("3", False, 3), ("143", False, 143),
])
def test_a_slurm_job_is_requeued_after_sigusr1_alone(
    tmp_path: Path, slurm: dict[str, str], code: str, requeues: bool, ends_with: int
) -> None:
    done = job(tmp_path, "340m", **slurm, SRUN_CODE=code)
    assert done.returncode == ends_with
    assert ("scontrol requeue 4711" in called(tmp_path)) == requeues


def test_a_slurm_job_that_cannot_be_requeued_says_what_to_do(tmp_path: Path, slurm: dict[str, str]) -> None:
    done = job(tmp_path, "340m", **slurm, SRUN_CODE="75", REQUEUE_CODE="1")
    assert done.returncode == 75
    assert "Fix: submit it again with the same words; it goes on." in done.stderr


def test_the_batch_script_tells_bad_words_and_plans_without_starting(tmp_path: Path, slurm: dict[str, str]) -> None:
    assert "there is no" in job(tmp_path, "341m", **slurm).stderr
    assert job(tmp_path, **slurm).returncode == 2
    done = job(tmp_path, "20b", **slurm, DRY_RUN="1")
    assert done.returncode == 0, done.stderr
    assert "Dry run of 20b on 16 ranks" in done.stdout and not any(line.startswith("srun") for line in called(tmp_path))


def test_the_batch_script_asks_for_the_signal_that_makes_ranks_save() -> None:
    directives = re.findall(r"^#SBATCH (.*)$", (RECIPES / "slurm.sh").read_text(), re.MULTILINE)
    assert {"--signal=USR1@600", "--requeue", "--open-mode=append"} <= set(directives)


PATHS = {"CHECKPOINT_PATH": "ckpt", "TENSORBOARD_LOGS_PATH": "tb", "VOCAB_FILE": "data/vocab.txt",
         "DATA_PATH": "data/text_sentence"}


def test_docker_shows_the_four_paths_to_the_container(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "vocab.txt").touch()
    stand_in(tmp_path, "docker", "")
    done = run([RECIPES / "docker.sh", "340m", "--lr", "5e-5"], tmp_path, **PATHS, GPUS_PER_NODE="4",
               PYTORCH_IMAGE="own:25.12", DOCKER_FLAGS="--network host")
    assert done.returncode == 0, done.stderr
    build, started = called(tmp_path)
    assert build == f"docker build -f {RECIPES}/Dockerfile -t bert_ds --build-arg PYTORCH_IMAGE=own:25.12 {ROOT}"
    here = tmp_path.resolve()
    assert started == (
        "docker run --rm --init --gpus=all --ipc=host --ulimit memlock=-1 --ulimit stack=67108864 --workdir "
        f"/workspace/bert_ds -v {here}/ckpt:{here}/ckpt -v {here}/tb:{here}/tb -v {here}/data:{here}/data "
        f"-e GPUS_PER_NODE=4 --network host bert_ds recipes/340m.sh {here}/ckpt {here}/tb {here}/data/vocab.txt "
        f"{here}/data/text_sentence --lr 5e-5")


def test_docker_asks_for_all_that_is_missing(tmp_path: Path) -> None:
    stand_in(tmp_path, "docker", "")
    done = run([RECIPES / "docker.sh", "340m"], tmp_path, CHECKPOINT_PATH="ckpt", VOCAB_FILE="vocab.txt")
    assert done.returncode == 2 and "TENSORBOARD_LOGS_PATH DATA_PATH: not set" in done.stderr
    assert "Fix: recipes/docker.sh NAME" in run([RECIPES / "docker.sh", "341m"], tmp_path, **PATHS).stderr
    assert not (tmp_path / "called").exists()


def test_the_image_is_one_whose_pytorch_is_new_enough() -> None:
    """25.02 is the first with 2.7; see the head of the Dockerfile."""
    found = re.search(r"^ARG PYTORCH_IMAGE=\S+/pytorch:(\d+)\.(\d+)-py3$", (RECIPES / "Dockerfile").read_text(),
                      re.MULTILINE)
    assert found is not None
    assert (int(found[1]), int(found[2])) >= (25, 2)
    for source in re.findall(r"^COPY (.*) \S+$", (RECIPES / "Dockerfile").read_text(), re.MULTILINE):
        assert all((ROOT / name).exists() for name in source.split())


@pytest.fixture
def machines(tmp_path: Path) -> dict[str, str]:
    """Two machines that are this one: ssh runs the command here, torchrun tells how it was called."""
    stand_in(tmp_path, "ssh", 'while [[ $1 == -* ]]; do shift; done\nbash -c "$2"')
    stand_in(tmp_path, "rsync", "")
    stand_in(tmp_path, "torchrun", 'echo "node ${*:6:1} of ${*:4:1}"\nexit ${TORCHRUN_CODE:-0}')
    # A copy, beside which lies no .venv with the real launcher.
    (tmp_path / "checkout" / "recipes").mkdir(parents=True)
    for name in ("several_nodes.sh", "launch.sh", "340m.sh"):
        (tmp_path / "checkout" / "recipes" / name).write_bytes((RECIPES / name).read_bytes())
        (tmp_path / "checkout" / "recipes" / name).chmod(0o755)
    (tmp_path / "my data").mkdir()
    (tmp_path / "my data" / "text_sentence.idx").touch()
    return {"GPUS_PER_NODE": "4"}


def several_nodes(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return run([folder / "checkout" / "recipes" / "several_nodes.sh", "340m", "gpu1,gpu2", "ckpt", "tb", "vocab.txt",
                "my data/text_sentence", *words], folder, **variables)


def test_several_nodes_get_the_data_and_start_together(tmp_path: Path, machines: dict[str, str]) -> None:
    done = several_nodes(tmp_path, "--lr", "5e-5", **machines)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["gpu1: node 0 of 2", "gpu2: node 1 of 2"]
    lines, here = called(tmp_path), tmp_path.resolve()
    copies = [line for line in lines if line.startswith("rsync")]
    assert copies == [line for host in ("gpu1", "gpu2") for line in (
        f"rsync -a -e ssh {here}/vocab.txt {host}:{here}/vocab.txt",
        f"rsync -a -e ssh {here}/my data/text_sentence.idx {host}:{here}/my data/")]
    starts = sorted(line for line in lines if line.startswith("torchrun"))
    assert starts == [
        f"torchrun --nproc_per_node 4 --nnodes 2 --node_rank {node} --master_addr gpu1 --master_port 6000 "
        f"{here}/pretrain.py --deepspeed_config {here}/checkout/ds_configs/340m.json --save {here}/ckpt "
        f"--load {here}/ckpt --tensorboard-dir {here}/tb --vocab-file {here}/vocab.txt --data-path "
        f"{here}/my data/text_sentence --lr 5e-5" for node in (0, 1)]


def test_a_stop_reaches_every_node_and_lets_it_save(tmp_path: Path, machines: dict[str, str]) -> None:
    stand_in(tmp_path, "torchrun", "trap 'echo saved; exit 143' TERM\necho ready\nwhile true; do sleep 0.1; done")
    clean = {key: value for key, value in os.environ.items() if key not in HIDDEN}
    words = ["340m", "gpu1,gpu2", "ckpt", "tb", "vocab.txt", "my data/text_sentence"]
    with subprocess.Popen([tmp_path / "checkout" / "recipes" / "several_nodes.sh", *words], cwd=tmp_path, text=True,
                          env={**clean, **machines, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"},
                          stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert sorted(running.stdout.readline() for _ in range(2)) == ["gpu1: ready\n", "gpu2: ready\n"]
        running.terminate()
        assert sorted(running.stdout.read().splitlines()) == ["gpu1: saved", "gpu2: saved"]
        assert running.wait(timeout=60) == 143


def test_several_nodes_end_with_the_code_of_a_node_that_failed(tmp_path: Path, machines: dict[str, str]) -> None:
    done = several_nodes(tmp_path, **machines, TORCHRUN_CODE="3", COPY="0")
    assert done.returncode == 3
    assert not any(line.startswith("rsync") for line in called(tmp_path))
    assert "there is no" in run([tmp_path / "checkout" / "recipes" / "several_nodes.sh", "340m", "gpu1,gpu2", "ckpt",
                                 "tb", "vocab.txt", "nowhere"], tmp_path).stderr
