"""How fast the visible GPUs add up tensors over NCCL."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from bert_ds.diagnosis.finding import Finding, Settings

MIB = 2**20
SIZES_MIB = (1, 16, 256)
"""A tensor-parallel activation, a bucket of gradients, and a message that shows the bandwidth."""
ROUNDS = 5
SLOW_GB_S = 20.0
"""Bus bandwidth below which tensor parallelism costs more than it brings; NVLink has hundreds, PCIe 4 x16 up to 25."""
_LIMIT = timedelta(seconds=30)


def check_all_reduce(_settings: Settings) -> Sequence[Finding]:
    """One row: bus bandwidth by size, 2 (n - 1) / n x bytes / seconds as in NVIDIA's nccl-tests."""
    count = torch.cuda.device_count()
    if count < 2:
        return [Finding(check="all-reduce", verdict="not applicable",
                        found=f"NCCL joins GPUs, and {count or 'none'} is visible")]
    with tempfile.TemporaryDirectory(prefix="bert_ds_doctor_") as folder:
        torch.multiprocessing.spawn(_rank, args=(count, folder), nprocs=count)
        seconds = torch.load(os.path.join(folder, "seconds"), weights_only=True)
    return [judge(count, dict(zip(SIZES_MIB, seconds, strict=True)))]


def judge(count: int, seconds: dict[int, float]) -> Finding:
    """The row for the seconds of an all-reduce of `count` GPUs, by MiB."""
    gb_s = {size: 2 * (count - 1) / count * size * MIB / spent / 1e9 for size, spent in seconds.items()}
    text = f"{count} GPUs: " + ", ".join(f"{size} MiB {gb_s[size]:.0f} GB/s" for size in gb_s)
    figures: dict[str, Any] = {"bus_gb_s_by_mib": {str(size): round(speed, 2) for size, speed in gb_s.items()}}
    if max(gb_s.values()) >= SLOW_GB_S:
        return Finding(check="all-reduce", verdict="fine", found=text, figures=figures)
    return Finding(check="all-reduce", verdict="warning", figures=figures, found=f"{text}: no NVLink, or not used",
                   repair="see nvidia-smi topo -m and NCCL_DEBUG=INFO; otherwise keep --tensor-model-parallel-size 1")


def _rank(rank: int, count: int, folder: str) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=count, timeout=_LIMIT,
                            device_id=device)
    seconds = [_seconds(size * MIB, device) for size in SIZES_MIB]
    if rank == 0:
        torch.save(seconds, os.path.join(folder, "seconds"))
    dist.barrier()
    dist.destroy_process_group()


def _seconds(size: int, device: torch.device) -> float:
    tensor = torch.ones(size // 2, dtype=torch.bfloat16, device=device)
    spent = []
    for _ in range(ROUNDS + 2):
        torch.cuda.synchronize(device)
        started = time.perf_counter()
        dist.all_reduce(tensor)
        torch.cuda.synchronize(device)
        spent.append(time.perf_counter() - started)
    return median(spent[2:])
