"""The picture: curves for a page of a document, drawn with matplotlib."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bert_ds.errors import DataError
from bert_ds.reporting.panels import PART_NAMES, PARTS, Panel, points, shown_panels
from bert_ds.reporting.runs import Part, Point, Run, is_drawable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, told apart by colour-blind readers too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
SINGLE_RUN = {"train": COLOURS[0], "valid": COLOURS[1]}
INK, MUTED, GRID = "#222222", "#6b6b6b", "#e6e6e6"


def draw(runs: Sequence[Run]) -> Figure:
    """The picture: the masked-LM loss wide on top, the other panels below, up to three in a row."""
    # Imported here: a second of start-up that --help need not pay.
    from matplotlib.figure import Figure  # noqa: PLC0415
    from matplotlib.layout_engine import ConstrainedLayoutEngine  # noqa: PLC0415

    shown = shown_panels(runs)
    rows = [shown[:1], *_rows(shown[1:])]
    figure = Figure(figsize=(12, 4.2 + 2.5 * (len(rows) - 1)), dpi=130, facecolor="white",
                    layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1, hspace=0.04, wspace=0.03))
    grid = figure.add_gridspec(len(rows), 6, height_ratios=[1.7, *[1] * (len(rows) - 1)])
    last_iteration = max(record["iteration"] for run in runs for part in PARTS for record in run.records(part))
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

    for run, part, curve in _curves(panel, runs):
        axes.plot([x for x, _ in curve], [y if math.isfinite(y) else math.nan for _, y in curve],
                  label=PART_NAMES[part] if len(runs) == 1 else f"{runs[run].name}, {PART_NAMES[part]}",
                  **_line_style(run, part, len(runs), is_main))
    axes.set_title(panel.title, loc="left", color=INK, fontsize=14 if is_main else 11, fontweight="bold", pad=8)
    axes.set_yscale(panel.scale)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10 if is_main else 6))
    if panel.percent:
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
    else:
        axes.yaxis.set_major_formatter(FuncFormatter(_short_number))
    if panel.scale == "log":
        values = [y for *_, curve in _curves(panel, runs) for _, y in curve if 0 < y < math.inf]
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
        _name_ends(axes, panel, runs[0].validation(panel.key))


def _curves(panel: Panel, runs: Sequence[Run]) -> list[tuple[int, Part, list[Point]]]:
    """Number of the run, part and points of every curve that has a value to show."""
    found = [(number, part, points(run, part, panel.key)) for number, run in enumerate(runs) for part in PARTS]
    return [(number, part, curve) for number, part, curve in found if is_drawable(curve)]


def _line_style(run: int, part: Part, number_of_runs: int, is_main: bool) -> dict[str, Any]:
    """Colour tells runs apart; when there is one run only, it tells training from validation."""
    wide = 1.3 if is_main else 1.0
    colour = SINGLE_RUN[part] if number_of_runs == 1 else COLOURS[run % len(COLOURS)]
    if part == "train":
        return {"color": colour, "linewidth": 1.3 * wide, "alpha": 0.85 if number_of_runs == 1 else 0.5}
    return {"color": colour, "linewidth": 1.6 * wide, "marker": "o", "markersize": 3.5 * wide,
            "markeredgecolor": "white", "markeredgewidth": 0.8}


def _name_ends(axes: Axes, panel: Panel, curve: list[Point]) -> None:
    """Writes the first and the last validation value at their points."""
    from matplotlib.patheffects import withStroke  # noqa: PLC0415

    finite = [(x, y) for x, y in curve if math.isfinite(y)]
    if len(finite) < 2:
        return
    form = "{:.1%}" if panel.percent else "{:.2f}"
    for (x, y), align, shift in ((finite[0], "left", (7, 5)), (finite[-1], "right", (0, 8))):
        axes.annotate(form.format(y), (x, y), xytext=shift, textcoords="offset points", ha=align, fontsize=9.5,
                      color=SINGLE_RUN["valid"], fontweight="bold",
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
