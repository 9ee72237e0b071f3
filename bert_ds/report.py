"""Draws what a run, or several side by side, logged: `python -m bert_ds.report RUN [RUN ...] --output loss.png`.

A run is a TensorBoard folder of `pretrain`, or its `metrics.jsonl`: one JSON object a logged step, and one with
`split` = "valid" or "test" an evaluation. Panels are plain data (`panels`), so that a picture is one way to show them.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from bert_ds.cli.command_parser import CommandParser
from bert_ds.errors import EXIT_DONE, DataError, run_command

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

METRICS_FILE = "metrics.jsonl"
Point = tuple[int, float]
Values = Callable[[Mapping[str, Any]], float]


@dataclass(frozen=True)
class Run:
    """What one run logged, each list in the order of the iterations."""

    name: str
    steps: list[dict[str, Any]]
    """Means over the log interval that ends at `iteration`."""
    evaluations: list[dict[str, Any]]
    """Evaluations on the validation set, taken after `iteration` updates."""

    def training(self, key: str) -> list[Point]:
        return _points(self.steps, key)

    def validation(self, key: str) -> list[Point]:
        return _points(self.evaluations, key)


@dataclass(frozen=True)
class Series:
    """One curve; `run` indexes the runs of the report, `role` says what the curve is within its panel."""

    label: str
    points: list[Point]
    run: int
    role: Literal["train", "valid", "valid_second"]


@dataclass(frozen=True)
class Panel:
    """Curves that share a pair of axes."""

    title: str
    series: list[Series]
    scale: Literal["linear", "log"] = "linear"
    percent: bool = False


def read_run(path: Path) -> Run:
    """Reads a run's metrics. A step logged again after a resume counts once, a torn last line not at all.

    Raises DataError when there is no such file, when it holds no step, or when a line within it is broken.
    """
    file = path / METRICS_FILE if path.is_dir() else path
    if not file.is_file():
        raise DataError.of("RUN", path, f"holds no {METRICS_FILE}", "give the --tensorboard-dir of a run")
    steps: dict[int, dict[str, Any]] = {}
    evaluations: dict[int, dict[str, Any]] = {}
    for record in _records(file):
        split = record.get("split")
        if split is None:
            steps[record["iteration"]] = record
        elif split == "valid":
            evaluations[record["iteration"]] = record
    if not steps and not evaluations:
        raise DataError.of("RUN", path, f"{METRICS_FILE} holds no logged step yet", "wait for the first log line")
    name = file.parent.name if file.name == METRICS_FILE else file.stem
    return Run(name, [steps[i] for i in sorted(steps)], [evaluations[i] for i in sorted(evaluations)])


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


def _points(records: list[dict[str, Any]], key: str) -> list[Point]:
    """The finite values of `key`; a diverged step leaves a gap."""
    values = ((record["iteration"], record.get(key)) for record in records)
    return [(i, float(value)) for i, value in values if value is not None and math.isfinite(value)]


def panels(runs: Sequence[Run]) -> list[Panel]:
    """All panels that have something to show, the masked-LM loss first."""
    loss = _train_and_valid(runs, "lm_loss")
    sentence_loss = _train_and_valid(runs, "sop_loss")
    accuracy = [
        series
        for index, run in enumerate(runs)
        for series in (
            Series("masked tokens", run.validation("lm_accuracy"), index, "valid"),
            Series("sentence pairs", run.validation("sop_accuracy"), index, "valid_second"),
        )
    ]
    drawn = [
        Panel("Masked-LM loss, nats", loss),
        Panel("Sentence-pair loss, nats", sentence_loss),
        Panel("Validation accuracy", accuracy, percent=True),
        Panel("Learning rate", _train(runs, "learning_rate")),
        Panel("Gradient norm", _train(runs, "grad_norm"), scale="log"),
        Panel("Loss scale", _train(runs, "loss_scale"), scale="log"),
        Panel("Tokens per second", _train(runs, "tokens_per_s")),
    ]
    return [panel for panel in map(_without_empty, drawn) if panel.series and not _is_constant_one(panel)]


def _train(runs: Sequence[Run], key: str) -> list[Series]:
    return [Series("training", run.training(key), index, "train") for index, run in enumerate(runs)]


def _train_and_valid(runs: Sequence[Run], key: str) -> list[Series]:
    valid = [Series("validation", run.validation(key), index, "valid") for index, run in enumerate(runs)]
    return [*_train(runs, key), *valid]


def _without_empty(panel: Panel) -> Panel:
    kept = [series for series in panel.series if series.points]
    return Panel(panel.title, kept, panel.scale, panel.percent)


def _is_constant_one(panel: Panel) -> bool:
    """A loss scale that is 1 throughout says only that the run is not fp16."""
    return panel.title == "Loss scale" and all(y == 1 for series in panel.series for _, y in series.points)


# ---------------------------------------------------------------------------------------------------------- picture

# Okabe and Ito's colours, told apart by colour-blind readers too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
SINGLE_RUN = {"train": COLOURS[0], "valid": COLOURS[1], "valid_second": COLOURS[2]}
INK, MUTED, GRID = "#222222", "#6b6b6b", "#e6e6e6"


def draw(runs: Sequence[Run]) -> Figure:
    """The picture: the masked-LM loss wide on top, the other panels below, up to three in a row."""
    # Imported here: a second of start-up that --help need not pay.
    from matplotlib.figure import Figure  # noqa: PLC0415
    from matplotlib.layout_engine import ConstrainedLayoutEngine  # noqa: PLC0415

    shown = panels(runs)
    rows = [shown[:1], *_rows(shown[1:])]
    figure = Figure(figsize=(12, 4.2 + 2.5 * (len(rows) - 1)), dpi=130, facecolor="white",
                    layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1, hspace=0.04, wspace=0.03))
    grid = figure.add_gridspec(len(rows), 6, height_ratios=[1.7, *[1] * (len(rows) - 1)])
    last_iteration = max(x for panel in shown for series in panel.series for x, _ in series.points)
    for row, in_row in enumerate(rows):
        width = 6 // len(in_row)
        for column, panel in enumerate(in_row):
            axes = figure.add_subplot(grid[row, column * width : (column + 1) * width])
            _draw_panel(axes, panel, runs, is_main=row == 0)
            axes.set_xlim(0, last_iteration * 1.01 or 1)
    return figure


def _rows(small: Sequence[Panel]) -> list[Sequence[Panel]]:
    """Rows of two or three panels where that is possible."""
    count = math.ceil(len(small) / 3)
    ends = [round(len(small) * row / count) for row in range(count + 1)] if count else [0]
    return [small[start:end] for start, end in pairwise(ends)]


def _draw_panel(axes: Axes, panel: Panel, runs: Sequence[Run], *, is_main: bool) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator, PercentFormatter  # noqa: PLC0415

    for series in panel.series:
        axes.plot(*zip(*series.points, strict=True), label=_legend_label(series, panel, runs),
                  **_line_style(series, len(runs), is_main))
    axes.set_title(panel.title, loc="left", color=INK, fontsize=14 if is_main else 11, fontweight="bold", pad=8)
    axes.set_yscale(panel.scale)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10 if is_main else 6))
    if panel.percent:
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
    else:
        axes.yaxis.set_major_formatter(FuncFormatter(_short_number))
    if panel.scale == "log":
        values = [y for series in panel.series for _, y in series.points if y > 0]
        wide = bool(values) and max(values) > 300 * min(values)
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0,) if wide else (1.0, 2.0, 5.0), numticks=8))
        axes.yaxis.set_minor_locator(NullLocator())
    elif not panel.percent:
        axes.margins(y=0.08)
        if not is_main and "loss" not in panel.title:
            axes.set_ylim(bottom=0)
    axes.set_xlabel("iteration", color=MUTED, fontsize=9)
    axes.tick_params(colors=MUTED, labelsize=9, length=0)
    axes.grid(True, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color("#bbbbbb")
    if is_main or panel.percent:
        axes.legend(frameon=False, labelcolor=INK, fontsize=10 if is_main else 9, loc="best")
    if len(runs) == 1:
        _name_ends(axes, panel)


def _line_style(series: Series, number_of_runs: int, is_main: bool) -> dict[str, Any]:
    """Colour tells runs apart; when there is one run only, it tells training from validation."""
    wide = 1.3 if is_main else 1.0
    colour = SINGLE_RUN[series.role] if number_of_runs == 1 else COLOURS[series.run % len(COLOURS)]
    if series.role == "train":
        return {"color": colour, "linewidth": 1.3 * wide, "alpha": 0.85 if number_of_runs == 1 else 0.5}
    dashes = "--" if series.role == "valid_second" and number_of_runs > 1 else "-"
    return {"color": colour, "linewidth": 1.6 * wide, "linestyle": dashes, "marker": "o", "markersize": 3.5 * wide,
            "markeredgecolor": "white", "markeredgewidth": 0.8}


def _legend_label(series: Series, panel: Panel, runs: Sequence[Run]) -> str:
    return series.label if len(runs) == 1 else f"{runs[series.run].name}, {series.label}"


def _name_ends(axes: Axes, panel: Panel) -> None:
    """Writes the first and the last validation value at their points."""
    from matplotlib.patheffects import withStroke  # noqa: PLC0415

    form = "{:.1%}" if panel.percent else "{:.2f}"
    for series in panel.series:
        if series.role == "train" or len(series.points) < 2:
            continue
        for (x, y), align, shift in ((series.points[0], "left", (7, 5)), (series.points[-1], "right", (0, 8))):
            axes.annotate(form.format(y), (x, y), xytext=shift, textcoords="offset points", ha=align, fontsize=9.5,
                          color=SINGLE_RUN[series.role], fontweight="bold",
                          path_effects=[withStroke(linewidth=3, foreground="white")])


def _short_number(value: float, _position: int) -> str:
    """12000 -> 12k, 0.0005 -> 5e-4, 0 -> 0."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    if value and abs(value) < 0.01:
        mantissa, _, exponent = f"{value:.1e}".partition("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:g}"


def write_picture(runs: Sequence[Run], output: Path) -> None:
    """Writes the picture under a temporary name first; the suffix of `output` chooses the format (png, svg, pdf)."""
    figure = draw(runs)
    supported = figure.canvas.get_supported_filetypes()
    kind = output.suffix.lstrip(".").lower()
    if kind not in supported:
        raise DataError.of("--output", output, "is not a picture format that can be written",
                           "end the name in .png, .svg or .pdf")
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = output.with_name(f".{output.name}.tmp")
    figure.savefig(temporary, format=kind)
    os.replace(temporary, output)


# ------------------------------------------------------------------------------------------------------------ table

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


def table(runs: Sequence[Run]) -> str:
    """One line a run; losses are masked-LM losses in nats."""
    rows = [[title for title, _ in COLUMNS], *([cell(run) for _, cell in COLUMNS] for run in runs)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    return run_command(lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    parser = CommandParser(prog="python -m bert_ds.report", description="Draws what runs logged, side by side.")
    parser.add_argument("run", nargs="+", type=Path, metavar="RUN",
                        help=f"TensorBoard folder of a run, or its {METRICS_FILE}")
    parser.add_argument("--output", type=Path, default=Path("loss.png"), metavar="FILE",
                        help="picture to write: .png, .svg or .pdf")
    options = parser.parse_command(argv)
    runs = [read_run(path) for path in options.run]
    write_picture(runs, options.output)
    print(table(runs))
    print(f"wrote {options.output}")
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
