"""What is shown of runs, as plain data, so that a page and a picture show the same."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from bert_ds.reporting.runs import Part, Run, is_drawable


@dataclass(frozen=True)
class Panel:
    """One pair of axes: a value that was logged, of training and of validation where both log it."""

    title: str
    key: str
    """Of the records in metrics.jsonl."""
    scale: Literal["linear", "log"] = "linear"
    percent: bool = False
    noisy: bool = True
    """Whether smoothing helps; what follows a rule is shown as it is."""


PANELS = (
    Panel("Masked-LM loss, nats", "lm_loss"),
    Panel("Sentence-pair loss, nats", "sop_loss"),
    Panel("Masked-token accuracy", "lm_accuracy", percent=True),
    Panel("Sentence-pair accuracy", "sop_accuracy", percent=True),
    Panel("Learning rate", "learning_rate", noisy=False),
    Panel("Gradient norm", "grad_norm", scale="log"),
    Panel("Loss scale", "loss_scale", scale="log", noisy=False),
    Panel("Tokens per second", "tokens_per_s"),
    Panel("Tokens per second, padding left out", "real_tokens_per_s"),
    Panel("Model FLOPs utilisation", "mfu", percent=True),
    Panel("Time waited for data", "data_wait_share", percent=True),
)
PARTS: Sequence[Part] = ("train", "valid")
PART_NAMES = {"train": "training", "valid": "validation"}


def shown_panels(runs: Sequence[Run]) -> list[Panel]:
    """All panels that have something to show, the masked-LM loss first."""
    return [panel for panel in PANELS
            if any(is_drawable(points(run, part, panel.key)) for run in runs for part in PARTS)
            and not (panel.key == "loss_scale" and _is_constant_one(runs))]


def points(run: Run, part: Part, key: str) -> list[tuple[int, float]]:
    """One curve."""
    return run.training(key) if part == "train" else run.validation(key)


def _is_constant_one(runs: Sequence[Run]) -> bool:
    """A loss scale that is 1 throughout says only that the run is not fp16."""
    return all(scale == 1 for run in runs for _, scale in run.training("loss_scale"))


def not_finite(run: Run) -> Iterator[str]:
    """A line for each value that was NaN or infinite: what, how often, where first and last."""
    for panel in PANELS:
        for part in PARTS:
            bad = [(at, value) for at, value in points(run, part, panel.key) if not math.isfinite(value)]
            if bad:
                kinds = " and ".join(sorted({"NaN" if math.isnan(value) else "infinity" for _, value in bad}))
                places = f"at iteration {bad[0][0]}" if len(bad) == 1 else (
                    f"{len(bad)} times from iteration {bad[0][0]} to {bad[-1][0]}")
                yield f"{PART_NAMES[part]} {panel.title.partition(',')[0].lower()}: {kinds} {places}"


def differing_settings(runs: Sequence[Run]) -> list[tuple[str, list[Any]]]:
    """Settings that are not the same in all runs that wrote theirs, with each run's value; None where it has none."""
    known = [run for run in runs if run.settings]
    names = dict.fromkeys(name for run in known for name in run.settings)
    return [(name, [run.settings.get(name) for run in runs]) for name in names
            if any(run.settings.get(name) != known[0].settings.get(name) for run in known)]
