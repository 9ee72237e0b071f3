"""Blends in files are the flags that they stand for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bert_ds.cli.argument_files import with_argument_files
from bert_ds.cli.data_files import count_vocabulary, data_prefixes, missing_data
from bert_ds.cli.resolve import resolve_run
from bert_ds.errors import ConfigError


def run_of(*argv: str):
    return resolve_run(["--recipe", "tiny", *argv], world_size=1).config.data


def test_the_words_of_a_file_are_those_of_the_flags(tmp_path: Path) -> None:
    blend, splits = tmp_path / "blend.txt", tmp_path / "splits.json"
    blend.write_text("0.3 /data/a\n0.7 /data/b\n")
    assert run_of("--data-args-path", str(blend)).data_path == ("0.3", "/data/a", "0.7", "/data/b")
    assert run_of(f"--data_args_path={blend}", "--split", "1,1,1").data_path == ("0.3", "/data/a", "0.7", "/data/b")
    splits.write_text(json.dumps({"train": [1, "a", 2, "b"], "valid": "c", "test": None}))
    data = run_of("--per-split-data-args-path", str(splits))
    assert (data.train_data_path, data.valid_data_path, data.test_data_path) == (("1", "a", "2", "b"), ("c",), ())
    assert data.has_data_of_splits


def test_flags_of_splits_take_the_place_of_data_path() -> None:
    data = run_of("--train-data-path", "a", "b", "--valid-data-path", "c")
    assert (data.train_data_path, data.valid_data_path) == (("a", "b"), ("c",))
    with pytest.raises(ConfigError, match="contradicts --data-path"):
        run_of("--train-data-path", "a", "--data-path", "b")
    with pytest.raises(ConfigError, match=r"data.train_data_path=.*names no data although another split has"):
        run_of("--valid-data-path", "a")


@pytest.mark.parametrize(("flag", "content", "reason"), [
    ("--data-args-path", None, "cannot be read"),
    ("--data-args-path", b"\xff\xfe", "not UTF-8"),
    ("--data-args-path", b"", "something other than prefixes"),
    ("--per-split-data-args-path", b"{", "is not JSON"),
    ("--per-split-data-args-path", b"[]", "is not an object"),
    ("--per-split-data-args-path", b'{"training": ["a"]}', "with the keys train, valid and test"),
    ("--per-split-data-args-path", b'{"train": [["a"]]}', "something other than prefixes"),
])
def test_files_that_cannot_be_used_are_refused(tmp_path: Path, flag: str, content: bytes | None, reason: str) -> None:
    path = tmp_path / "file"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=reason) as caught:
        with_argument_files([flag, str(path)])
    assert f"{flag}={path}" in str(caught.value)


def test_what_is_given_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "blend.txt"
    path.write_text("a")
    with pytest.raises(ConfigError, match="contradicts --data-path"):
        with_argument_files(["--data-path", "b", "--data-args-path", str(path)])
    with pytest.raises(ConfigError, match="cannot be read"):
        with_argument_files(["--data-args-path"])


def test_masking_options_and_what_has_no_effect() -> None:
    resolved = resolve_run(["--recipe", "tiny", "--no-masking-full-word", "--masking-max-ngram", "5",
                            "--masking-use-longer-ngrams", "--sentence-task", "random_next",
                            "--allow-ambiguous-pad-tokens", "--mid-level-dataset-surplus", "0.01"], world_size=1)
    data = resolved.config.data
    assert (data.masking_do_full_word, data.masking_max_ngram, data.masking_use_longer_ngrams) == (False, 5, True)
    assert (data.sentence_task, data.mid_level_dataset_surplus) == ("random_next", 0.01)
    assert any(remark.startswith("--allow-ambiguous-pad-tokens has no effect") for remark in resolved.remarks)
    with pytest.raises(ConfigError, match="contradicts masking_use_geometric_distribution"):
        run_of("--masking-do-permutation", "--masking-use-geometric-distribution")


def test_data_of_splits_are_looked_for(tmp_path: Path) -> None:
    data = run_of("--train-data-path", "1", f"{tmp_path}/a", "2", f"{tmp_path}/b", "--valid-data-path", f"{tmp_path}/a",
                  f"{tmp_path}/c")
    assert data_prefixes(data) == (f"{tmp_path}/a", f"{tmp_path}/b", f"{tmp_path}/c")
    missing = [problem for problem in missing_data(data) if "vocab" not in problem.setting]
    assert [(problem.setting, problem.value) for problem in missing] == [
        ("data.train_data_path", f"{tmp_path}/a"), ("data.train_data_path", f"{tmp_path}/b"),
        ("data.valid_data_path", f"{tmp_path}/c")]


def test_the_vocabulary_is_counted_with_what_is_appended(tmp_path: Path) -> None:
    path = tmp_path / "vocab.txt"
    path.write_text("a\nb\n[BOS]\n")
    assert count_vocabulary(run_of("--vocab-file", str(path))) == 3
    assert count_vocabulary(run_of("--vocab-file", str(path), "--vocab-extra-bos-eos")) == 4
