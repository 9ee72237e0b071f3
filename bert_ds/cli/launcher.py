"""Where this process stands among those that were started, as its launcher tells it in the environment."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class ProcessPlace:
    """Rank of this process and how it finds the others."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    launcher: str


_VARIABLES = (
    # launcher, rank, local rank, world size, ranks of this node
    ("torchrun", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    ("deepspeed", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE"),
    ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE",
     "OMPI_COMM_WORLD_LOCAL_SIZE"),
    # The step's own variables: those of the allocation are there without srun, too.
    ("srun", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"),
    ("environment", "RANK", "LOCAL_RANK", "WORLD_SIZE", "WORLD_SIZE"),
)


def process_place(environment: Mapping[str, str]) -> ProcessPlace:
    """Reads the variables of torchrun, deepspeed, mpirun or srun; without any, a single process."""
    for launcher, *names in _VARIABLES:
        if all(name in environment for name in names):
            rank, local_rank, world_size, local_world_size = (_first_number(environment[name]) for name in names)
            return ProcessPlace(rank, local_rank, world_size, local_world_size, launcher)
    return ProcessPlace(0, 0, 1, 1, "none")


def _first_number(text: str) -> int:
    """8 of `8`, and of srun's `8(x2),4`."""
    return int(re.split(r"[(,]", text)[0])
