"""The demonstration's steps run once, resume and report failures; the whole path runs in the long tier."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bert_ds.cli.resolve import resolve_run
from bert_ds.demo import path
from bert_ds.demo.files import DemoFiles
from bert_ds.demo.held_out import hide, sentences_to_fill
from bert_ds.demo.outcome import Outcome
from bert_ds.demo.steps import Step, StepError, Steps

ROOT = Path(__file__).resolve().parent.parent
MakeStep = Callable[..., Step]


@pytest.fixture
def make_step(tmp_path: Path) -> MakeStep:
    """Makes steps that append a line to their output, or run other Python code."""

    def make(name: str, *, code: str | None = None, text: str = "ran", **settings: object) -> Step:
        output = tmp_path / name
        append = f"open({str(output)!r}, 'a').write('{text}\\n')"
        return Step(name, "for a test", (sys.executable, "-c", code or append), outputs=(output,),
                    **settings)  # type: ignore[arg-type]

    return make


def run_all(folder: Path, *steps: Step, limit_s: float = 30) -> None:
    runner = Steps(folder, total=len(steps), limit_s=limit_s)
    for step in steps:
        runner.run(step)


def lines(file: Path) -> list[str]:
    return file.read_text().splitlines()


def test_finished_steps_are_not_run_again(
    make_step: MakeStep, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for_the_eyes = Step("look", "always runs", (sys.executable, "-c", "print('looked')"))
    run_all(tmp_path, make_step("a"), for_the_eyes)
    run_all(tmp_path, make_step("a"), for_the_eyes)
    assert lines(tmp_path / "a") == ["ran"]
    assert capfd.readouterr().out.splitlines().count("looked") == 2


def test_a_changed_step_and_all_after_it_start_from_nothing(make_step: MakeStep, tmp_path: Path) -> None:
    source = tmp_path / "recipe"
    source.write_text("before")
    first, second = make_step("a", sources=(source,)), make_step("b", resumes=True)
    run_all(tmp_path, first, second)
    source.write_text("after")
    run_all(tmp_path, first, second)
    assert lines(tmp_path / "a") == lines(tmp_path / "b") == ["ran"]
    (tmp_path / "b").unlink()
    run_all(tmp_path, make_step("a", text="other"), second)
    assert lines(tmp_path / "a") == ["other"]
    assert lines(tmp_path / "b") == ["ran"]


@pytest.mark.parametrize("resumes, left", [(True, ["begun", "begun"]), (False, ["begun"])])
def test_a_failed_step_ends_the_path_and_resumes_if_it_can(
    make_step: MakeStep, tmp_path: Path, resumes: bool, left: list[str]
) -> None:
    output = tmp_path / "train"
    failing = make_step("train", code=f"open({str(output)!r}, 'a').write('begun\\n'); exit(3)", resumes=resumes)
    for _ in range(2):
        with pytest.raises(StepError, match="train failed with exit code 3") as failure:
            run_all(tmp_path, failing)
        assert failure.value.code == 3
    assert lines(output) == left


def test_a_step_that_runs_too_long_is_ended(make_step: MakeStep, tmp_path: Path) -> None:
    with pytest.raises(StepError) as failure:
        run_all(tmp_path, make_step("slow", code="import time; time.sleep(60)"), limit_s=0.5)
    assert failure.value.code == 128 + signal.SIGTERM


def test_a_signal_waits_for_the_step_to_save(tmp_path: Path) -> None:
    saving = ("import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.5), print('saved', "
              "flush=True), sys.exit(143))); print('ready', flush=True); time.sleep(60)")
    demo = ("import sys; from pathlib import Path; from bert_ds.demo.steps import *\n"
            f"try: Steps(Path({str(tmp_path)!r}), total=1, limit_s=60).run(Step('s', '', (sys.executable, '-c', "
            f"{saving!r})))\nexcept StepError as error: print(error); sys.exit(error.code)")
    process = subprocess.Popen([sys.executable, "-c", demo], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    while process.stdout.readline() != "ready\n":
        assert process.poll() is None
    process.terminate()
    output, _ = process.communicate(timeout=30)
    assert output.splitlines() == ["saved", "s was stopped; the same command goes on from there"]
    assert process.returncode == 128 + signal.SIGTERM


def test_hidden_words_cut_the_sentence_into_equal_parts() -> None:
    vocabulary = {"the", "list", "of", "names", "is", "empty", "here"}
    assert hide("The list of names is, empty here".split(), vocabulary, 2) == "The list [of] names is, [empty] here."
    assert hide("The unknown words".split(), vocabulary, 1) is None


def test_sentences_are_plain_prose_and_one_a_document(tmp_path: Path) -> None:
    documents = [
        "See `x`. Return the number of the words in the list. Return the number of the lines in the list.",
        "Too short. No full stop in this rather long line of words here",
        "The NUMBER of the words in the list is here. It is a list of the words in the number.",
    ]
    file = tmp_path / "held_out.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    vocabulary = "return the number of words in list it is a".split()
    assert sentences_to_fill(file, vocabulary, sentences=3, hidden=1) == [
        "Return the number of [the] words in the list.", "It is a list of [the] words in the number."]


@pytest.mark.parametrize("gpus, ranks", [(1, 1), (2, 2), (3, 2), (8, 8)])
def test_gpus_share_the_global_batch(tmp_path: Path, gpus: int, ranks: int) -> None:
    step, used = path.pretrain(DemoFiles(tmp_path), gpus)
    assert used == ranks and (step.launcher[-2:] == ("--num_gpus", str(ranks))) == (ranks != gpus)
    engine = resolve_run(step.command[1:], world_size=ranks).config.engine
    assert engine.micro_batch_size * ranks * engine.accumulation(ranks) == engine.global_batch_size


def test_learning_means_two_nats_and_more_than_the_commonest_token() -> None:
    def result(loss: float, accuracy: float) -> Outcome:
        return Outcome(9.0, loss, accuracy, 0.6, ".", 0.05)

    assert result(6.9, 0.2).has_learned
    assert not result(7.1, 0.2).has_learned
    assert not result(6.9, 0.05).has_learned
    assert 'masked tokens right   20.0%; always guessing the commonest, ".", gives 5.0%' in str(result(6.9, 0.2))


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_whole_path_learns_exports_and_is_not_run_twice(tmp_path: Path) -> None:
    def demonstrate() -> tuple[str, float]:
        started = time.monotonic()
        done = subprocess.run([sys.executable, "-m", "bert_ds.demo", "--work-dir", str(tmp_path / "demo")], cwd=ROOT,
                              env=os.environ | {"DS_ACCELERATOR": "cpu"}, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout, time.monotonic() - started

    output, _ = demonstrate()
    assert "nats less" in output and "Try next" in output
    files = DemoFiles(tmp_path / "demo")
    assert files.picture.read_bytes().startswith(b"\x89PNG") and (files.model / "model.safetensors").exists()
    again, seconds = demonstrate()
    assert again.count("--- finished before") == 6 and seconds < 90
    assert again.partition("On text that was held out")[2] == output.partition("On text that was held out")[2]
