"""The report reads what a run logged, resumed and torn files included, and draws every panel that has values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bert_ds import report
from bert_ds.errors import EXIT_BAD_INPUT, DataError


def step(iteration: int, **values: Any) -> dict[str, Any]:
    return {"iteration": iteration, "lm_loss": 9.0 - iteration / 100, "sop_loss": 0.69, "learning_rate": 1e-4,
            "grad_norm": 1.5, "loss_scale": 1.0, "skipped": 0, "tokens_per_s": 1000.0} | values


def evaluation(iteration: int, **values: Any) -> dict[str, Any]:
    return {"split": "valid", "iteration": iteration, "lm_loss": 9.1 - iteration / 100, "sop_loss": 0.7,
            "lm_accuracy": 0.25, "sop_accuracy": 0.5} | values


@pytest.fixture
def write_run(tmp_path: Path) -> Any:
    def write(name: str, records: list[dict[str, Any]], tail: str = "") -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / report.METRICS_FILE).write_text("".join(json.dumps(record) + "\n" for record in records) + tail)
        return folder

    return write


def test_a_resumed_run_counts_each_step_once_and_a_torn_last_line_not_at_all(write_run: Any) -> None:
    records = [evaluation(0), step(10), step(20, lm_loss=1.0), step(20, lm_loss=8.5), evaluation(20),
               evaluation(20, split="test", lm_loss=0.0)]
    run = report.read_run(write_run("tiny", records, tail='{"iteration": 3'))
    assert run.name == "tiny"
    assert run.training("lm_loss") == [(10, 8.9), (20, 8.5)]
    assert run.validation("lm_loss") == [(0, 9.1), (20, pytest.approx(8.9))]


def test_a_run_is_named_by_its_folder_or_its_file(write_run: Any) -> None:
    folder = write_run("340m", [step(1)])
    assert report.read_run(folder) == report.read_run(folder / report.METRICS_FILE)


def test_values_that_are_not_finite_leave_a_gap(write_run: Any) -> None:
    run = report.read_run(write_run("spike", [step(1), step(2, lm_loss=float("nan")), step(3, lm_loss=None), step(4)]))
    assert [iteration for iteration, _ in run.training("lm_loss")] == [1, 4]


def test_a_broken_line_within_the_file_is_named(write_run: Any) -> None:
    folder = write_run("broken", [step(1)], tail="not json\n" + json.dumps(step(2)) + "\n")
    with pytest.raises(DataError, match=r"metrics\.jsonl:2: is not a JSON object"):
        report.read_run(folder)


@pytest.mark.parametrize("make", [lambda path: path / "absent", lambda path: path], ids=["absent", "empty folder"])
def test_a_run_that_is_not_there_is_refused(tmp_path: Path, make: Any) -> None:
    with pytest.raises(DataError, match=r"holds no metrics\.jsonl"):
        report.read_run(make(tmp_path))


def test_panels_without_values_are_left_out(write_run: Any) -> None:
    without_head = [{key: value for key, value in record.items() if not key.startswith("sop")}
                    for record in (step(1), evaluation(1))]
    titles = [panel.title for panel in report.panels([report.read_run(write_run("lm only", without_head))])]
    assert titles == ["Masked-LM loss, nats", "Validation accuracy", "Learning rate", "Gradient norm",
                      "Tokens per second"]
    scaled = report.read_run(write_run("fp16", [step(1, loss_scale=65536.0)]))
    assert "Loss scale" in [panel.title for panel in report.panels([scaled])]


@pytest.mark.parametrize("suffix, starts_with", [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_the_command_draws_several_runs_and_prints_their_table(
    write_run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str, starts_with: bytes
) -> None:
    runs = [write_run(name, [evaluation(0), step(10), step(20), evaluation(20)]) for name in ("a", "b")]
    picture = tmp_path / "made" / f"loss.{suffix}"
    assert report.main([*map(str, runs), "--output", str(picture)]) == 0
    assert picture.read_bytes().startswith(starts_with)
    assert list(picture.parent.iterdir()) == [picture]
    first_row = capsys.readouterr().out.splitlines()[1].split()
    assert first_row == ["a", "20", "8.8000", "9.1000", "8.9000", "25.0%", "50.0%", "1,000", "0"]


def test_a_format_that_cannot_be_drawn_is_refused(
    write_run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report.main([str(write_run("run", [step(1)])), "--output", str(tmp_path / "loss.txt")]) == EXIT_BAD_INPUT
    assert "loss.txt: is not a picture format that can be written. Fix: end the name in .png" in capsys.readouterr().err
