"""The checks by name, in the order of the table."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bert_ds.diagnosis.finding import Check


@dataclass(frozen=True)
class Entry:
    """A check, its time limit, and the lane in which it waits for its turn.

    Lanes run side by side: what measures the processor, what measures the devices, and what costs nothing.
    """

    name: str
    function: str
    """`module:function`, imported in the check's own process only."""
    limit_s: float
    lane: str
    environment: tuple[tuple[str, str], ...] = ()

    def load(self) -> Check:
        module, _, function = self.function.partition(":")
        check: Any = getattr(importlib.import_module(module), function)
        return check


# Two ranks on the CPU, whatever the machine has: the arithmetic is the same, and no GPU is disturbed.
_ON_CPU = (("CUDA_VISIBLE_DEVICES", ""), ("DS_ACCELERATOR", "cpu"), ("OMP_NUM_THREADS", "1"))

CHECKS: Sequence[Entry] = (
    Entry("versions", "bert_ds.diagnosis.versions:check_versions", 10, "light"),
    Entry("gradients", "bert_ds.diagnosis.gradients:check_gradients", 40, "processor", _ON_CPU),
    Entry("devices", "bert_ds.diagnosis.devices:check_devices", 25, "device"),
    Entry("attention", "bert_ds.diagnosis.attention:check_attention", 30, "device"),
    Entry("compiler", "bert_ds.diagnosis.compiler:check_compiler", 40, "processor"),
    Entry("all-reduce", "bert_ds.diagnosis.all_reduce:check_all_reduce", 45, "device"),
    Entry("environment", "bert_ds.diagnosis.machine:check_environment", 5, "light"),
    Entry("processors", "bert_ds.diagnosis.machine:check_processors", 5, "light"),
    Entry("host memory", "bert_ds.diagnosis.machine:check_memory", 5, "light"),
    Entry("shared memory", "bert_ds.diagnosis.machine:check_shared_memory", 5, "light"),
    Entry("limits", "bert_ds.diagnosis.machine:check_limits", 5, "light"),
    Entry("meeting point", "bert_ds.diagnosis.network:check_meeting_point", 15, "light"),
    Entry("disk", "bert_ds.diagnosis.disk:check_disk", 20, "light"),
)
