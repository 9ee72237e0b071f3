"""The whole path once, on text that every machine has: gather, tokenise, pretrain, export, guess words, draw.

    python -m bert_ds.demo --work-dir demo

A finished step is not run again while its command and what it builds on stay the same; an interrupted training goes on
from its last checkpoint.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bert_ds.cli.command_parser import CommandParser
from bert_ds.data.vocabulary import Vocabulary
from bert_ds.demo import path
from bert_ds.demo.files import DemoFiles
from bert_ds.demo.held_out import sentences_to_fill
from bert_ds.demo.outcome import NATS_TO_LEARN, outcome
from bert_ds.demo.steps import StepError, Steps, short_path
from bert_ds.errors import EXIT_DONE, ConfigError, run_command
from bert_ds.reporting.runs import read_run

EXIT_NOT_LEARNED = 1


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    return run_command(lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    parser = CommandParser(prog="python -m bert_ds.demo",
                           description="From text that every machine has to a Hugging Face model, in a few minutes.")
    parser.add_argument("--work-dir", type=Path, default=Path("demo"), metavar="DIR",
                        help="where everything is written")
    parser.add_argument("--minutes-limit", type=float, default=30, metavar="N", help="longest time for one step")
    options = parser.parse_command(argv)
    if options.minutes_limit <= 0:
        raise ConfigError.of("--minutes-limit", options.minutes_limit, "must be above 0", "use 30")
    try:
        return _demonstrate(DemoFiles(options.work_dir), options.minutes_limit * 60)
    except StepError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.code


def _demonstrate(files: DemoFiles, limit_s: float) -> int:
    started = time.monotonic()
    steps = Steps(files.work_dir, total=7, limit_s=limit_s)
    steps.run(path.gather_text(files))
    steps.run(path.build_vocab(files))
    steps.run(path.preprocess_data(files))
    training, ranks = path.pretrain(files, _count_gpus())
    steps.run(training)
    steps.run(path.export(files))
    vocabulary = set(Vocabulary.from_file(str(files.vocabulary)).tokens)
    steps.run(path.fill_mask(files, sentences_to_fill(files.held_out, vocabulary, sentences=3, hidden=3)))
    steps.run(path.report(files))

    result = outcome(read_run(files.run), training.command[1:], world_size=ranks)
    minutes, seconds = divmod(round(time.monotonic() - started), 60)
    print(f"\n=== done in {minutes} min {seconds} s\n\n{result}\n\n{_where_things_lie(files)}", flush=True)
    if result.has_learned:
        return EXIT_DONE
    print(f"error: the model has not learned enough: the loss should fall by {NATS_TO_LEARN} nats, and the accuracy "
          "should be above that of the commonest token", file=sys.stderr)
    return EXIT_NOT_LEARNED


def _where_things_lie(files: DemoFiles) -> str:
    python = short_path(sys.executable)
    return "\n".join([
        "Where things lie",
        f"  text                  {files.text}",
        f"  vocabulary            {files.vocabulary}",
        f"  training data         {files.data_prefix}.bin, .idx",
        f"  checkpoints           {files.checkpoints}",
        f"  TensorBoard, metrics  {files.run}",
        f"  Hugging Face model    {files.model}",
        f"  loss curve            {files.picture}",
        "",
        "Try next",
        f'  {python} -m bert_ds.fill_mask {files.model} --text "Return the [number] of items in the [list]."',
    ])


def _count_gpus() -> int:
    """GPUs that training uses; none when DS_ACCELERATOR=cpu says so."""
    import torch  # noqa: PLC0415 - seconds that an error before this point should not take

    return 0 if os.environ.get("DS_ACCELERATOR") == "cpu" else torch.cuda.device_count()


if __name__ == "__main__":
    sys.exit(main())
