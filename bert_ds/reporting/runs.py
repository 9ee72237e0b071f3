"""What a run logged, over all its starts.

A run is a TensorBoard folder of `pretrain`, or its `metrics.jsonl`: one JSON object a logged step, and one with `split`
an evaluation. Beside it, `settings.json` holds the configuration of the last start.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from bert_ds.errors import DataError

METRICS_FILE = "metrics.jsonl"
SETTINGS_FILE = "settings.json"
Point = tuple[int, float]
Part = Literal["train", "valid"]


@dataclass(frozen=True)
class Run:
    """What one run logged, each list in the order of the iterations."""

    name: str
    steps: list[dict[str, Any]]
    """Means over the log interval that ends at `iteration`."""
    evaluations: list[dict[str, Any]]
    """Evaluations on the validation set, taken after `iteration` updates."""
    restarts: list[int] = field(default_factory=list)
    """Iterations from which a later start, or a rewind, went on; what had been logged beyond them does not count."""
    settings: dict[str, Any] = field(default_factory=dict)
    """The configuration by dotted name; empty where none was written."""

    def records(self, part: Part) -> list[dict[str, Any]]:
        return self.steps if part == "train" else self.evaluations

    def training(self, key: str) -> list[Point]:
        return _points(self.steps, key)

    def validation(self, key: str) -> list[Point]:
        return _points(self.evaluations, key)


def _points(records: list[dict[str, Any]], key: str) -> list[Point]:
    """The values of `key` that were logged; NaN and infinity as such."""
    return [(record["iteration"], float(record[key])) for record in records if record.get(key) is not None]


def is_drawable(points: list[Point]) -> bool:
    """Whether there is a finite value."""
    return any(math.isfinite(value) for _, value in points)


def read_run(path: Path) -> Run:
    """Reads a run's metrics; a torn last line does not count.

    Raises:
        DataError: there is no such file, it holds no step, or a line within it is broken.
    """
    file = path / METRICS_FILE if path.is_dir() else path
    if not file.is_file():
        raise DataError.of("RUN", path, f"holds no {METRICS_FILE}", "give the --tensorboard-dir of a run")
    steps, evaluations, restarts = _joined(_records(file))
    if not steps and not evaluations:
        raise DataError.of("RUN", path, f"{METRICS_FILE} holds no logged step yet", "wait for the first log line")
    name = file.parent.resolve().name if file.name == METRICS_FILE else file.stem
    return Run(name, steps, evaluations, restarts, _settings(file.with_name(SETTINGS_FILE)))


def _joined(records: Iterator[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[int]]:
    """Steps, evaluations and restarts. A record that goes back in time takes the place of all from there on."""
    steps: list[dict[str, Any]] = []
    evaluations: list[dict[str, Any]] = []
    restarts: list[int] = []
    for record in records:
        here = record["iteration"]
        is_step = "split" not in record
        # An evaluation follows the step of its iteration.
        kept_steps = _before(steps, here if is_step else here + 1)
        kept_evaluations = _before(evaluations, here if is_step else here + 1)
        if len(kept_steps) < len(steps):
            restarts = [*(at for at in restarts if at < here), kept_steps[-1]["iteration"] if kept_steps else 0]
        steps, evaluations = kept_steps, kept_evaluations
        if is_step:
            steps.append(record)
        elif record["split"] == "valid":
            evaluations = [*_before(evaluations, here), record]
    return steps, evaluations, sorted(set(restarts))


def _before(records: list[dict[str, Any]], iteration: int) -> list[dict[str, Any]]:
    """The records below an iteration; the same list where that is all."""
    count = len(records)
    while count and records[count - 1]["iteration"] >= iteration:
        count -= 1
    return records if count == len(records) else records[:count]


def _records(file: Path) -> Iterator[dict[str, Any]]:
    lines = file.read_text(encoding="utf-8", errors="replace").split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            record["iteration"] = int(record["iteration"])
        except (ValueError, TypeError, KeyError):
            if number == len(lines):  # the writer was stopped within its last line
                return
            raise DataError.of("RUN", f"{file}:{number}", "is not a JSON object with an iteration",
                               "delete the line") from None
        yield record


def _settings(file: Path) -> dict[str, Any]:
    """The configuration by dotted name; empty where there is none, or it is torn."""
    try:
        return dict(_flat(json.loads(file.read_text(encoding="utf-8"))))
    except (OSError, ValueError):
        return {}


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _flat(inner, f"{prefix}.{name}" if prefix else name)
    else:
        yield prefix, value
