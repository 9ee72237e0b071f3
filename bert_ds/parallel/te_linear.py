"""Transformer Engine's Linear in the slots of ColumnParallelLinear and RowParallelLinear.

Parameters have the same names, shapes and records, so that initial weights, checkpoints and exports see no difference.
Transformer Engine communicates itself, so that FP8 tensors can travel as such.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from bert_ds.compat import import_transformer_engine
from bert_ds.parallel.context import ParallelContext
from bert_ds.parallel.sharding import mark_partial_gradient, mark_sharded


def te_column_parallel_linear(in_features: int, out_features: int, ctx: ParallelContext) -> nn.Module:
    """As ColumnParallelLinear: x [T, in] or [T/t, in] -> y [T, out/t].

    Raises:
        ConfigError: Transformer Engine is missing or does not load.
    """
    linear = _linear(in_features, out_features, ctx, "column")
    mark_sharded(linear.weight, (out_features, in_features), 0, ctx)
    mark_sharded(linear.bias, (out_features,), 0, ctx)
    return linear


def te_row_parallel_linear(in_features: int, out_features: int, ctx: ParallelContext) -> nn.Module:
    """As RowParallelLinear: x [T, in/t] -> y [T, out] or [T/t, out]; the bias is added once, after the sum.

    Raises:
        ConfigError: Transformer Engine is missing or does not load.
    """
    linear = _linear(in_features, out_features, ctx, "row")
    mark_sharded(linear.weight, (out_features, in_features), 1, ctx)
    if ctx.sequence_parallel:
        mark_partial_gradient(linear.bias)
    return linear


def _linear(in_features: int, out_features: int, ctx: ParallelContext, mode: str) -> Any:
    te = import_transformer_engine()
    # On one rank the mode "row" would only keep the bias out of the matrix product.
    return te.Linear(
        in_features, out_features, bias=True, parallel_mode=mode if ctx.tp_size > 1 else None, tp_group=ctx.tp_group,
        tp_size=ctx.tp_size, sequence_parallel=ctx.sequence_parallel, init_method=_left_as_it_is, device=ctx.device)


def _left_as_it_is(weight: Tensor) -> Tensor:
    """Initial values come from model/init.py."""
    return weight
