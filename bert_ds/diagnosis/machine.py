"""Processors, memory, limits and switches of the machine or the container."""

from __future__ import annotations

import math
import os
import resource
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from bert_ds.diagnosis.finding import Finding, Settings, Verdict
from bert_ds.training.host_memory import available_bytes

GIB = 2**30
_CGROUP = Path("/sys/fs/cgroup")

SLOWING = {
    "CUDA_LAUNCH_BLOCKING": "1", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1",
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL", "NCCL_DEBUG": "TRACE", "TORCHDYNAMO_DISABLE": "1",
}
"""Switches that are set to look for an error, and then forgotten."""


def gpus_here() -> int:
    """GPUs of this machine by their device files, without asking the driver."""
    return len([path for path in Path("/dev").glob("nvidia[0-9]*") if path.name[6:].isdigit()])


def check_environment(_settings: Settings) -> Sequence[Finding]:
    """Whether switches in the environment slow training down."""
    found = {name: os.environ[name] for name, value in SLOWING.items() if os.environ.get(name, "").upper() == value}
    if not found:
        return [Finding(check="environment", verdict="fine", found="no variable that slows training down")]
    text = ", ".join(f"{name}={value}" for name, value in found.items())
    return [Finding(check="environment", verdict="warning", found=f"{text} slows training down",
                    repair=f"unset {' '.join(found)}")]


def check_processors(_settings: Settings) -> Sequence[Finding]:
    """Processors that this process may use, beside the GPUs that they feed."""
    allowed, gpus = len(os.sched_getaffinity(0)), gpus_here()
    quota = _processor_quota()
    usable = allowed if quota is None else min(allowed, math.ceil(quota))
    text = f"{usable} usable" + (f" of {os.cpu_count()}" if usable != os.cpu_count() else "")
    figures = {"usable": usable, "gpus": gpus}
    if usable >= 2 * gpus:
        return [Finding(check="processors", verdict="fine", found=text, figures=figures)]
    return [Finding(check="processors", verdict="warning", figures=figures,
                    found=f"{text}, for {gpus} GPUs: a rank and its loader want two",
                    repair="ask Slurm for more with --cpus-per-task, or docker with --cpus")]


def _processor_quota() -> float | None:
    """Processors' worth of time that the container may use; None without a limit."""
    try:
        quota, period = (_CGROUP / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def check_memory(_settings: Settings) -> Sequence[Finding]:
    """Free memory of the machine, within the limit of the container."""
    free = available_bytes()
    if free is None:
        return [Finding(check="host memory", verdict="not applicable", found="this system does not tell")]
    ranks = max(gpus_here(), 1)
    text, figures = f"{free / GIB:.1f} GiB free", {"free_gib": round(free / GIB, 2)}
    if free >= 4 * GIB * ranks:
        return [Finding(check="host memory", verdict="fine", found=text, figures=figures)]
    return [Finding(check="host memory", verdict="warning", figures=figures,
                    found=f"{text}; each of {ranks} rank(s) wants 4 GiB, and what is saved beside training more",
                    repair="end what fills it, raise docker's --memory or Slurm's --mem, or set async_save: false")]


def check_shared_memory(_settings: Settings, folder: str = "/dev/shm") -> Sequence[Finding]:
    """Room for what processes of this machine share: batches of loader workers, NCCL's buffers."""
    if not Path(folder).is_dir():
        return [Finding(check="shared memory", verdict="problem", found=f"there is no {folder}",
                        repair="mount a tmpfs there")]
    usage = shutil.disk_usage(folder)
    text = f"{folder}: {usage.free / GIB:.2f} of {usage.total / GIB:.2f} GiB free"
    figures = {"free_gib": round(usage.free / GIB, 3), "total_gib": round(usage.total / GIB, 3)}
    if usage.free >= GIB * max(gpus_here(), 1):
        return [Finding(check="shared memory", verdict="fine", found=text, figures=figures)]
    verdict: Verdict = "problem" if usage.free < GIB / 8 else "warning"
    consequence = {"problem": "NCCL and loader workers end with a bus error",
                   "warning": "many loader workers may fill it"}[verdict]
    return [Finding(check="shared memory", verdict=verdict, found=f"{text}: {consequence}", figures=figures,
                    repair="start docker with --ipc=host or --shm-size=16g; remove what earlier jobs left there")]


def check_limits(_settings: Settings) -> Sequence[Finding]:
    """Limits of the shell that ranks inherit: open files, processes, locked memory."""
    return list(_limits())


def _limits() -> Iterator[Finding]:
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if _below(files, 4096):
        yield Finding(check="open files", verdict="warning", found=f"{files} at once; many loader workers and ranks "
                      "need more", repair=f"ulimit -n {65536 if _is_free(most) else most}", figures={"limit": files})
    else:
        yield Finding(check="open files", verdict="fine", found=_shown(files), figures={"limit": files})
    processes, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if _below(processes, 4096):
        yield Finding(check="processes", verdict="warning", found=f"{processes} threads and processes a user",
                      repair="ulimit -u unlimited", figures={"limit": processes})
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if Path("/sys/class/infiniband").is_dir() and not _is_free(locked):
        yield Finding(check="locked memory", verdict="warning", figures={"limit": locked},
                      found=f"{locked // 1024} KiB; InfiniBand registers its buffers as locked memory",
                      repair="ulimit -l unlimited, or docker --ulimit memlock=-1")


def _is_free(limit: int) -> bool:
    return limit == resource.RLIM_INFINITY


def _below(limit: int, wanted: int) -> bool:
    return not _is_free(limit) and limit < wanted


def _shown(limit: int) -> str:
    return "unlimited" if _is_free(limit) else f"{limit:,}"
