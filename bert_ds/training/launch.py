"""Devices and the process group of a rank."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist

from bert_ds.cli.launcher import ProcessPlace
from bert_ds.compat import import_deepspeed, quiet
from bert_ds.errors import ConfigError


def choose_device(place: ProcessPlace) -> torch.device:
    """The accelerator of this rank, or the CPU.

    Raises:
        ConfigError: more ranks were started on this machine than it has GPUs.
    """
    if os.environ.get("DS_ACCELERATOR") == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if place.local_world_size > count:
        raise ConfigError.of("--num_gpus", place.local_world_size, f"this machine has {count} visible GPU(s)",
                             f"start {count} rank(s) here, or choose GPUs with --include localhost:0,1,...")
    device = torch.device("cuda", place.local_rank)
    torch.cuda.set_device(device)
    return device


def join_process_group(place: ProcessPlace, device: torch.device, timeout: timedelta) -> None:
    """Initialises the default process group, NCCL on GPUs and gloo on CPUs, and tells DeepSpeed.

    Raises:
        ConfigError: another program listens on the port where the ranks meet.
    """
    os.environ.setdefault("MASTER_ADDR", "localhost")
    if "MASTER_PORT" not in os.environ:
        os.environ["MASTER_PORT"] = str(_free_port())
    os.environ.update(RANK=str(place.rank), LOCAL_RANK=str(place.local_rank), WORLD_SIZE=str(place.world_size))
    backend = "nccl" if device.type == "cuda" else "gloo"
    try:
        dist.init_process_group(backend, rank=place.rank, world_size=place.world_size, timeout=timeout,
                                device_id=device if device.type == "cuda" else None)
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise ConfigError.of("MASTER_PORT", os.environ["MASTER_PORT"], "is in use by another program of this machine",
                             "give the launcher another one with --master_port") from error
    with quiet():
        import_deepspeed().init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return int(free.getsockname()[1])
