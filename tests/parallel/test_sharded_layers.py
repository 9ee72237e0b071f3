"""Tensor-parallel layers against the dense ones: outputs and every gradient, in float64 on gloo."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
from ranks import run_ranks
from torch.nn import functional as F

from bert_ds.parallel.context import ParallelContext, build_context
from bert_ds.parallel.cross_entropy import IGNORED, VocabRange, vocab_parallel_cross_entropy
from bert_ds.parallel.embedding import VocabParallelEmbedding
from bert_ds.parallel.linear import column_parallel_linear, row_parallel_linear
from bert_ds.parallel.sharding import sharding_of

IN, MIDDLE, VOCABULARY, REAL = 8, 12, 16, 13
"""3 of the 16 columns of the vocabulary are padding, all of them on the last rank."""


def whole(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def fill(layer: torch.nn.Module, **full: torch.Tensor) -> torch.nn.Module:
    layer.double()
    with torch.no_grad():
        for name, tensor in full.items():
            parameter = getattr(layer, name)
            parameter.copy_(sharding_of(parameter).cut(tensor))
    return layer


def compare(found: torch.Tensor, wanted: torch.Tensor, parameter: torch.Tensor | None = None) -> None:
    torch.testing.assert_close(found, wanted if parameter is None else sharding_of(parameter).cut(wanted))


def layers_on_this_rank(tp_size: int) -> None:
    ctx = build_context(tp_size=tp_size, pp_size=1, device=torch.device("cpu"), timeout=timedelta(seconds=60))
    check_linears(ctx)
    check_embedding_and_cross_entropy(ctx)


def check_linears(ctx: ParallelContext) -> None:
    w1, b1, w2, b2 = (whole(MIDDLE, IN, seed=1), whole(MIDDLE, seed=2), whole(IN, MIDDLE, seed=3), whole(IN, seed=4))
    column = fill(column_parallel_linear(IN, MIDDLE, ctx), weight=w1, bias=b1)
    row = fill(row_parallel_linear(MIDDLE, IN, ctx), weight=w2, bias=b2)
    x = whole(5, IN, seed=5).requires_grad_()
    y = row(F.gelu(column(x)))
    upstream = whole(5, IN, seed=6)
    y.backward(upstream)
    dense = [tensor.clone().requires_grad_() for tensor in (x.detach(), w1, b1, w2, b2)]
    expected = F.linear(F.gelu(F.linear(dense[0], dense[1], dense[2])), dense[3], dense[4])
    expected.backward(upstream)
    compare(y, expected)
    compare(x.grad, dense[0].grad)
    parameters = (column.weight, column.bias, row.weight, row.bias)
    for parameter, tensor in zip(parameters, dense[1:], strict=True):
        compare(parameter.grad, tensor.grad, parameter)


def check_embedding_and_cross_entropy(ctx: ParallelContext) -> None:
    table = whole(VOCABULARY, IN, seed=7)
    words = fill(VocabParallelEmbedding(VOCABULARY, IN, ctx), weight=table)
    ids = torch.tensor([[0, 3, 12, 7], [5, 12, 1, 9]])
    labels = torch.tensor([[4, IGNORED, 12, 0], [IGNORED, 8, 3, 12]]).flatten()
    vocab = VocabRange(ctx.tp_rank * words.weight.size(0), REAL, ctx.tp_group)
    hidden = words.look_up(ids)
    logits = F.linear(hidden.detach(), words.weight)
    loss, correct = vocab_parallel_cross_entropy(logits, labels, vocab)
    weights = whole(8, seed=8).float()
    (loss * weights).sum().backward()
    found = words.weight.grad.clone()
    words.weight.grad = None
    hidden.sum().backward()

    dense = table.clone().requires_grad_()
    dense_hidden = F.embedding(ids.flatten(), dense)
    compare(hidden, dense_hidden)
    dense_logits = F.linear(dense_hidden.detach(), dense)[:, :REAL].float()
    expected = F.cross_entropy(dense_logits, labels, ignore_index=IGNORED, reduction="none")
    compare(loss, expected)
    assert correct.tolist() == ((dense_logits.argmax(1) == labels) & (labels != IGNORED)).tolist()
    (expected * weights).sum().backward()
    compare(found.float(), sharding_of(words.weight).cut(dense.grad).float())
    dense.grad = None
    dense_hidden = F.embedding(ids.flatten(), dense)
    dense_hidden.sum().backward()
    compare(words.weight.grad, dense.grad, words.weight)


@pytest.mark.proves("tensor-parallel layers and cross entropy, forward and gradients, against dense ones", "float64")
@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_layers_agree_with_the_dense_ones(tp_size: int) -> None:
    run_ranks(layers_on_this_rank, tp_size, tp_size)


def coordinates(tp_size: int, pp_size: int) -> tuple[int, ...]:
    from deepspeed.runtime.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology  # noqa: PLC0415

    ctx = build_context(tp_size=tp_size, pp_size=pp_size, device=torch.device("cpu"), timeout=timedelta(seconds=60))
    grid = PipelineParallelGrid(PipeModelDataParallelTopology(num_pp=pp_size, num_mp=tp_size, num_dp=ctx.dp_size))
    assert ctx.rank == torch.distributed.get_rank()
    assert ctx.last_stage_rank == grid.stage_to_global(pp_size - 1)
    return (ctx.pp_rank - grid.get_stage_id(), ctx.dp_rank - grid.get_data_parallel_id(),
            ctx.tp_rank - grid.get_slice_parallel_rank())


def test_coordinates_are_those_of_deepspeeds_grid() -> None:
    assert run_ranks(coordinates, 8, 2, 2) == [(0, 0, 0)] * 8
