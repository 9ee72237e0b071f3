"""Devices and the process group of a rank."""

from __future__ import annotations

import logging
import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist

from bert_ds.cli.launcher import ProcessPlace, meeting_point
from bert_ds.compat import import_deepspeed, quiet
from bert_ds.errors import ConfigError

log = logging.getLogger(__name__)


def choose_device(place: ProcessPlace) -> torch.device:
    """The accelerator of this rank, or the CPU.

    Raises:
        ConfigError: more ranks were started on this machine than it has GPUs.
    """
    if os.environ.get("DS_ACCELERATOR") == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count == 1 and place.sees_own_gpu_only:
        log.warning("srun shows each rank its own GPU only, which may keep NCCL from NVLink; --gpus-per-node instead "
                    "of --gpus-per-task, without --gpu-bind, shows all of the machine")
        return _chosen(0)
    if place.local_world_size > count:
        raise ConfigError.of("--num_gpus", place.local_world_size, f"this machine has {count} visible GPU(s)",
                             f"start {count} rank(s) here, or choose GPUs with --include localhost:0,1,...")
    return _chosen(place.local_rank)


def _chosen(number: int) -> torch.device:
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    return device


def join_process_group(place: ProcessPlace, device: torch.device, timeout: timedelta) -> None:
    """Initialises the default process group, NCCL on GPUs and gloo on CPUs, and tells DeepSpeed.

    Raises:
        ConfigError: nothing tells where the ranks meet, or another program listens on the port there.
    """
    host, port = meeting_point(os.environ, place)
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(port or _free_port()), RANK=str(place.rank),
                      LOCAL_RANK=str(place.local_rank), WORLD_SIZE=str(place.world_size))
    backend = "nccl" if device.type == "cuda" else "gloo"
    try:
        dist.init_process_group(backend, rank=place.rank, world_size=place.world_size, timeout=timeout,
                                device_id=device if device.type == "cuda" else None)
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise ConfigError.of("MASTER_PORT", os.environ["MASTER_PORT"], "is in use by another program of this machine",
                             "give another one: --master_port for deepspeed and torchrun, the variable MASTER_PORT "
                             "on all ranks for srun and mpirun") from error
    with quiet():
        import_deepspeed().init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return int(free.getsockname()[1])
