"""Histograms of lengths and of padding as PNG files."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bert_ds.data.inspection import CorpusStatistics, Lengths, SampleStatistics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BAR = "#33639c"
_MARK = "#b3452c"
_INK = "#333333"
_BINS = 48


def plot_statistics(folder: Path, corpus: CorpusStatistics, samples: SampleStatistics | None, *,
                    title: str) -> list[Path]:
    """Writes `lengths.png` and, with samples, `padding.png`; returns what it wrote. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    lengths = _figure(f"{title}: lengths", 2)
    _length_histogram(lengths.axes[0], corpus.sentence_lengths, "sentences")
    _length_histogram(lengths.axes[1], corpus.document_lengths, "documents")
    written = [folder / "lengths.png"]
    lengths.savefig(written[0], dpi=150)
    if samples is not None:
        padding = _figure(f"{title}: rows of {samples.seq_length} tokens", 1)
        _row_histogram(padding.axes[0], samples)
        written.append(folder / "padding.png")
        padding.savefig(written[1], dpi=150)
    return written


def _figure(title: str, panels: int) -> Figure:
    from matplotlib.figure import Figure  # noqa: PLC0415 - slow to import

    figure = Figure(figsize=(5.2 * panels + 0.6, 3.8), layout="constrained")
    figure.suptitle(title, fontsize=11, color=_INK)
    for axes in np.atleast_1d(figure.subplots(1, panels)):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
    return figure


def _length_histogram(axes: Axes, lengths: Lengths, what: str) -> None:
    """On a logarithmic axis; what has no token is told in words."""
    from matplotlib.ticker import EngFormatter, LogFormatter  # noqa: PLC0415

    longest = len(lengths.histogram) - 1
    first = int(np.argmax(lengths.histogram[1:] > 0)) + 1
    edges = np.unique(np.geomspace(first, longest + 1, _BINS).round().astype(np.int64))
    # Bins of whole numbers differ in width on this axis.
    counts = [lengths.histogram[low:high].sum() / np.log2(high / low) for low, high in pairwise(edges.tolist())]
    axes.bar(edges[:-1], counts, np.diff(edges), align="edge", color=_BAR, edgecolor="white", linewidth=0.4)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(LogFormatter(minor_thresholds=(2, 0.5)))
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    empty = int(lengths.histogram[0])
    axes.set_xlabel(f"tokens of {what}" + (f" ({empty:,} empty ones not shown)" if empty else ""))
    axes.set_ylabel(f"{what} per doubling of the length")
    _mark(axes, lengths.mean, f"mean {lengths.mean:,.0f}")


def _row_histogram(axes: Axes, samples: SampleStatistics) -> None:
    from matplotlib.ticker import EngFormatter, PercentFormatter  # noqa: PLC0415

    edges = np.linspace(0, samples.seq_length + 1, min(_BINS, samples.seq_length + 1) + 1).round().astype(np.int64)
    padded = np.zeros(samples.seq_length + 1, np.int64)
    padded[:len(samples.row_lengths.histogram)] = samples.row_lengths.histogram
    shares = [padded[low:high].sum() / samples.samples_seen for low, high in pairwise(edges)]
    axes.bar(edges[:-1], shares, np.diff(edges), align="edge", color=_BAR, edgecolor="white", linewidth=0.4)
    axes.set_xlim(0, samples.seq_length + 1)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.set_xlabel(f"tokens of a row; the rest of {samples.seq_length} is padding")
    axes.set_ylabel(f"share of {samples.samples_seen:,} rows")
    _mark(axes, samples.row_lengths.mean, f"mean {samples.row_lengths.mean:,.0f}: padding {samples.padding_share:.1%}")


def _mark(axes: Axes, value: float, text: str) -> None:
    axes.axvline(value, color=_MARK, linewidth=1.2)
    low, high = axes.get_xlim()
    is_right = axes.transData.transform((value, 0))[0] > sum(axes.transData.transform([(low, 0), (high, 0)])[:, 0]) / 2
    axes.annotate(text, (value, 1), xycoords=("data", "axes fraction"), xytext=(-4 if is_right else 4, -2),
                  textcoords="offset points", ha="right" if is_right else "left", va="top", color=_MARK, fontsize=9,
                  bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1})
