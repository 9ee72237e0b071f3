"""The report reads what a run logged, resumed and torn files included, and draws every panel that has values."""

from __future__ import annotations

import json
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from bert_ds import report
from bert_ds.errors import EXIT_BAD_INPUT, DataError
from bert_ds.reporting import panels
from bert_ds.reporting.page import page_data
from bert_ds.reporting.runs import METRICS_FILE, read_run


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
        (folder / METRICS_FILE).write_text("".join(json.dumps(record) + "\n" for record in records) + tail)
        return folder

    return write


def test_a_resumed_run_counts_each_step_once_and_a_torn_last_line_not_at_all(write_run: Any) -> None:
    records = [evaluation(0), step(10), step(20, lm_loss=1.0), step(20, lm_loss=8.5), evaluation(20),
               evaluation(20, split="test", lm_loss=0.0)]
    run = read_run(write_run("tiny", records, tail='{"iteration": 3'))
    assert run.name == "tiny"
    assert run.training("lm_loss") == [(10, 8.9), (20, 8.5)]
    assert run.validation("lm_loss") == [(0, 9.1), (20, pytest.approx(8.9))]


def test_a_run_is_named_by_its_folder_or_its_file(write_run: Any) -> None:
    folder = write_run("340m", [step(1)])
    assert read_run(folder) == read_run(folder / METRICS_FILE)


def test_what_a_restart_left_behind_does_not_count(write_run: Any) -> None:
    abandoned = [step(20, lm_loss=1.0), step(30, lm_loss=1.0), evaluation(30, lm_loss=1.0), step(40, lm_loss=1.0)]
    run = read_run(write_run("resumed", [step(10), evaluation(10), *abandoned, step(20), evaluation(20)]))
    assert run.training("lm_loss") == [(10, 8.9), (20, 8.8)]
    assert [at for at, _ in run.validation("lm_loss")] == [10, 20]
    assert run.restarts == [10]


def test_values_that_are_not_finite_are_gaps_and_named(write_run: Any) -> None:
    bad = {"lm_loss": float("nan"), "grad_norm": float("inf")}
    run = read_run(write_run("spike", [step(1), step(2, **bad), step(3, **bad), step(4, lm_loss=None), step(5)]))
    [shown] = page_data([run])["runs"]
    assert shown["train"]["values"]["lm_loss"] == [8.99, None, None, False, 8.95]
    assert shown["notFinite"] == ["training masked-lm loss: NaN 2 times from iteration 2 to 3",
                                  "training gradient norm: infinity 2 times from iteration 2 to 3"]


def test_settings_that_differ_are_told_and_no_others(write_run: Any) -> None:
    folders = [write_run(name, [step(1)]) for name in ("a", "b", "old")]
    for folder, rate in zip(folders[:2], (1e-4, 2e-4), strict=True):
        settings = {"model": {"num_layers": 2}, "engine": {"lr": rate, "betas": [0.9, 0.98]}}
        (folder / "settings.json").write_text(json.dumps(settings))
    data = page_data([read_run(folder) for folder in folders])
    assert data["settings"] == [["engine.lr", "0.0001", "0.0002", "-"]] and data["withoutSettings"] == ["old"]


class Loaded(HTMLParser):
    """Collects what a page would load, and the text of its scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.scripts: list[str] = []
        self.inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.inside = tag == "script"
        self.loads += [str(value) for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.scripts.append(data)
            self.inside = False


def test_the_page_is_whole_in_itself_whatever_a_run_is_called(write_run: Any, tmp_path: Path) -> None:
    name = "<script>alert(1)<"
    run = write_run(name, [step(1), step(2)])
    other = write_run("b", [step(1)])
    output = tmp_path / "made" / "report.html"
    assert report.main([str(run), str(other), "--output", str(output)]) == 0
    assert [path.name for path in output.parent.iterdir()] == ["report.html"]
    page = Loaded()
    page.feed(output.read_text(encoding="utf-8"))
    assert page.loads == [] and "https:" not in output.read_text(encoding="utf-8")
    data, script = page.scripts
    assert json.loads(data)["runs"][0]["name"] == name and "drawAll();" in script


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node to read the script")
def test_the_script_of_the_page_can_be_read() -> None:
    script = Path(report.__file__).parent / "reporting" / "page.js"
    subprocess.run(["node", "--check", str(script)], check=True)


def test_a_broken_line_within_the_file_is_named(write_run: Any) -> None:
    folder = write_run("broken", [step(1)], tail="not json\n" + json.dumps(step(2)) + "\n")
    with pytest.raises(DataError, match=r"metrics\.jsonl:2: is not a JSON object"):
        read_run(folder)


@pytest.mark.parametrize("make", [lambda path: path / "absent", lambda path: path], ids=["absent", "empty folder"])
def test_a_run_that_is_not_there_is_refused(tmp_path: Path, make: Any) -> None:
    with pytest.raises(DataError, match=r"holds no metrics\.jsonl"):
        read_run(make(tmp_path))


def test_panels_without_values_are_left_out(write_run: Any) -> None:
    without_head = [{key: value for key, value in record.items() if not key.startswith("sop")}
                    for record in (step(1), evaluation(1))]
    titles = [panel.title for panel in panels.shown_panels([read_run(write_run("lm only", without_head))])]
    assert titles == ["Masked-LM loss, nats", "Masked-token accuracy", "Learning rate", "Gradient norm",
                      "Tokens per second"]
    scaled = read_run(write_run("fp16", [step(1, loss_scale=65536.0)]))
    assert "Loss scale" in [panel.title for panel in panels.shown_panels([scaled])]


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
