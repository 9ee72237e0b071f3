"""Every recipe on every number of ranks that it is meant for, and the scripts that launch them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from bert_ds.cli.dry_run import dry_run_text
from bert_ds.cli.resolve import ResolvedRun, resolve_run
from bert_ds.cli.shipped_files import shipped_names

ROOT = Path(__file__).resolve().parents[1]
NAMES = ("110m", "20b", "340m", "4b", "tiny")
WITHOUT_SHAPE = ("continue",)
"""Recipes that take their model from a checkpoint, see tests/test_continue.py."""
TP8_PP16 = ["--tensor-model-parallel-size", "8", "--pipeline-model-parallel-size", "16"]
TP2_PP2 = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]


def resolved(name: str, ranks: int, flags: list[str] | None = None) -> ResolvedRun:
    return resolve_run(["--deepspeed_config", f"ds_configs/{name}.json", "--dry-run", "--world-size", str(ranks),
                        *(flags or [])], world_size=1)


def test_shipped_recipes_have_all_three_files() -> None:
    assert set(shipped_names()) == {*NAMES, *WITHOUT_SHAPE}
    for name in shipped_names():
        assert (ROOT / "ds_configs" / f"{name}.json").is_file()
        assert os.access(ROOT / "recipes" / f"{name}.sh", os.X_OK)


@pytest.mark.parametrize(("name", "ranks", "flags"), [
    ("tiny", 1, []), ("tiny", 2, []), ("tiny", 8, []), ("tiny", 8, TP2_PP2),
    ("tiny", 2, ["--pipeline-model-parallel-size", "2"]),
    ("110m", 1, []), ("110m", 8, []), ("340m", 1, []), ("340m", 8, []), ("340m", 128, TP8_PP16),
    ("4b", 1, []), ("4b", 8, []), ("20b", 16, []), ("20b", 128, []), ("20b", 16, ["--bf16"]),
])
def test_dry_run(name: str, ranks: int, flags: list[str]) -> None:
    told = dry_run_text(resolved(name, ranks, flags))
    assert f"Dry run of {name} on {ranks} rank" in told
    assert f"= {ranks} rank" in told


@pytest.mark.parametrize(("name", "shape", "layout", "parameters"), [
    ("340m", (24, 1024, 16), (1, 1), 336_297_858),
    ("4b", (48, 2560, 32), (1, 1), 3_869_260_674),
    ("20b", (48, 6144, 96), (4, 4), 22_013_798_274),
])
def test_numbers_of_megatrons_recipe(name: str, shape: tuple[int, int, int], layout: tuple[int, int],
                                     parameters: int) -> None:
    run = resolved(name, 16 if name == "20b" else 8).config
    model, schedule, engine = run.model, run.schedule, run.engine
    assert (model.num_layers, model.hidden_size, model.num_attention_heads) == shape
    assert (run.parallel.tensor_model_parallel_size, run.parallel.pipeline_model_parallel_size) == layout
    assert model.num_parameters == parameters
    assert (model.seq_length, model.max_position_embeddings, model.attention_backend) == (512, 512, "auto")
    assert (engine.micro_batch_size, engine.global_batch_size, engine.precision) == (4, 32, "fp16")
    assert (engine.lr, engine.weight_decay, engine.gradient_clipping) == (1e-4, 1e-2, 1.0)
    assert (schedule.train_iters, schedule.lr_decay_iters, schedule.min_lr) == (1_000_000, 990_000, 1e-5)
    assert (schedule.lr_decay_style, schedule.warmup_iters) == ("linear", 9900)
    assert (schedule.eval_interval, schedule.eval_iters, run.data.split) == (1000, 10, "949,50,1")
    assert (run.output.log_interval, run.output.save_interval) == (100, 10_000)


@pytest.mark.parametrize("name", NAMES)
def test_each_recipe_writes_to_folders_of_its_own_name(name: str) -> None:
    run = resolved(name, 16 if name == "20b" else 8).config
    assert run.output.save == run.output.load == f"checkpoints/{name}"
    assert run.output.tensorboard_dir == f"runs/{name}"
    assert run.data.data_path == ("data/corpus_text_sentence",) and run.data.vocab_file == "data/vocab.txt"


def launch(name: str, *arguments: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    inherited = {key: value for key, value in os.environ.items() if key not in ("CUDA_VISIBLE_DEVICES", "NUM_NODES")}
    return subprocess.run([ROOT / "recipes" / f"{name}.sh", *arguments], env=inherited | variables, cwd=folder,
                          capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize(("name", "ranks"), [("tiny", 1), ("110m", 8), ("340m", 8), ("4b", 8), ("20b", 16)])
def test_scripts_run_dry_from_any_folder(name: str, ranks: int, tmp_path: Path) -> None:
    subprocess.run(["bash", "-n", ROOT / "recipes" / f"{name}.sh"], check=True)
    done = launch(name, "ckpt", "tb", "vocab.txt", "text_sentence", "--lr", "5e-5", folder=tmp_path, DRY_RUN="1")
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert f"Dry run of {name} on {ranks} rank" in done.stdout
    for row in (["output.save", "ckpt", "--save"], ["output.load", "ckpt", "--load"],
                ["output.tensorboard_dir", "tb", "--tensorboard-dir"], ["data.vocab_file", "vocab.txt", "--vocab-file"],
                ["data.data_path", "text_sentence", "--data-path"], ["engine.lr", "5e-05", "--lr"]):
        assert row in lines


def test_script_without_paths_keeps_those_of_the_recipe(tmp_path: Path) -> None:
    done = launch("340m", *TP8_PP16, folder=tmp_path, DRY_RUN="1", NUM_NODES="16")
    assert "on 128 ranks" in done.stdout and "checkpoints/340m: not there" in done.stdout
    assert not list(tmp_path.iterdir())


def test_script_refuses_some_of_the_four_paths(tmp_path: Path) -> None:
    done = launch("340m", "ckpt", "tb", folder=tmp_path, DRY_RUN="1")
    assert done.returncode == 2 and "give all of CHECKPOINT_PATH" in done.stderr


@pytest.fixture
def launchers(tmp_path: Path) -> dict[str, str]:
    """Stand-ins for both launchers, which tell how they were called."""
    for name in ("deepspeed", "torchrun"):
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f'#!/bin/sh\necho {name} "$@"\necho "connections $CUDA_DEVICE_MAX_CONNECTIONS"\n')
        path.chmod(0o755)
    return {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}


def test_one_machine_uses_deepspeed_and_several_torchrun(tmp_path: Path, launchers: dict[str, str]) -> None:
    script = tmp_path / "recipes" / "340m.sh"
    script.parent.mkdir()
    for name in ("340m.sh", "launch.sh"):
        (script.parent / name).write_bytes((ROOT / "recipes" / name).read_bytes())
        (script.parent / name).chmod(0o755)

    def start(**variables: str) -> list[str]:
        clean = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
        done = subprocess.run([script, "--seed", "5"], env=clean | launchers | variables, capture_output=True,
                              text=True, check=False, timeout=60)
        return (done.stdout + done.stderr).splitlines()

    tail = f"--deepspeed_config {tmp_path}/ds_configs/340m.json --seed 5"
    called, connections = start()
    assert called.startswith("deepspeed --num_gpus 8 --master_port 6000 ") and called.endswith(tail)
    assert connections == "connections 1"
    called, _ = start(NUM_NODES="2", NODE_RANK="1", MASTER_ADDR="first", MASTER_PORT="6001", GPUS_PER_NODE="4")
    assert called.startswith("torchrun --nproc_per_node 4 --nnodes 2 --node_rank 1 --master_addr first "
                             "--master_port 6001 ") and called.endswith(tail)
    called, _ = start(CUDA_VISIBLE_DEVICES="2,3,5", GPUS_PER_NODE="2")
    assert called.startswith("deepspeed --include localhost:2,3 --master_port 6000 ")
    (refusal,) = start(CUDA_VISIBLE_DEVICES="2,3")
    assert refusal.endswith("Fix: set GPUS_PER_NODE=2.")


def test_a_stop_reaches_what_the_launcher_started(tmp_path: Path, launchers: dict[str, str]) -> None:
    """As `deepspeed` does, the stand-in waits for a child and hands no signal on."""
    worker = tmp_path / "worker"
    worker.write_text("#!/bin/bash\ntrap 'echo saved; exit 7' TERM\necho ready\nwhile true; do sleep 0.1; done\n")
    worker.chmod(0o755)
    (tmp_path / "bin" / "deepspeed").write_text(f"#!/bin/bash\n{worker} &\nwait $!\nexit $?\n")
    clean = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
    # A copy, beside which lies no .venv with the real launcher.
    script = tmp_path / "recipes" / "launch.sh"
    script.parent.mkdir()
    script.write_bytes((ROOT / "recipes" / "launch.sh").read_bytes())
    script.chmod(0o755)
    with subprocess.Popen([script, "tiny"], env=clean | launchers, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "ready\n"
        run.terminate()
        assert run.stdout.read() == "saved\n"
        assert run.wait(timeout=60) == 7
