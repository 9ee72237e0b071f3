"""Collectives with a gradient, for tensor parallelism. A group of None means a size of 1: they return their input.

The pair follows Megatron-LM (Shoeybi et al. 2019, section 3): one operator is the other's adjoint.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _SumGradient(torch.autograd.Function):
    """Forward identity, backward sum over the group."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        summed = grad.contiguous().clone()
        dist.all_reduce(summed, group=ctx.group)
        return summed, None


class _SumForward(torch.autograd.Function):
    """Forward sum over the group, backward identity."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        summed = tensor.contiguous().clone()
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def copy_to_tensor_parallel(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Hands a replicated tensor to ranks that each compute another part: their gradients are summed."""
    return tensor if group is None else _SumGradient.apply(tensor, group)


def reduce_from_tensor_parallel(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Sums the partial results of all ranks into a replicated tensor."""
    return tensor if group is None else _SumForward.apply(tensor, group)
