"""Where this process stands among those that were started, as its launcher tells it in the environment."""

from __future__ import annotations

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
    ("srun", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE"),
)


def process_place(environment: Mapping[str, str]) -> ProcessPlace:
    """Reads the variables of torchrun, deepspeed, mpirun or srun; without any, a single process."""
    for launcher, rank, local_rank, world_size, local_size in _VARIABLES:
        if rank in environment and world_size in environment and local_rank in environment:
            total = int(environment[world_size])
            return ProcessPlace(int(environment[rank]), int(environment[local_rank]), total,
                                int(environment.get(local_size) or total), launcher)
    return ProcessPlace(0, 0, 1, 1, "none")
