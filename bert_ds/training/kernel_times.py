"""Where a step's time goes on a GPU: the kernels of a trace, by kind, and the gaps between them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

TRACED_STEPS = 3
KINDS = (
    ("attention", ("flash", "fmha", "sdpa", "cudnn_generated_fort_native_sdpa", "attention")),
    ("matrix", ("gemm", "cutlass", "nvjet", "xmma", "splitk", "cublas")),
    ("communication", ("nccl",)),
    ("copy", ("memcpy", "memset")),
)
"""Kinds of kernels by parts of their names, the first that fits; whatever is left is elementwise work."""


@dataclass(frozen=True)
class KernelTimes:
    """Milliseconds of one step."""

    by_kind: dict[str, float]
    idle: float
    """Time in which the GPU ran nothing."""
    top: tuple[tuple[str, float], ...]
    """The kernels that take longest, by name."""


def kernel_times(step: Callable[[], None], device: torch.device) -> KernelTimes | None:
    """Traces some steps; None on a CPU."""
    if device.type != "cuda":
        return None
    step()
    torch.cuda.synchronize(device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        started = time.monotonic()
        for _ in range(TRACED_STEPS):
            step()
        torch.cuda.synchronize(device)
        whole = (time.monotonic() - started) * 1e3 / TRACED_STEPS
    names: dict[str, float] = {}
    for event in trace.events() or ():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            names[event.name] = names.get(event.name, 0.0) + _milliseconds(event) / TRACED_STEPS
    by_kind: dict[str, float] = {}
    for name, spent in names.items():
        kind = _kind(name)
        by_kind[kind] = by_kind.get(kind, 0.0) + spent
    top = sorted(names.items(), key=lambda item: -item[1])[:15]
    return KernelTimes(by_kind, max(whole - sum(by_kind.values()), 0.0), tuple(top))


def _milliseconds(event: Any) -> float:
    return float(event.device_time) / 1e3


def _kind(name: str) -> str:
    lower = name.lower()
    return next((kind for kind, parts in KINDS if any(part in lower for part in parts)), "elementwise")
