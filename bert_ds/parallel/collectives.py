"""Collectives with a gradient, for tensor and sequence parallelism. Tokens, or whatever is cut, lie along dimension 0.

Where ranks hold whole tensors: `copy_to_tensor_parallel` in front of a cut matrix, `reduce_from_tensor_parallel` behind
one (Shoeybi et al. 2019, section 3). Where each rank holds its share of the tokens: `gather_tokens` and
`reduce_scatter_tokens` take their places (Korthikanti et al. 2022, section 4.2.2). In each pair one operator is the
other's adjoint. A group of None means a size of 1: the operators return their input.
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


@torch.compiler.disable
def _apply(function: type[torch.autograd.Function], tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Outside of compiled graphs, which end here and begin again: a compiler knows nothing of process groups."""
    return function.apply(tensor, group)


def copy_to_tensor_parallel(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Hands a replicated tensor to ranks that each compute another part: their gradients are summed."""
    return tensor if group is None else _apply(_SumGradient, tensor, group)


def reduce_from_tensor_parallel(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Sums the partial results of all ranks into a replicated tensor."""
    return tensor if group is None else _apply(_SumForward, tensor, group)


class _GatherTokens(torch.autograd.Function):
    """Forward all-gather, backward reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_gather(tensor, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _reduce_scatter(grad, ctx.group), None


class _ReduceScatterTokens(torch.autograd.Function):
    """Forward reduce-scatter, backward all-gather."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _reduce_scatter(tensor, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_gather(grad, ctx.group), None


class _GatherForAll(torch.autograd.Function):
    """Forward all-gather, backward this rank's share: for what every rank computes alike from the whole."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_gather(tensor, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return own_tokens(grad, ctx.group).contiguous(), None


def gather_tokens(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """All ranks' tokens, [T/t, ...] -> [T, ...], for ranks that each compute another part: gradients are summed."""
    return tensor if group is None else _apply(_GatherTokens, tensor, group)


def reduce_scatter_tokens(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Sums the partial results of all ranks and keeps this rank's tokens, [T, ...] -> [T/t, ...]."""
    return tensor if group is None else _apply(_ReduceScatterTokens, tensor, group)


def gather_tokens_for_all(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """All ranks' tokens, [T/t, ...] -> [T, ...], for a computation that every rank does alike."""
    return tensor if group is None else _apply(_GatherForAll, tensor, group)


def own_tokens(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """This rank's share of a whole tensor, [T, ...] -> [T/t, ...], as a view."""
    return tensor if group is None else tensor.chunk(dist.get_world_size(group))[dist.get_rank(group)]


def _all_gather(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    whole = tensor.new_empty(tensor.size(0) * dist.get_world_size(group), *tensor.shape[1:])
    dist.all_gather_into_tensor(whole, tensor.contiguous(), group=group)
    return whole


def _reduce_scatter(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    share = tensor.new_empty(tensor.size(0) // dist.get_world_size(group), *tensor.shape[1:])
    dist.reduce_scatter_tensor(share, tensor.contiguous(), group=group)
    return share
