"""How a parameter is cut over tensor-parallel ranks: a fact recorded on the parameter, read by everyone who asks.

Initialisation, checkpoints, gradient norms and tests use this one record. A parameter without a record is replicated.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bert_ds.parallel.context import ParallelContext

_RECORD = "tensor_parallel_sharding"
_PARTIAL = "tensor_parallel_partial_gradient"


@dataclass(frozen=True)
class Sharding:
    """This rank holds piece `index` of `count` equal pieces along `dim`; dim None means the whole tensor."""

    full_shape: tuple[int, ...]
    dim: int | None = None
    index: int = 0
    count: int = 1

    @property
    def local_shape(self) -> tuple[int, ...]:
        if self.dim is None:
            return self.full_shape
        shape = list(self.full_shape)
        shape[self.dim] //= self.count
        return tuple(shape)

    def cut(self, full: Tensor) -> Tensor:
        """This rank's piece of the full tensor, as a view."""
        if self.dim is None:
            return full
        return full.chunk(self.count, dim=self.dim)[self.index]


def sharded_parameter(full_shape: tuple[int, ...], dim: int, ctx: ParallelContext) -> nn.Parameter:
    """An uninitialised parameter holding this rank's piece of `full_shape` along `dim`."""
    assert full_shape[dim] % ctx.tp_size == 0
    parameter = nn.Parameter(torch.empty(Sharding(full_shape, dim, ctx.tp_rank, ctx.tp_size).local_shape))
    mark_sharded(parameter, full_shape, dim, ctx)
    return parameter


def mark_sharded(parameter: nn.Parameter, full_shape: tuple[int, ...], dim: int, ctx: ParallelContext) -> None:
    """Records that `parameter` is this rank's piece of `full_shape` along `dim`.

    Sets `tensor_model_parallel`, by which DeepSpeed counts the parameter on every rank in gradient norms
    (deepspeed/runtime/utils.py, is_model_parallel_parameter).
    """
    sharding = Sharding(full_shape, dim, ctx.tp_rank, ctx.tp_size)
    assert tuple(parameter.shape) == sharding.local_shape
    setattr(parameter, _RECORD, sharding)
    parameter.tensor_model_parallel = True  # type: ignore[attr-defined]


def mark_partial_gradient(parameter: Tensor) -> None:
    """Notes that each tensor-parallel rank sees only its share of the tokens that this replicated parameter acts on,
    so that its gradient has to be summed over the ranks before the optimizer's step."""
    setattr(parameter, _PARTIAL, True)


def has_partial_gradient(parameter: Tensor) -> bool:
    """Whether `mark_partial_gradient` was called on it."""
    return getattr(parameter, _PARTIAL, False)


def sharding_of(parameter: Tensor) -> Sharding:
    """The record of `parameter`; a parameter without one is replicated."""
    return getattr(parameter, _RECORD, None) or Sharding(tuple(parameter.shape))
