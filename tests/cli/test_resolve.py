from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from megatron_script import TRAIN_BERT_340M

from bert_ds.cli.flags import FLAGS
from bert_ds.cli.resolve import resolve_run
from bert_ds.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]

SMALL = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --train-iters 10 --micro-batch-size 2".split()


def message(*argv: str, world_size: int = 1) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve_run(argv, world_size=world_size)
    return str(caught.value)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_megatron_arguments_alone_are_the_340m_recipe_on_128_ranks(folder: Path) -> None:
    by_flags = resolve_run(TRAIN_BERT_340M.split(), world_size=128).config
    by_recipe = resolve_run([
        "--deepspeed_config", "ds_configs/340m.json", "--tensor-model-parallel-size", "8",
        "--pipeline-model-parallel-size", "16"], world_size=128).config
    assert by_flags.model == by_recipe.model
    assert by_flags.schedule == by_recipe.schedule
    assert by_flags.parallel == by_recipe.parallel
    assert by_flags.engine.loss_scaling == by_recipe.engine.loss_scaling
    for name in ("micro_batch_size", "global_batch_size", "precision", "lr", "betas", "eps", "weight_decay",
                 "gradient_clipping", "zero_stage"):
        assert getattr(by_flags.engine, name) == getattr(by_recipe.engine, name)
    assert by_flags.data.data_path == ("my-bert_text_sentence",) and by_flags.data.split == "949,50,1"
    assert by_flags.output.save == by_flags.output.load == "ckpt" and by_flags.output.tensorboard_dir == "tb"
    assert (by_flags.output.save_interval, by_flags.output.log_interval) == (10000, 100)


def test_later_flag_wins_and_every_override_is_told() -> None:
    run = resolve_run(["--deepspeed", "--deepspeed_config", "ds_configs/340m.json", "--local_rank=3", "--lr", "3e-4",
                       "--lr", "2e-4", "--adam-beta2", "0.98", "--seed", "1234"], world_size=8)
    assert run.config.engine.lr == 2e-4 and run.config.engine.betas == (0.9, 0.98)
    assert run.options.local_rank == 3
    assert run.origins["engine.lr"] == "--lr" and run.origins["schedule.seed"] == "--seed"
    assert run.origins["model.num_layers"].endswith("recipes/340m.yaml")
    assert run.origins["engine.micro_batch_size"].endswith("ds_configs/340m.json")
    assert run.origins["model.activation"] == "default"
    assert len(run.remarks) == 2
    assert run.remarks[0].startswith("--lr 0.0002 overrides optimizer.params.lr=0.0001 of ")
    assert run.remarks[1].startswith("--adam-beta2 0.9 0.98 overrides optimizer.params.betas=0.9 0.999 of ")


def test_json_and_recipe_name_each_other(folder: Path) -> None:
    by_json = resolve_run(["--deepspeed-config", "ds_configs/tiny.json"], world_size=1)
    by_recipe = resolve_run(["--recipe", "tiny"], world_size=1)
    assert by_json.config == by_recipe.config and by_json.config.name == "tiny"


def test_own_files_come_before_shipped_ones(folder: Path) -> None:
    (folder / "ds_configs").mkdir()
    (folder / "recipes").mkdir()
    (folder / "ds_configs" / "tiny.json").write_text('{"train_batch_size": 8, "gradient_accumulation_steps": 2}')
    (folder / "recipes" / "tiny.yaml").write_text(
        "model: {num_layers: 1, hidden_size: 8, num_attention_heads: 1}\nschedule: {train_iters: 1e1}\n")
    run = resolve_run(["--deepspeed_config", "ds_configs/tiny.json"], world_size=2).config
    assert (run.model.num_layers, run.schedule.train_iters) == (1, 10)
    assert (run.engine.micro_batch_size, run.engine.global_batch_size) == (2, 8)


def test_save_moves_load_along_and_warmup_flag_replaces_the_other_kind() -> None:
    run = resolve_run(["--recipe", "340m", "--save", "elsewhere", "--lr-warmup-iters", "50"], world_size=8).config
    assert run.output.load == "elsewhere"
    assert run.schedule.lr_warmup_fraction is None and run.schedule.warmup_iters == 50


def test_all_problems_in_one_message() -> None:
    told = message("--recipe", "340m", "--num-layer", "24", "--fp16", "--bf16", "--lr", "high", "--train-samples", "9",
                   "--tensor-model-parallel-size", "3", "--zero-stage", "3", world_size=8)
    for expected in ("flag=--num-layer: is not known. Fix: use --num-layers", "--bf16=bf16: contradicts --fp16",
                     "--lr=high: is not a number", "--train-samples=9: lengths are in iterations",
                     "--zero-stage=3: is not 0 or 1",
                     "parallel=tensor 3 x pipeline 1 = 3: does not divide the world size 8",
                     "tensor_model_parallel_size=3: does not divide model.num_attention_heads=16"):
        assert expected in told, told


@pytest.mark.parametrize(("argv", "expected"), [
    ([], "names no run"),
    (["--recipe", "tinny"], "Fix: did you mean tiny"),
    (["--deepspeed_config", "ds_configs/340.json"], "does not exist. Fix: did you mean ds_configs/340m.json"),
    (["--recipe", "tiny", "24"], "command line=24: is not a flag"),
    (["--recipe", "tiny", "--lr"], "--lr: expected one argument"),
    (["--recipe", "tiny", "--world-size", "8"], "--world-size=8: is for dry runs"),
    (["--recipe", "tiny", "--dry-run", "--world-size", "0"], "--world-size=0: must be at least 1"),
    (["--recipe", "tiny", "--initial-loss-scale", "1000"], "is not a power of two"),
    (["--recipe", "tiny", "--global-batch-size", "33"], "Fix: use 32 or 40"),
    (["--recipe", "tiny", "--lr-warmup-iters", "5", "--lr-warmup-fraction", "0.1"], "contradicts"),
    (["--recipe", "tiny", "--attention-backend", "fast"], "is not one of auto, flash, fused, unfused, local. Fix: did "
     "you mean flash."),
    (["--recipe", "tiny", "--log-interval", "1.5"], "is not a whole number. Fix: correct it, or leave it out for 100."),
    (["--recipe", "tiny", "--zero-stage", "2"], "--zero-stage=2: is not 0 or 1, the stages that the pipeline engine "
     "serves. Fix: correct it."),
    (["--recipe", "tiny", "--seq-length", "256"], "set max_position_embeddings to 256"),
    (["--recipe", "tiny", "--split", "half"], "data.split=half"),
    (["--recipe", "tiny", "--split", "100,0,0"], "data.split=100,0,0: leaves nothing to validation, and the run "
     "evaluates. Fix: give it a share, as in 949,50,1, or train without evaluation (--eval-interval none)."),
    (["--recipe", "tiny", "--split", "0,1", "--eval-interval", "none"], "data.split=0,1: leaves nothing to train on"),
    (["--recipe", "tiny", "--train-data-path", "a"], "data.valid_data_path=none: validation has no data"),
    (["--recipe", "tiny", "--pipeline-model-parallel-size", "4"], "does not divide the world size 1"),
    (["--num-layers", "2"], "model.hidden_size=none: is not set and has no default"),
])
def test_one_mistake(argv: list[str], expected: str) -> None:
    assert expected in message(*argv)


@pytest.mark.parametrize(("batch", "micro", "total"), [
    ('"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4', 4, 32),
    ('"train_batch_size": 32, "gradient_accumulation_steps": 2', 4, 32),
    ('"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2', 4, 32),
    ('"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2', 4, 32),
    ('"train_batch_size": 32', 8, 32),
    ('"train_micro_batch_size_per_gpu": 8', 8, 32),
])
def test_any_two_of_three_batch_numbers(folder: Path, batch: str, micro: int, total: int) -> None:
    (folder / "own.json").write_text("{" + batch + "}")
    flags = ["--deepspeed_config", "own.json", *SMALL[:-2], "--tensor-model-parallel-size", "2"]
    engine = resolve_run(flags, world_size=8).config.engine
    assert (engine.micro_batch_size, engine.global_batch_size) == (micro, total)


def test_batch_numbers_that_do_not_multiply(folder: Path) -> None:
    (folder / "own.json").write_text('{"train_batch_size": 30, "train_micro_batch_size_per_gpu": 4, '
                                     '"gradient_accumulation_steps": 2}')
    flags = ["--deepspeed_config", "own.json", *SMALL[:-2]]
    assert "4 x accumulation 2 x data-parallel size 4 = 32. Fix: use 32" in message(*flags, world_size=4)
    run = resolve_run([*flags, "--global-batch-size", "48"], world_size=4)
    assert run.config.engine.accumulation(4) == 3
    assert any("replace gradient_accumulation_steps=2" in remark for remark in run.remarks)


@pytest.mark.parametrize(("micro", "total", "ranks", "repair"), [
    (3, 32, 8, "use 24 or 48, or a micro batch of 2."),
    (4, 30, 4, "use 16 or 32."),
    (4, 8, 4, "use 16, or a micro batch of 2."),
    (2, 1, 1, "use 2, or a micro batch of 1."),
    (4, 3, 8, "use 32."),
])
def test_batches_that_do_not_fit_are_repaired_by_some_that_do(micro: int, total: int, ranks: int, repair: str) -> None:
    flags = [*SMALL, "--micro-batch-size", str(micro), "--global-batch-size", str(total)]
    assert message(*flags, world_size=ranks).endswith(f"x accumulation. Fix: {repair}")


def test_flags_without_effect_are_told() -> None:
    run = resolve_run([*SMALL, "--global-batch-size", "2", "--use-mcore-models"], world_size=1)
    assert run.remarks == ("--use-mcore-models has no effect: there is one implementation of the model",)


def test_resolving_imports_neither_torch_nor_deepspeed() -> None:
    code = ("import sys; from bert_ds.cli.resolve import resolve_run; from bert_ds.cli.dry_run import dry_run_text\n"
            "dry_run_text(resolve_run(['--recipe', 'tiny'], world_size=1))\n"
            "sys.exit(bool({'torch', 'deepspeed', 'numpy'} & set(sys.modules)))")
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_help_names_every_flag_with_choices_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        resolve_run(["--help"], world_size=1)
    assert stopped.value.code == 0
    told = capsys.readouterr().out
    assert all(flag.name in told for flag in FLAGS)
    assert "One of auto, flash, fused, unfused, local. Default: auto." in " ".join(told.split())
