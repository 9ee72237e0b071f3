"""The whole path once, on text that every machine has: gather, tokenise, pretrain, export, guess words, draw.

    python -m bert_ds.demo --work-dir demo

Each step is a command that can be typed as it is printed. A finished step is not run again while its command and what
it builds on stay the same; an interrupted training goes on from its last checkpoint.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from bert_ds.cli.command_parser import CommandParser
from bert_ds.cli.resolve import resolve_run
from bert_ds.cli.shipped_files import PACKAGE, display, find_file
from bert_ds.data.atomic_file import atomic_text_file
from bert_ds.data.bert_dataset import build_datasets
from bert_ds.data.commonest_label import commonest_label
from bert_ds.data.sentences import sentence_splitter
from bert_ds.data.text_sources import BadRecords, TextSources
from bert_ds.data.vocabulary import Vocabulary
from bert_ds.errors import EXIT_DONE, ConfigError, run_command
from bert_ds.fill_mask import MASK
from bert_ds.report import Run, read_run

EXIT_NOT_LEARNED = 1
VOCABULARY_SIZE = 8192
TEXT_MB = 6
NATS_TO_LEARN = 2.0
"""How far the validation loss has to fall for the demonstration to count as a success."""
DEFAULT_MASTER_PORT = 29500  # of DeepSpeed's launcher
_STAMPS = ".steps"


@dataclass(frozen=True)
class Step:
    """One command of the path."""

    name: str
    purpose: str
    command: tuple[str, ...]
    outputs: tuple[Path, ...] = ()
    """What it leaves behind. A step without outputs is for the eyes and always runs."""
    sources: tuple[Path, ...] = ()
    """Files outside the work folder that decide what it does."""
    environment: Mapping[str, str] = field(default_factory=dict)
    launcher: tuple[str, ...] = ()
    """Words in front of the command that decide nothing about its result."""
    resumes: bool = False
    """Whether it goes on from what an interrupted run of the same command left."""

    @property
    def words(self) -> tuple[str, ...]:
        return (*self.launcher, *self.command)


class StepFailed(Exception):
    """A step ended with a non-zero exit code; it has said why itself."""

    def __init__(self, step: Step, code: int) -> None:
        super().__init__(f"the step '{step.name}' failed with exit code {code}; its message stands above")
        self.code = code


class Steps:
    """Runs steps one after another and remembers in the work folder which are finished."""

    def __init__(self, work_dir: Path, *, total: int, limit_s: float) -> None:
        self._stamps = work_dir / _STAMPS
        self._total = total
        self._limit_s = limit_s
        self._number = 0
        self._key = ""

    def run(self, step: Step) -> None:
        """Runs the step unless it is finished already.

        Raises:
            StepFailed: the command failed, or ran longer than the limit.
        """
        self._number += 1
        self._key = self._key_of(step)
        stamp = self._stamps / f"{step.name}.json"
        before = _read_stamp(stamp)
        print(f"\n=== {self._number}/{self._total} {step.name}: {step.purpose}")
        print(shown_command(step))
        if before == {"key": self._key, "finished": True} and step.outputs and all(
                path.exists() for path in step.outputs):
            print("--- finished before, nothing to do", flush=True)
            return
        if not (step.resumes and before.get("key") == self._key):
            for path in step.outputs:
                _remove(path)
        _write_stamp(stamp, self._key, finished=False)
        print(flush=True)
        started = time.monotonic()
        code = _run_to_its_end(step, self._limit_s)
        if code == 0 and not all(path.exists() for path in step.outputs):
            missing = next(path for path in step.outputs if not path.exists())
            print(f"error: {step.name} ended well but left no {missing}", file=sys.stderr)
            code = 1
        if code:
            raise StepFailed(step, code)
        _write_stamp(stamp, self._key, finished=True)
        print(f"--- {step.name}: {time.monotonic() - started:.0f} s", flush=True)

    def _key_of(self, step: Step) -> str:
        """Names a step with all that it builds on: its command, the files it reads, and the steps before it."""
        digest = hashlib.sha256(json.dumps([self._key, step.command, sorted(step.environment.items())]).encode())
        for source in step.sources:
            digest.update(source.read_bytes())
        return digest.hexdigest()


def _run_to_its_end(step: Step, limit_s: float) -> int:
    """Exit code of the step's command; a signal that reaches us is passed on, and the command has time to save."""
    process = subprocess.Popen(step.words, env={**os.environ, **step.environment})
    with _passing_on_signals(process):
        try:
            code = process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            print(f"error: {step.name} has run for {limit_s / 60:.0f} minutes and is ended; allow more with "
                  "--minutes-limit", file=sys.stderr, flush=True)
            process.terminate()
            code = process.wait() or -signal.SIGTERM
    return code if code >= 0 else 128 - code


@contextlib.contextmanager
def _passing_on_signals(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """SIGTERM goes to the command; SIGINT of a terminal reaches it anyway. Either way we wait for its end."""

    def pass_on(number: int, frame: FrameType | None) -> None:
        process.send_signal(number)

    previous = {signal.SIGTERM: signal.signal(signal.SIGTERM, pass_on),
                signal.SIGINT: signal.signal(signal.SIGINT, lambda number, frame: None)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _read_stamp(path: Path) -> dict[str, object]:
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        return {}


def _write_stamp(path: Path, key: str, *, finished: bool) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_text_file(str(path)) as file:
        json.dump({"key": key, "finished": finished}, file)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def shown_command(step: Step) -> str:
    """The step's command as one would type it, a flag a line when it is long."""
    words = [*(f"{name}={shlex.quote(value)}" for name, value in step.environment.items()),
             display(Path(step.words[0]).absolute()), *map(shlex.quote, step.words[1:])]
    line = "$ " + " ".join(words)
    return line if len(line) <= 120 else line.replace(" --", " \\\n      --")


# ------------------------------------------------------------------------------------------------- what the steps are


@dataclass(frozen=True)
class Place:
    """Where the demonstration keeps its files."""

    work_dir: Path

    def __truediv__(self, name: str) -> Path:
        return self.work_dir / name

    @property
    def text(self) -> Path:
        return self / "corpus.jsonl"

    @property
    def held_out(self) -> Path:
        return self / "held_out.jsonl"

    @property
    def vocabulary(self) -> Path:
        return self / "vocab.txt"

    @property
    def data_prefix(self) -> Path:
        return self / "corpus_text_sentence"

    @property
    def checkpoints(self) -> Path:
        return self / "checkpoints"

    @property
    def run(self) -> Path:
        return self / "runs" / "tiny"

    @property
    def model(self) -> Path:
        return self / "model"

    @property
    def picture(self) -> Path:
        return self / "loss.png"


def _module(name: str, *arguments: object) -> tuple[str, ...]:
    return (sys.executable, "-m", f"bert_ds.{name}", *map(str, arguments))


def gather_text(place: Place) -> Step:
    return Step("gather-text", "English text that is here already: the documentation of Python and its packages",
                _module("gather_text", "--output", place.text, "--held-out", place.held_out, "--max-mb", TEXT_MB),
                outputs=(place.text, place.held_out))


def build_vocab(place: Place) -> Step:
    return Step("build-vocab", "a vocabulary of words and pieces of words",
                _module("build_vocab", "--input", place.text, "--output", place.vocabulary, "--size", VOCABULARY_SIZE),
                outputs=(place.vocabulary,))


def preprocess_data(place: Place) -> Step:
    prefix = place.data_prefix
    return Step("preprocess-data", "documents cut into sentences, sentences into tokens",
                _module("preprocess_data", "--input", place.text, "--output-prefix", place / "corpus", "--vocab-file",
                        place.vocabulary, "--split-sentences", "--workers", os.cpu_count() or 1),
                outputs=tuple(prefix.with_name(prefix.name + suffix) for suffix in (".bin", ".idx")))


def pretrain(place: Place, gpus: int) -> Step:
    """All GPUs data parallel; without one, two CPU ranks as a pipeline of two stages."""
    config, recipe = _shipped("ds_configs/tiny.json"), _shipped("recipes/tiny.yaml")
    where = "every GPU" if gpus else "two processes, each with half of the layers"
    return Step("pretrain", f"BERT learns to fill in masked words and to tell the order of sentences, on {where}",
                (display(PACKAGE / "pretrain.py"), "--deepspeed_config", display(config),
                 *(() if gpus else ("--pipeline-model-parallel-size", "2")),
                 "--data-path", str(place.data_prefix), "--vocab-file", str(place.vocabulary),
                 "--save", str(place.checkpoints), "--load", str(place.checkpoints),
                 "--tensorboard-dir", str(place.run)),
                outputs=(place.checkpoints, place.run), sources=(config, recipe), resumes=True,
                environment={} if gpus else {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
                launcher=(*_deepspeed(), *_master_port(), *(() if gpus else ("--num_gpus", "2"))))


def export(place: Place) -> Step:
    return Step("convert", "the checkpoint as a Hugging Face model, compared with what transformers computes",
                _module("convert", "to-hf", place.checkpoints, place.model), outputs=(place.model,))


def fill_mask(place: Place) -> Step:
    texts = [word for text in sentences_to_fill(place) for word in ("--text", text)]
    return Step("fill-mask", "Hugging Face transformers loads it and guesses words of sentences it has never seen",
                _module("fill_mask", place.model, *texts))


def draw(place: Place) -> Step:
    return Step("report", "the curves of the training", _module("report", place.run, "--output", place.picture),
                outputs=(place.picture,))


def _shipped(name: str) -> Path:
    found = find_file(name)
    if found is None:
        raise ConfigError.of("bert_ds", name, "is neither beside the package nor in it", "install bert_ds again")
    return found


def _deepspeed() -> tuple[str, ...]:
    """DeepSpeed's launcher: the script of this interpreter, or the module behind it where there is no script."""
    script = Path(sys.executable).with_name("deepspeed")
    return (str(script),) if script.exists() else (sys.executable, "-m", "deepspeed.launcher.runner")


def _master_port() -> tuple[str, ...]:
    """Nothing while the launcher's usual port is free, else another one."""
    for port in (DEFAULT_MASTER_PORT, 0):
        with socket.socket() as candidate, contextlib.suppress(OSError):
            candidate.bind(("", port))
            return ("--master_port", str(candidate.getsockname()[1])) if port == 0 else ()
    return ()


def count_gpus() -> int:
    """GPUs that training will use; none when DS_ACCELERATOR=cpu says so."""
    import torch  # noqa: PLC0415 - slow to import

    return 0 if os.environ.get("DS_ACCELERATOR") == "cpu" else torch.cuda.device_count()


# ----------------------------------------------------------------------------------------------- held-out sentences


def sentences_to_fill(place: Place, count: int = 3, words_hidden: int = 2) -> list[str]:
    """The first held-out sentences that are plain prose, with words in brackets.

    Which words is decided by their place alone: of the words that the vocabulary holds in full, those that cut the
    sentence into equal parts.
    """
    known = set(Vocabulary.from_file(str(place.vocabulary)).tokens)
    split = sentence_splitter("sentencex")
    texts = []
    for document in TextSources([str(place.held_out)]).documents(["text"], BadRecords("stop")):
        for sentence in split(document.texts[0]):
            words = sentence.removesuffix(".").split()
            if not _is_plain_prose(sentence, words):
                continue
            hideable = [i for i, word in enumerate(words) if len(word) > 1 and word.lower() in known]
            if len(hideable) < words_hidden * 2:
                continue
            hidden = {hideable[len(hideable) * part // (words_hidden + 1)] for part in range(1, words_hidden + 1)}
            texts.append(" ".join(f"[{word}]" if i in hidden else word for i, word in enumerate(words)) + ".")
            break  # one sentence a document
        if len(texts) == count:
            break
    return texts or [f"This is a {MASK} of the model."]


def _is_plain_prose(sentence: str, words: Sequence[str]) -> bool:
    is_sentence = sentence[0].isupper() and sentence.endswith(".") and 8 <= len(words) <= 20  # noqa: PLR2004
    return is_sentence and all(word.strip(",").isalpha() for word in words) and not any(
        word.isupper() and len(word) > 1 for word in words)


# ------------------------------------------------------------------------------------------------------- the summary


@dataclass(frozen=True)
class Outcome:
    """What the training reached on the validation set."""

    loss_at_start: float
    loss: float
    lm_accuracy: float
    sop_accuracy: float | None
    commonest_token: str
    commonest_share: float
    """Accuracy of always guessing the commonest masked token."""

    @property
    def has_learned(self) -> bool:
        return self.loss <= self.loss_at_start - NATS_TO_LEARN and self.lm_accuracy > self.commonest_share


def outcome(run: Run, token: str, share: float) -> Outcome:
    """Compares the first and the last evaluation of a run."""
    first, last = run.evaluations[0], run.evaluations[-1]
    return Outcome(first["lm_loss"], last["lm_loss"], last["lm_accuracy"], last["sop_accuracy"], token, share)


def guess_the_commonest(step: Step, vocabulary: Vocabulary) -> tuple[str, float]:
    """The commonest masked token of the samples that the training was evaluated on, and its share."""
    config = resolve_run(step.command[1:], world_size=2).config
    evaluated = config.schedule.eval_iters * config.engine.global_batch_size
    datasets = build_datasets(
        config.data, seq_length=config.model.seq_length, binary_head=config.model.binary_head,
        seed=config.schedule.seed, vocabulary=vocabulary,
        num_samples={"train": config.schedule.train_iters * config.engine.global_batch_size, "valid": evaluated,
                     "test": evaluated})
    token_id, share = commonest_label(datasets.valid[index].masked_labels for index in range(evaluated))
    return vocabulary.tokens[token_id], share


def summary(place: Place, result: Outcome, seconds: float) -> str:
    """The closing words: what was learned, where things lie, what to try next."""
    python = display(Path(sys.executable).absolute())
    order = "-" if result.sop_accuracy is None else f"{result.sop_accuracy:.1%}"
    return f"""
=== Done in {seconds / 60:.0f} min {seconds % 60:.0f} s

Learned, on text held out for validation
  masked-LM loss          {result.loss_at_start:.2f} at the start, {result.loss:.2f} at the end: {
        result.loss_at_start - result.loss:.2f} nats less
  masked tokens right     {result.lm_accuracy:.1%}; always guessing the commonest one, "{
        result.commonest_token}", gives {result.commonest_share:.1%}
  sentence order right    {order}; tossing a coin gives 50 %

Where things lie
  text                    {place.text}
  vocabulary              {place.vocabulary}
  training data           {place.data_prefix}.bin, .idx
  checkpoints             {place.checkpoints}
  TensorBoard, metrics    {place.run}
  Hugging Face model      {place.model}
  loss curve              {place.picture}

Try next
  {python} -m bert_ds.fill_mask {place.model} --text "Return the [number] of items in the [list]."
"""


def demonstrate(work_dir: Path, limit_s: float) -> int:
    """Runs all steps; returns the exit code."""
    started = time.monotonic()
    place = Place(work_dir)
    steps = Steps(work_dir, total=7, limit_s=limit_s)
    for make in (gather_text, build_vocab, preprocess_data):
        steps.run(make(place))
    training = pretrain(place, count_gpus())
    for step in (training, export(place)):
        steps.run(step)
    for make in (fill_mask, draw):
        steps.run(make(place))
    vocabulary = Vocabulary.from_file(str(place.vocabulary))
    result = outcome(read_run(place.run), *guess_the_commonest(training, vocabulary))
    print(summary(place, result, time.monotonic() - started), flush=True)
    if result.has_learned:
        return EXIT_DONE
    print(f"error: the model has not learned enough: the loss should fall by {NATS_TO_LEARN} nats and the accuracy "
          "should be above that of the commonest token", file=sys.stderr)
    return EXIT_NOT_LEARNED


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    return run_command(lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    parser = CommandParser(prog="python -m bert_ds.demo",
                           description="From text that every machine has to a Hugging Face model, in some minutes.")
    parser.add_argument("--work-dir", type=Path, default=Path("demo"), metavar="DIR", help="where everything is written")
    parser.add_argument("--minutes-limit", type=float, default=30, metavar="N", help="longest time for one step")
    options = parser.parse_command(argv)
    if options.minutes_limit <= 0:
        raise ConfigError.of("--minutes-limit", options.minutes_limit, "must be above 0", "use 30")
    try:
        return demonstrate(options.work_dir, options.minutes_limit * 60)
    except StepFailed as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.code


if __name__ == "__main__":
    sys.exit(main())
