"""GPUs: those that PyTorch sees against those that are there, and against what the launcher has started or would."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from bert_ds.cli.launcher import process_place
from bert_ds.diagnosis.finding import Finding, Settings
from bert_ds.diagnosis.machine import GIB
from bert_ds.errors import ConfigError

HOSTFILE = "/job/hostfile"
"""What the deepspeed launcher reads without being told to."""


def check_devices(_settings: Settings) -> Sequence[Finding]:
    """Rows for the GPUs, for ranks against GPUs, and for what the deepspeed launcher would make of the environment."""
    count = torch.cuda.device_count()
    return [_devices(count), _ranks(count), *_launcher(count)]


def _devices(count: int) -> Finding:
    if count == 0:
        return _no_device()
    try:
        names = [_described(index) for index in range(count)]
    except RuntimeError as error:
        return Finding(check="devices", verdict="problem", found=f"a GPU does not start ({str(error).splitlines()[0]})",
                       repair="see nvidia-smi; a GPU that hangs or is held exclusively has to be freed")
    busy = [index for index in range(count) if _used(index) > GIB * 2]
    text = f"{count} x {names[0]}" if len(set(names)) == 1 else ", ".join(names)
    figures = {"devices": names, "cuda": torch.version.cuda, "used_gib": [_used(i) / GIB for i in range(count)]}
    if busy:
        return Finding(check="devices", verdict="warning", figures=figures, found=f"{text}; other programs hold "
                       f"{_used(busy[0]) / GIB:.1f} GiB of GPU {busy[0]}" + (" and more" if busy[1:] else ""),
                       repair="end them (nvidia-smi lists them), or choose other GPUs with --include localhost:0,1,...")
    if len(set(names)) > 1:
        return Finding(check="devices", verdict="warning", found=f"{text}: the slowest sets the pace", figures=figures,
                       repair="choose equal GPUs with --include localhost:0,1,...")
    return Finding(check="devices", verdict="fine", found=text, figures=figures)


def _described(index: int) -> str:
    properties = torch.cuda.get_device_properties(index)
    return (f"{properties.name}, {properties.total_memory / GIB:.0f} GiB, "
            f"compute capability {properties.major}.{properties.minor}")


def _used(index: int) -> int:
    """Bytes of a GPU that are taken, the context of this process included."""
    free, total = torch.cuda.mem_get_info(index)
    return total - free


def _no_device() -> Finding:
    if not _driver_answers():
        return Finding(check="devices", verdict="fine", found="no GPU: training runs on the CPU, in fp32 or bf16")
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return Finding(check="devices", verdict="warning", found="CUDA_VISIBLE_DEVICES hides every GPU of this machine",
                       repair="unset CUDA_VISIBLE_DEVICES")
    if torch.version.cuda is None:
        return Finding(check="devices", verdict="problem", repair="install the torch of pytorch.org that names CUDA",
                       found=f"torch {torch.__version__} is built without CUDA, and this machine has a GPU")
    return Finding(check="devices", verdict="problem", repair="update the driver, or install a torch for an older CUDA",
                   found=f"torch {torch.__version__} for CUDA {torch.version.cuda} does not see the GPU that is here")


def _driver_answers() -> bool:
    if not Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is None:
        return False
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=10, check=False)
    except subprocess.TimeoutExpired:
        return False
    return "GPU" in listed.stdout


def _ranks(count: int) -> Finding:
    """Ranks of this machine, where a launcher has started this command, against its GPUs."""
    try:
        place = process_place(os.environ)
    except ConfigError as error:
        [problem] = error.problems
        return Finding(check="launcher", verdict="problem", repair=problem.repair,
                       found=f"{problem.setting}={problem.value}: {problem.reason}")
    if place.launcher == "none":
        return Finding(check="launcher", verdict="fine", found="started without one: a single rank")
    text = f"{place.launcher}: {place.local_world_size} rank(s) of {place.world_size} on this machine"
    if place.sees_own_gpu_only and count == 1:
        return Finding(check="launcher", verdict="warning", found=f"{text}, each of which sees its own GPU only; that "
                       "may keep NCCL from NVLink", repair="--gpus-per-node instead of --gpus-per-task, no --gpu-bind")
    if 0 < count < place.local_world_size:
        return Finding(check="launcher", verdict="problem", found=f"{text}, which shows {count} GPU(s)",
                       repair=f"start {count} rank(s) here (--num_gpus {count}, --nproc-per-node {count} or "
                       f"--ntasks-per-node={count}), or choose GPUs with --include localhost:0,1,...")
    if place.local_world_size < count:
        return Finding(check="launcher", verdict="warning", found=f"{text}, which has {count} GPUs",
                       repair=f"start {count} rank(s), or leave GPUs to others with --include localhost:0,1,...")
    return Finding(check="launcher", verdict="fine", found=text)


def _launcher(count: int) -> Iterator[Finding]:
    """What makes the deepspeed launcher do other things than asked."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if "GPU-" in visible or "MIG-" in visible:
        yield Finding(check="deepspeed launcher", verdict="warning", found="CUDA_VISIBLE_DEVICES names GPUs by UUID, "
                      "which the deepspeed launcher cannot read", repair="name them by number, or start with torchrun")
    elif visible and count:
        yield Finding(check="deepspeed launcher", verdict="warning", found=f"CUDA_VISIBLE_DEVICES={visible} is ignored "
                      "by deepspeed --num_gpus", repair=f"deepspeed --include localhost:{visible} ...")
    if Path(HOSTFILE).exists():
        yield Finding(check="hostfile", verdict="warning", found=f"{HOSTFILE} is there, so the deepspeed launcher "
                      "starts ranks over ssh, on this machine too",
                      repair="give --hostfile the one that you mean, or start with torchrun")
