"""What a run that goes on from a checkpoint does otherwise than the run that saved it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from bert_ds.checkpoint.format import LayoutRecord, Manifest
from bert_ds.checkpoint.run_config import DEFINING, run_config_as_dict
from bert_ds.cli.settings import show
from bert_ds.config.run import RunConfig
from bert_ds.data.sample_order import DECIDES

_WITHOUT_EFFECT = {
    "model": {*DEFINING, "init_method_std"},
    "parallel": {"tensor_model_parallel_size", "pipeline_model_parallel_size"},
    "data": {"planned_samples", "data_cache_path", "num_workers", "vocab_file", "tokenizer_type"},
    "schedule": {"eval_interval", "exit_interval"},
    "engine": {"loss_scaling", "passed_through"},
    "engine.loss_scaling": {"initial_scale_power"},
}
"""Settings that cannot differ (DEFINING and the vocabulary are refused), that a resumed run does not follow, that
change no number, or that are told elsewhere (the layout)."""


@dataclass(frozen=True)
class Difference:
    """One setting that is not what it was."""

    setting: str
    saved: object
    now: object
    consequence: str = ""
    """What follows from it, where that is more than the setting says."""

    def __str__(self) -> str:
        text = f"{self.setting}: {show(self.saved)} -> {show(self.now)}"
        return f"{text} ({self.consequence})" if self.consequence else text


def differences(saved: Manifest, run: RunConfig, layout: LayoutRecord) -> Iterator[Difference]:
    """Every difference that matters between the run that saved a checkpoint and the one that continues it.

    Args:
        saved: the checkpoint's manifest.
        run: the run that goes on.
        layout: its process grid.
    """
    if saved.layout != layout:
        yield Difference("layout", _grid(saved.layout), _grid(layout))
    now = run_config_as_dict(run)
    for section in ("model", "parallel", "data", "schedule", "engine"):
        yield from _in_section(section, saved.config.get(section) or {}, now[section])
    engine = saved.config.get("engine") or {}
    yield from _in_section("engine.loss_scaling", engine.get("loss_scaling") or {}, now["engine"]["loss_scaling"])
    yield from _in_section("deepspeed", engine.get("passed_through") or {}, now["engine"]["passed_through"],
                           absent_is_none=True)


def _in_section(
    section: str, saved: Mapping[str, Any], now: Mapping[str, Any], *, absent_is_none: bool = False
) -> Iterator[Difference]:
    """Differences of two sections. A setting that only one of them has is of another version, unless absent_is_none."""
    names = dict.fromkeys([*saved, *now]) if absent_is_none else [name for name in now if name in saved]
    for name in names:
        before, after = saved.get(name), now.get(name)
        if before != after and name not in _WITHOUT_EFFECT.get(section, ()):
            yield Difference(f"{section}.{name}", before, after, _consequence(section, name, before, after))


def _consequence(section: str, name: str, before: Any, after: Any) -> str:
    if name in DECIDES.get(section, ()):
        return "from here on the run reads other samples"
    if (section, name) == ("engine", "precision"):
        if before == "fp16":
            return "the loss scale is dropped"
        if after == "fp16":
            return "loss scaling starts afresh"
    return ""


def _grid(layout: LayoutRecord) -> str:
    return (f"tensor {layout.tensor_parallel} x pipeline {layout.pipeline_parallel} x data {layout.data_parallel}")
