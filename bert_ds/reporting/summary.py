"""One line a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from bert_ds.reporting.runs import Point, Run

Column = tuple[str, Callable[[Run], str]]


def _end(points: list[Point], form: str = "{:.4f}", which: int = -1) -> str:
    return form.format(points[which][1]) if points else "-"


COLUMNS: tuple[Column, ...] = (
    ("run", lambda run: run.name),
    ("iterations", lambda run: str(max(record["iteration"] for record in [*run.steps, *run.evaluations]))),
    ("train loss", lambda run: _end(run.training("lm_loss"))),
    ("valid loss at start", lambda run: _end(run.validation("lm_loss"), which=0)),
    ("at end", lambda run: _end(run.validation("lm_loss"))),
    ("masked tokens right", lambda run: _end(run.validation("lm_accuracy"), "{:.1%}")),
    ("sentence pairs right", lambda run: _end(run.validation("sop_accuracy"), "{:.1%}")),
    ("tokens/s", lambda run: f"{median(y for _, y in run.training('tokens_per_s')):,.0f}"
        if run.training("tokens_per_s") else "-"),
    ("skipped", lambda run: f"{sum(y for _, y in run.training('skipped')):.0f}"),
)


def summary(runs: Sequence[Run]) -> list[list[str]]:
    """Titles, then one row a run; losses are masked-LM losses in nats."""
    return [[title for title, _ in COLUMNS], *([cell(run) for _, cell in COLUMNS] for run in runs)]


def table(runs: Sequence[Run]) -> str:
    """The summary in lines of text."""
    rows = summary(runs)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
