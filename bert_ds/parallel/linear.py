"""Linear layers cut over tensor-parallel ranks.

t = tp_size, T tokens of a micro-batch. Between the layers every rank holds all tokens, or, under sequence parallelism,
T/t of them: the column-parallel layer gathers them, the row-parallel layer scatters its sums.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bert_ds.parallel.collectives import (
    copy_to_tensor_parallel,
    gather_tokens,
    reduce_from_tensor_parallel,
    reduce_scatter_tokens,
)
from bert_ds.parallel.context import ParallelContext
from bert_ds.parallel.sharding import mark_partial_gradient, sharded_parameter
from bert_ds.parallel.te_linear import te_column_parallel_linear, te_row_parallel_linear


class ColumnParallelLinear(nn.Module):
    """y = x W^T + b with the output features cut over the ranks.

    Shapes: x [T, in] replicated (or [T/t, in]), weight [out/t, in], bias [out/t] -> y [T, out/t].
    The backward pass sums the gradient of x over the ranks; the forward pass communicates only to gather a sequence.
    """

    def __init__(self, in_features: int, out_features: int, ctx: ParallelContext) -> None:
        super().__init__()
        self._group = ctx.tp_group
        self._enter = gather_tokens if ctx.sequence_parallel else copy_to_tensor_parallel
        self.weight = sharded_parameter((out_features, in_features), 0, ctx)
        self.bias = sharded_parameter((out_features,), 0, ctx)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self._enter(x, self._group), self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"local weight {tuple(self.weight.shape)}"


class RowParallelLinear(nn.Module):
    """y = x W^T + b with the input features cut over the ranks.

    Shapes: x [T, in/t], weight [out, in/t], bias [out] replicated -> y [T, out] replicated (or [T/t, out]).
    The forward pass sums the partial products over the ranks and adds the bias once, after the sum.
    """

    def __init__(self, in_features: int, out_features: int, ctx: ParallelContext) -> None:
        super().__init__()
        self._group = ctx.tp_group
        self._leave = reduce_scatter_tokens if ctx.sequence_parallel else reduce_from_tensor_parallel
        self.weight = sharded_parameter((out_features, in_features), 1, ctx)
        self.bias = nn.Parameter(torch.empty(out_features))
        if ctx.sequence_parallel:
            mark_partial_gradient(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        if self._group is None:
            return F.linear(x, self.weight, self.bias)
        return self._leave(F.linear(x, self.weight), self._group) + self.bias

    def extra_repr(self) -> str:
        return f"local weight {tuple(self.weight.shape)}"


def column_parallel_linear(
    in_features: int, out_features: int, ctx: ParallelContext, transformer_impl: str = "local"
) -> nn.Module:
    """The column-parallel layer of an implementation, `local` or `transformer_engine`: same names, shapes, records."""
    if transformer_impl == "transformer_engine":
        return te_column_parallel_linear(in_features, out_features, ctx)
    return ColumnParallelLinear(in_features, out_features, ctx)


def row_parallel_linear(
    in_features: int, out_features: int, ctx: ParallelContext, transformer_impl: str = "local"
) -> nn.Module:
    """The row-parallel layer of an implementation, as above."""
    if transformer_impl == "transformer_engine":
        return te_row_parallel_linear(in_features, out_features, ctx)
    return RowParallelLinear(in_features, out_features, ctx)
