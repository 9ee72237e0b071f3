"""A cheap check, now and then, that what several ranks hold alike is alike: to the bit, not roughly.

Copies that drift apart train on without any error. So the bits of every parameter that ranks share are summed up and
compared: the word table of the first and the last stage, and, over the tensor-parallel ranks, everything that is not
cut.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from bert_ds.errors import GuardError
from bert_ds.parallel.context import ParallelContext
from bert_ds.parallel.sharding import sharding_of
from bert_ds.training.pipeline_engine import BertPipelineEngine

_BITS = {2: torch.int16, 4: torch.int32}


def check_copies(engine: BertPipelineEngine, ctx: ParallelContext) -> None:
    """Compares what ranks hold alike; all ranks call it at the same step.

    Raises:
        GuardError: names the first parameter whose copies differ, on every rank that shares it.
    """
    replicated = [(local.name, local.parameter) for local in engine.module.local_parameters()
                  if sharding_of(local.parameter).dim is None]
    _compare([name for name, _ in replicated], [parameter for _, parameter in replicated], ctx.tp_group,
             "the tensor-parallel ranks")
    for tied in engine.tied_weights:
        _compare(["embedding.word_embeddings.weight"], [tied.weight], tied.group, "the first and the last stage")


def _compare(names: list[str], parameters: list[Tensor], group: dist.ProcessGroup | None, holders: str) -> None:
    if group is None or not parameters:
        return
    sums = torch.stack([_bit_sum(parameter) for parameter in parameters])
    extremes = torch.stack([sums, -sums])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    differing = (extremes[0] != -extremes[1]).nonzero().flatten().tolist()
    if differing:
        raise GuardError.of("copies of", names[differing[0]],
                            f"differ between {holders}, {len(differing)} parameter(s) in all",
                            "go on from the last checkpoint; if it happens again, look for a faulty device")


def _bit_sum(parameter: Tensor) -> Tensor:
    """Sum of a tensor's bits read as integers: another bit anywhere gives another sum."""
    return parameter.detach().contiguous().view(_BITS[parameter.element_size()]).sum(dtype=torch.int64)
