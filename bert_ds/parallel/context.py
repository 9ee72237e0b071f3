"""Where this process stands in the (pipe, data, tensor) grid, and the groups it talks to.

Built once, before the model, and passed to whoever communicates; nothing looks groups up.
rank = (pipe x dp_size + data) x tp_size + tensor, the order of DeepSpeed's PipeModelDataParallelTopology.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class ParallelContext:
    """Coordinates and process groups. A group is None where its size is 1: collectives become the identity."""

    tp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1
    tp_rank: int = 0
    pp_rank: int = 0
    dp_rank: int = 0
    tp_group: dist.ProcessGroup | None = None
    pp_group: dist.ProcessGroup | None = None
    dp_group: dist.ProcessGroup | None = None
    stage_group: dist.ProcessGroup | None = None
    """The ranks of this pipeline stage: all tensor-parallel pieces of all its copies."""
    sequence_parallel: bool = False
    """Whether, between the matrices, each tensor-parallel rank holds its share of the tokens only."""
    dualpipev: bool = False
    """Whether each pipeline rank holds two stages, out and back, so that the first rank holds the last stage too."""
    device: torch.device = torch.device("cpu")

    @classmethod
    def single_process(cls, device: torch.device | str = "cpu") -> ParallelContext:
        """The grid of one process, without any process group: for tests, export and tools."""
        return cls(device=torch.device(device))

    def __post_init__(self) -> None:
        assert self.tp_size > 1 or not self.sequence_parallel
        assert self.pp_size > 1 or not self.dualpipev

    @property
    def world_size(self) -> int:
        return self.tp_size * self.pp_size * self.dp_size

    @property
    def rank(self) -> int:
        return (self.pp_rank * self.dp_size + self.dp_rank) * self.tp_size + self.tp_rank

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank holds the embeddings."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank holds heads and loss."""
        return self.pp_rank == self._last_stage_pp_rank

    @property
    def reads_data(self) -> bool:
        """Whether this rank needs batches: inputs, labels or both."""
        return self.is_first_stage or self.is_last_stage

    @property
    def last_stage_rank(self) -> int:
        """Global rank that holds the last stage of this rank's pipeline."""
        return (self._last_stage_pp_rank * self.dp_size + self.dp_rank) * self.tp_size + self.tp_rank

    @property
    def _last_stage_pp_rank(self) -> int:
        return 0 if self.dualpipev else self.pp_size - 1


def build_context(
    *, tp_size: int, pp_size: int, device: torch.device, timeout: timedelta, sequence_parallel: bool = False,
    dualpipev: bool = False,
) -> ParallelContext:
    """Makes the groups of this process; every rank of the initialised default group has to call it.

    Raises:
        AssertionError: tp_size x pp_size does not divide the world size (RunConfig.validate refuses that earlier).
    """
    world_size, rank = dist.get_world_size(), dist.get_rank()
    assert world_size % (tp_size * pp_size) == 0
    dp_size = world_size // (tp_size * pp_size)
    grid_PDT = torch.arange(world_size).view(pp_size, dp_size, tp_size)
    pp_rank, dp_rank, tp_rank = ((grid_PDT == rank).nonzero()[0]).tolist()
    tp_group = _own_group(grid_PDT.reshape(-1, tp_size), rank, timeout)
    dp_group = _own_group(grid_PDT.permute(0, 2, 1).reshape(-1, dp_size), rank, timeout)
    both = tp_size > 1 and dp_size > 1
    return ParallelContext(
        tp_size=tp_size, pp_size=pp_size, dp_size=dp_size, tp_rank=tp_rank, pp_rank=pp_rank, dp_rank=dp_rank,
        tp_group=tp_group, dp_group=dp_group,
        pp_group=_own_group(grid_PDT.permute(1, 2, 0).reshape(-1, pp_size), rank, timeout),
        stage_group=_own_group(grid_PDT.reshape(pp_size, -1), rank, timeout) if both else tp_group or dp_group,
        sequence_parallel=sequence_parallel and tp_size > 1, dualpipev=dualpipev, device=device,
    )


def _own_group(rows: torch.Tensor, rank: int, timeout: timedelta) -> dist.ProcessGroup | None:
    """The group of the row that holds `rank`; all ranks create all groups, in the same order."""
    if rows.size(1) == 1:
        return None
    own = None
    for ranks in rows.tolist():
        group = dist.new_group(ranks, timeout=timeout)
        if rank in ranks:
            own = group
    return own
