from __future__ import annotations

import os
from pathlib import Path

import pytest

from bert_ds.cli.data_files import missing_data, unusable_folders
from bert_ds.cli.dry_run import dry_run_text
from bert_ds.cli.resolve import resolve_run
from bert_ds.errors import ConfigError


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def dry(*argv: str) -> str:
    return dry_run_text(resolve_run([*argv, "--dry-run"], world_size=1))


def test_large_bert_on_a_cluster_that_is_not_there() -> None:
    told = dry("--deepspeed_config", "ds_configs/340m.json", "--world-size", "128", "--tensor-model-parallel-size", "8",
               "--pipeline-model-parallel-size", "16")
    for expected in (
        "Dry run of 340m on 128 ranks: nothing is started",
        "tensor 8 x pipeline 16 x data 1 = 128 ranks",
        "stage 0: embeddings, layers 0-1", "stage 2: layer 4", "stage 15: layer 23, heads",
        "global batch 32 = micro batch 4 x data parallel 1 x accumulation 8",
        "16,384 tokens an iteration, 80 predictions kept a row",
        "pipeline of 16 stages with 8 micro-batches: 65% of the time idle",
        "30,522 entries (expected, the file is not there), padded to 30,592 rows",
        "336,297,858 parameters in all",
        "iteration 9,900: 0.0001 (peak)", "iteration 990,000: 1e-05 (linear)", "1e-05 until iteration 1,000,000",
        "--tensor-model-parallel-size 8 overrides parallel.tensor_model_parallel_size=1 of ",
        "data/corpus_text_sentence: .idx not there, .bin not there",
        "python -m bert_ds.preprocess_data --input corpus.jsonl --vocab-file data/vocab.txt "
        "--output-prefix data/corpus --split-sentences",
        '"gradient_accumulation_steps": 8,',
    ):
        assert expected in told, expected
    origin = next(line for line in told.splitlines()
                  if line.split()[:2] == ["parallel.pipeline_model_parallel_size", "16"])
    assert origin.endswith("--pipeline-model-parallel-size")
    origin = next(line for line in told.splitlines() if "schedule.lr_decay_iters" in line)
    assert origin.split()[1] == "990000" and origin.endswith("recipes/340m.yaml")


def test_the_vocabulary_file_decides_the_size(folder: Path) -> None:
    (folder / "vocab.txt").write_text("".join(f"w{i}\n" for i in range(1000)))
    told = dry("--recipe", "tiny", "--vocab-file", "vocab.txt")
    assert "1,000 entries (read from vocab.txt), padded to 1,024 rows" in told
    with pytest.raises(ConfigError, match="padded vocabulary 1000"):
        dry("--recipe", "tiny", "--vocab-file", "vocab.txt", "--make-vocab-size-divisible-by", "1",
            "--num-attention-heads", "16", "--tensor-model-parallel-size", "16", "--world-size", "16")


def test_missing_data_is_told_with_what_makes_it(folder: Path) -> None:
    data = resolve_run(["--recipe", "tiny", "--data-path", "0.3", "own_text_document", "0.7", "more"],
                       world_size=1).config.data
    problems = [str(problem) for problem in missing_data(data)]
    assert len(problems) == 3
    assert "python -m bert_ds.build_vocab" in problems[0] and "data.vocab_file=data/vocab.txt" in problems[0]
    assert "own_text_document.idx and own_text_document.bin missing or empty" in problems[1]
    for suffix in (".idx", ".bin"):
        (folder / f"own_text_sentence{suffix}").write_bytes(b"x")
        (folder / f"more{suffix}").write_bytes(b"")
    problems = [str(problem) for problem in missing_data(data)]
    assert "Fix: use own_text_sentence, which exists" in problems[1]
    assert "data.data_path=more: more.idx and more.bin missing or empty" in problems[2]


def test_only_what_is_missing_is_to_be_made(folder: Path) -> None:
    def told() -> str:
        (problem,) = missing_data(resolve_run(["--recipe", "tiny", "--data-path", "own", "--vocab-file", "v.txt"],
                                              world_size=1).config.data)
        return str(problem)

    for suffix in (".idx", ".bin"):
        (folder / f"own{suffix}").write_bytes(b"x")
    build = "python -m bert_ds.build_vocab --input corpus.jsonl --output v.txt"
    assert told() == f"data.vocab_file=v.txt: is missing or empty. Fix: make it with\n      {build}"
    assert build in dry("--recipe", "tiny", "--data-path", "own", "--vocab-file", "v.txt")
    (folder / "v.txt").write_text("a\n")
    (folder / "own.bin").unlink()
    assert "build_vocab" not in told() and "Fix: make it with\n      python -m bert_ds.preprocess_data" in told()


def test_folders_that_cannot_be_are_told_before_anything_starts(folder: Path) -> None:
    (folder / "file").write_text("")
    (folder / "locked").mkdir(mode=0o500)
    arguments = ["--recipe", "tiny", "--save", "file/below", "--load", "file", "--tensorboard-dir", "runs/new"]
    problems = [str(problem) for problem in unusable_folders(resolve_run(arguments, world_size=1).config.output)]
    assert [problem.partition(":")[0] for problem in problems] == ["output.save=file/below", "output.load=file"]
    assert all("cannot be a folder" in problem for problem in problems)
    assert f"error: {problems[1]}" in dry(*arguments)
    same = resolve_run(["--recipe", "tiny", "--save", "file/below"], world_size=1).config.output
    assert same.load == same.save and len(list(unusable_folders(same))) == 1
    if not os.access(folder / "locked", os.W_OK):  # root may write everywhere
        locked = resolve_run(["--recipe", "tiny", "--save", "locked/run"], world_size=1).config.output
        assert "allows no writing" in str(next(unusable_folders(locked)))
    usable = resolve_run(["--recipe", "tiny", "--save", "new/run"], world_size=1).config.output
    assert not list(unusable_folders(usable))
    assert not (folder / "new").exists()


@pytest.mark.parametrize("flags", [["--split", "100,0,0"], ["--train-data-path", "a"]])
def test_data_without_validation_are_told_unless_evaluation_is_off(folder: Path, flags: list[str]) -> None:
    with pytest.raises(ConfigError, match="validation"):
        dry("--recipe", "tiny", *flags)
    assert "Dry run of tiny" in dry("--recipe", "tiny", *flags, "--eval-interval", "none")


def test_a_setting_may_be_switched_off(folder: Path) -> None:
    run = resolve_run(["--recipe", "tiny", "--eval-interval", "none", "--tensorboard-dir", "None"], world_size=1).config
    assert run.schedule.eval_interval is None
    assert run.output.tensorboard_dir is None


def test_batch_sizes_are_blamed_by_name(folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_run(["--recipe", "tiny", "--global-batch-size", "-8"], world_size=1)
    assert "train_batch_size=-8: must be at least 1" in str(caught.value)
    assert "train_micro_batch_size_per_gpu" not in str(caught.value)
