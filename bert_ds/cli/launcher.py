"""Where this process stands among those that were started, as its launcher tells it in the environment."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from bert_ds.errors import ConfigError

DEFAULT_PORT = 29500
_FIRST_SLURM_PORT, _SLURM_PORTS = 15000, 15000
"""Below the ports that Linux gives to outgoing connections (32768 and above)."""


@dataclass(frozen=True)
class ProcessPlace:
    """Rank of this process, and who started it."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    """Ranks on this machine; at least so many where the launcher does not tell."""
    launcher: str
    sees_own_gpu_only: bool = False
    """Whether the launcher has hidden the GPUs of the machine's other ranks."""


_VARIABLES = (
    # launcher, rank, local rank, world size, ranks of this machine
    ("torchrun", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    # Also with --launcher mpich and impi, whatever the variables of these are.
    ("deepspeed", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE"),
    # Each mpirun starts its daemons by srun where it runs under Slurm, so its own variables count before Slurm's.
    ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE",
     "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("mpirun", "PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE", "MPI_LOCALNRANKS"),  # MPICH and Intel MPI
    ("mpirun", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE"),
)


def process_place(environment: Mapping[str, str]) -> ProcessPlace:
    """Reads the variables of torchrun, deepspeed, mpirun or srun; without any, a single process.

    Raises:
        ConfigError: a variable is no number, or the process is one of several but not told which of its machine.
    """
    for launcher, *names in _VARIABLES:
        if all(name in environment for name in names):
            rank, local_rank, world_size, local_world_size = (_number(environment, name) for name in names)
            return ProcessPlace(rank, local_rank, world_size, local_world_size, launcher)
    # The step's own variables: those of the allocation are there without srun, too.
    if "SLURM_STEP_NUM_TASKS" in environment and "SLURM_PROCID" in environment:
        return _place_in_slurm_step(environment)
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return _place_by_hand(environment)
    return ProcessPlace(0, 0, 1, 1, "none")


def meeting_point(environment: Mapping[str, str], place: ProcessPlace) -> tuple[str, int | None]:
    """Host and port at which the ranks find rank 0; a port of None is any free one, for a process alone.

    `MASTER_ADDR` and `MASTER_PORT` decide. Where they are missing, ranks of one machine meet there, and Slurm tells the
    first machine, which holds rank 0, and a number of the job that all ranks make the same port of.

    Raises:
        ConfigError: nothing tells where rank 0 is, or MASTER_PORT is no port.
    """
    host = environment.get("MASTER_ADDR") or _host_of_rank_0(environment, place)
    if "MASTER_PORT" in environment:
        port = _number(environment, "MASTER_PORT")
        if not 0 < port < 2**16:
            raise ConfigError.of("MASTER_PORT", port, "is not a port", f"use 1024 to 65535, as {DEFAULT_PORT}")
        return host, port
    if place.world_size == 1:
        return host, None
    if "SLURM_JOB_ID" in environment:
        step = environment.get("SLURM_STEP_ID", "")
        job = _number(environment, "SLURM_JOB_ID") + (int(step) if step.isdigit() else 0)
        return host, _FIRST_SLURM_PORT + job % _SLURM_PORTS
    return host, DEFAULT_PORT


def _host_of_rank_0(environment: Mapping[str, str], place: ProcessPlace) -> str:
    if place.world_size == 1 or (place.local_world_size == place.world_size and place.launcher != "environment"):
        return "localhost"
    nodes = environment.get("SLURM_STEP_NODELIST") if place.launcher == "srun" else None
    nodes = nodes or environment.get("SLURM_JOB_NODELIST")
    if nodes:
        return first_host(nodes)
    raise ConfigError.of(
        "MASTER_ADDR", "none", "is not set, and the ranks are not told which machine rank 0 is on",
        "hand it to every rank, with MASTER_PORT: mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500 (Open MPI), "
        "mpirun -genv MASTER_ADDR HOST ... (MPICH, Intel MPI), or as lines of ~/.deepspeed_env for "
        "deepspeed --launcher openmpi")


def first_host(nodes: str) -> str:
    """The first name of Slurm's list of machines: gpu07 of `gpu[07-09,12],login1`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first.group() if first else nodes)


def _place_in_slurm_step(environment: Mapping[str, str]) -> ProcessPlace:
    rank, local_rank = _number(environment, "SLURM_PROCID"), _number(environment, "SLURM_LOCALID")
    tasks = _tasks_of_nodes(environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = _number(environment, "SLURM_NODEID") if "SLURM_NODEID" in environment else 0
    local_world_size = tasks[node] if node < len(tasks) else local_rank + 1
    gpus = environment.get("SLURM_STEP_GPUS", "").split(",")
    own = "SLURM_GPUS_PER_TASK" in environment or len(gpus) >= local_world_size > 1
    return ProcessPlace(rank, local_rank, _number(environment, "SLURM_STEP_NUM_TASKS"), local_world_size, "srun", own)


def _tasks_of_nodes(text: str) -> list[int]:
    """Slurm's `8(x2),4` is [8, 8, 4]."""
    return [int(tasks) for tasks, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text) for _ in range(int(times or 1))]


def _place_by_hand(environment: Mapping[str, str]) -> ProcessPlace:
    rank, world_size = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
    if "LOCAL_RANK" in environment:
        local_rank = _number(environment, "LOCAL_RANK")
        return ProcessPlace(rank, local_rank, world_size, local_rank + 1, "environment")
    if world_size == 1:
        return ProcessPlace(rank, 0, 1, 1, "environment")
    raise ConfigError.of("LOCAL_RANK", "none", f"is not set beside RANK={rank} and WORLD_SIZE={world_size}: which GPU "
                         "of its machine this rank takes is not known", "start with torchrun on each machine, or set "
                         "LOCAL_RANK (0 where each rank has a machine or pod of its own) and LOCAL_WORLD_SIZE")


def _number(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except ValueError:
        raise ConfigError.of(name, environment[name], "is not a whole number",
                             "unset it, or let the launcher set it") from None
