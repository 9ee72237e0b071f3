"""Fine-tunes an exported model to classify texts, or pairs of texts, with several seeds.

    python recipes/finetune_classifier.py exports/110m classifiers/cola --train CoLA/train.tsv --valid CoLA/dev.tsv \\
        --text-columns 4 --label-column 2 --metric matthews --seeds 1 2 3

MODEL comes from `python -m bert_ds.convert to-hf`. OUT becomes the best model of all seeds and epochs, which
transformers' AutoModelForSequenceClassification opens, with results.json beside it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # For a checkout that is not installed.
    sys.path.append(str(Path(__file__).resolve().parent.parent))

import torch

from bert_ds.cli.command_parser import CommandParser
from bert_ds.convert.exported_model import open_export
from bert_ds.data.atomic_file import atomic_text_file
from bert_ds.errors import EXIT_DONE, ConfigError, Problem, raise_if_any, run_command
from finetuning.class_scores import METRICS, Scores, confusion_matrix, scores
from finetuning.labelled_texts import FORMATS, HEADERS, Columns, Example, labels_of, read_examples, require_known_labels
from finetuning.model_folders import add_model_folders, check_model_folders, save_model
from finetuning.progress import Progress
from finetuning.training import Row, TrainingSettings, add_training_flags, predict, train

RESULTS_FILE = "results.json"
_MAX_LENGTH = 128
_SEED_OF_SPLIT = 0


@dataclass(frozen=True)
class Texts:
    """The examples of each split: `train`, `valid` and, where there is one, `test`; and the labels in order."""

    splits: Mapping[str, Sequence[Example]]
    labels: Sequence[str]


@dataclass(frozen=True)
class SeedResult:
    """The best epoch of one seed."""

    seed: int
    epoch: int
    scores: Mapping[str, Scores]
    """Of each split but `train`."""
    seconds: float
    """Of the seed, evaluations included."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    return run_command(lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    options = _parser().parse_command(argv)
    raise_if_any(ConfigError, _problems(options))
    settings = TrainingSettings.from_options(options)
    check_model_folders(options)
    texts = _read_texts(options)
    positive = _positive_class(options.positive_label, texts.labels)
    print(", ".join(f"{len(examples):,} examples to {split}" for split, examples in texts.splits.items())
          + f"; {len(texts.labels)} labels; {settings.precision} on {settings.device}", flush=True)
    job = _Job(options=options, settings=settings, texts=texts, positive=positive)
    results = [job.run_seed(seed) for seed in options.seeds]
    with atomic_text_file(options.out / RESULTS_FILE) as file:
        json.dump(_as_dict(results, texts, options), file, indent=2)
    print(describe(results, positive_label=texts.labels[positive] if len(texts.labels) == 2 else None))
    print(f"{options.out} holds the model of seed {job.best_seed}, the best by {options.metric}")
    return EXIT_DONE


class _Job:
    """All seeds of one command; keeps the best model of them in the output folder."""

    def __init__(self, *, options: argparse.Namespace, settings: TrainingSettings, texts: Texts,
                 positive: int) -> None:
        self._options, self._settings, self._texts, self._positive = options, settings, texts, positive
        self._best: float | None = None
        self.best_seed: int | None = None

    def run_seed(self, seed: int) -> SeedResult:
        """Trains one model from `seed`, which draws its head, its dropout and the order of its rows."""
        started, texts, metric = time.monotonic(), self._texts, self._options.metric
        torch.manual_seed(seed)
        names = dict(enumerate(texts.labels))
        tokenizer, model = open_export(self._options.model, "AutoModelForSequenceClassification", new_head=True,
                                       num_labels=len(names), id2label=names,
                                       label2id={name: number for number, name in names.items()})
        rows = {split: encode(tokenizer, examples, texts.labels, max_length=self._max_length(model))
                for split, examples in texts.splits.items()}
        model.to(self._settings.device)
        progress = Progress(f"seed {seed}", rows=len(rows["train"]), epochs=self._settings.epochs)
        best: SeedResult | None = None
        for epoch in train(model, tokenizer, rows["train"], self._settings, seed=seed, progress=progress):
            valid = self._evaluate(model, tokenizer, rows["valid"])
            print(f"seed {seed}: epoch {epoch}/{self._settings.epochs} done | loss {progress.mean_loss_of_epoch():.4f}"
                  f" | valid {_shown(valid)}", flush=True)
            if best is None or getattr(valid, metric) > getattr(best.scores["valid"], metric):
                found = {"valid": valid}
                if "test" in rows:
                    found["test"] = self._evaluate(model, tokenizer, rows["test"])
                best = SeedResult(seed, epoch, found, 0.0)
                self._keep_if_best(seed, getattr(valid, metric), model, tokenizer)
        assert best is not None
        return SeedResult(seed, best.epoch, best.scores, time.monotonic() - started)

    def _max_length(self, model: Any) -> int:
        longest = int(model.config.max_position_embeddings)
        if self._options.max_length is None:
            return min(_MAX_LENGTH, longest)
        if self._options.max_length > longest:
            raise ConfigError.of("--max-length", self._options.max_length, f"is more than the model's {longest} "
                                 "positions", f"use {longest} or less")
        return int(self._options.max_length)

    def _evaluate(self, model: Any, tokenizer: Any, rows: Sequence[Row]) -> Scores:
        predicted = [0] * len(rows)
        for numbers, output in predict(model, tokenizer, rows, self._settings):
            for number, label in zip(numbers, output.logits.argmax(dim=-1).tolist(), strict=True):
                predicted[number] = label
        matrix = confusion_matrix([row["labels"] for row in rows], predicted, len(self._texts.labels))
        return scores(matrix, positive=self._positive)

    def _keep_if_best(self, seed: int, value: float, model: Any, tokenizer: Any) -> None:
        if self._best is not None and value <= self._best:
            return
        save_model(model, tokenizer, self._options, is_first=self._best is None)
        self._best, self.best_seed = value, seed


def encode(tokenizer: Any, examples: Sequence[Example], labels: Sequence[str], *, max_length: int) -> list[Row]:
    """Token ids and label number of each example; of a pair that is too long, the longer text is cut first."""
    number_of = {label: number for number, label in enumerate(labels)}
    columns = [list(texts) for texts in zip(*(example.texts for example in examples), strict=True)]
    encoded = tokenizer(*columns, truncation=True, max_length=max_length)
    return [{**{name: values[i] for name, values in encoded.items()}, "labels": number_of[example.label]}
            for i, example in enumerate(examples)]


def hold_out(examples: Sequence[Example], share: float) -> tuple[list[Example], list[Example]]:
    """Splits off `share` of the examples, at least one, drawn the same way in every run; returns the rest and them."""
    order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(_SEED_OF_SPLIT)).tolist()
    count = max(1, round(share * len(examples)))
    return [examples[i] for i in sorted(order[count:])], [examples[i] for i in sorted(order[:count])]


def describe(results: Sequence[SeedResult], *, positive_label: str | None) -> str:
    """The table of all seeds with means and, from two seeds on, sample standard deviations, in per cent.

    positive_label: whose F1 it is; None for the mean over classes.
    """
    splits = list(results[0].scores)
    head = ["seed", "epoch", *(f"{split} {metric}" for split in splits for metric in METRICS), "seconds"]
    table = [head]
    columns = [[100 * getattr(result.scores[split], metric) for result in results]
               for split in splits for metric in METRICS]
    for i, result in enumerate(results):
        table.append([str(result.seed), str(result.epoch), *(f"{column[i]:.2f}" for column in columns),
                      f"{result.seconds:.0f}"])
    table.append(["mean", "", *(f"{statistics.mean(column):.2f}" for column in columns), ""])
    if len(results) > 1:
        table.append(["spread", "", *(f"{statistics.stdev(column):.2f}" for column in columns), ""])
    widths = [max(len(row[i]) for row in table) for i in range(len(head))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    f1 = "f1: mean over classes" if positive_label is None else f"f1: of label {positive_label!r}"
    spread = "; spread: sample standard deviation" if len(results) > 1 else ""
    return "\n".join([*lines, f"({f1}; all in per cent{spread})"])


def _read_texts(options: argparse.Namespace) -> Texts:
    columns = Columns(texts=tuple(options.text_columns or ()), label=options.label_column, header=options.header)
    files = {split: path for split in ("train", "valid", "test") if (path := getattr(options, split)) is not None}
    train_examples = read_examples(options.train, columns, options.format)
    labels = labels_of(train_examples, options.train)
    splits = {split: train_examples if split == "train" else read_examples(path, columns, options.format, labels)
              for split, path in files.items()}
    if "valid" not in splits:
        train_part, valid_part = hold_out(train_examples, options.valid_share)
        splits = {**splits, "train": train_part, "valid": valid_part}
        print(f"no --valid: {options.valid_share:.0%} of {options.train} are held out", flush=True)
    for split, examples in splits.items():
        require_known_labels(examples, labels, files.get(split, options.train))
    return Texts(splits, labels)


def _positive_class(label: str | None, labels: Sequence[str]) -> int:
    if label is None:
        return len(labels) - 1
    if label not in labels:
        raise ConfigError.of("--positive-label", label, f"is none of the labels {', '.join(labels[:10])}",
                             "give one of them")
    return labels.index(label)


def _problems(options: argparse.Namespace) -> list[Problem]:
    problems = []
    if options.epochs < 1:
        problems.append(Problem("--epochs", options.epochs, "must be at least 1", "use 3"))
    if len(set(options.seeds)) < len(options.seeds):
        problems.append(Problem("--seeds", " ".join(map(str, options.seeds)), "repeats a seed", "give each once"))
    if options.text_columns is not None and len(options.text_columns) > 2:
        problems.append(Problem("--text-columns", " ".join(options.text_columns), "are more than two columns",
                                "give the one or two columns of the texts"))
    if not 0 < options.valid_share < 1:
        problems.append(Problem("--valid-share", options.valid_share, "is not a share between 0 and 1", "use 0.1"))
    if options.max_length is not None and options.max_length < 5:
        problems.append(Problem("--max-length", options.max_length, "leaves no room for text", "use 128"))
    return problems


def _shown(found: Scores) -> str:
    return ", ".join(f"{metric} {getattr(found, metric):.2%}" for metric in METRICS)


def _as_dict(results: Sequence[SeedResult], texts: Texts, options: argparse.Namespace) -> dict[str, Any]:
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    return {"settings": settings, "labels": list(texts.labels),
            "examples": {split: len(examples) for split, examples in texts.splits.items()},
            "seeds": [asdict(result) for result in results]}


def _parser() -> CommandParser:
    parser = CommandParser(prog="finetune_classifier.py",
                           description="Fine-tunes an exported model to classify texts or pairs of texts.")
    add_model_folders(parser, makes="the best model and results.json")
    files = parser.add_argument_group("data")
    files.add_argument("--train", type=Path, required=True, metavar="FILE",
                       help="tab-separated, CSV or JSON lines; one example a row")
    files.add_argument("--valid", type=Path, metavar="FILE", help="chooses the best epoch and seed")
    files.add_argument("--valid-share", type=float, default=0.1, metavar="X",
                       help="share of --train that is held out where --valid is not given (default: %(default)s)")
    files.add_argument("--test", type=Path, metavar="FILE", help="scored with the epoch that --valid has chosen")
    files.add_argument("--text-columns", nargs="+", metavar="COLUMN",
                       help="one or two: names in the first row or JSON keys, or, without a header, numbers counted "
                            "from 1 (default: GLUE's names)")
    files.add_argument("--label-column", metavar="COLUMN", help="written in the same way")
    files.add_argument("--header", choices=HEADERS, default="auto",
                       help="whether the first row names the columns; auto finds out and says so")
    files.add_argument("--format", choices=("auto", *dict.fromkeys(FORMATS.values())), default="auto",
                       help="of all files; auto goes by the name")
    files.add_argument("--max-length", type=int, metavar="N",
                       help="tokens of a row, special ones included; longer texts are cut (default: "
                            f"{_MAX_LENGTH}, or the model's positions where it has fewer)")
    files.add_argument("--positive-label", metavar="LABEL",
                       help="whose F1 is told where there are two (default: the last)")
    add_training_flags(parser, epochs=3, batch_size=32, learning_rate=3e-5)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], metavar="N", help="one model each (default: 1)")
    parser.add_argument("--metric", choices=METRICS, default="accuracy",
                        help="chooses the best epoch and seed (default: %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
