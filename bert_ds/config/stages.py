"""Which transformer layers each pipeline stage holds."""

from __future__ import annotations

from itertools import pairwise

from bert_ds.config.model import ModelConfig
from bert_ds.config.parallel import ParallelConfig

PREDICTED_PERCENT = 15
"""Share of the positions whose logits are computed, Megatron's --mask-prob; other shares hardly move the cut."""


def layer_flops(model: ModelConfig) -> int:
    """Multiplications and additions of one transformer layer for one token, forward: matrices and attention."""
    hidden = model.hidden_size
    return 8 * hidden * hidden + 4 * hidden * model.ffn_size + 4 * model.seq_length * hidden


def head_flops(model: ModelConfig) -> int:
    """The same for the masked-LM head, spread over all tokens: only predicted positions are computed."""
    hidden = model.hidden_size
    return (2 * hidden * hidden + 2 * hidden * model.padded_vocab_size) * PREDICTED_PERCENT // 100


def stage_layers(model: ModelConfig, stages: int) -> tuple[int, ...]:
    """Layers of each of `stages` stages, in order; they sum to `model.num_layers` and none is empty.

    The most expensive stage is as cheap as possible, the head counting on the last one; among such cuts the most even
    is taken. 1 <= stages <= model.num_layers, which `ParallelConfig.problems` checks.
    """
    layers = model.num_layers
    assert 1 <= stages <= layers, (stages, layers)
    if stages == 1:
        return (layers,)
    layer, head = layer_flops(model), head_flops(model)

    def unevenness(last: int) -> tuple[int, int]:
        costs = [count * layer for count in _spread(layers - last, stages - 1)] + [last * layer + head]
        return max(costs), sum(cost * cost for cost in costs)

    last = min(range(1, layers - stages + 2), key=unevenness)
    return (*_spread(layers - last, stages - 1), last)


def layers_of_stages(model: ModelConfig, parallel: ParallelConfig) -> tuple[int, ...]:
    """Layers of each stage of a run: given by hand, or balanced."""
    return parallel.layers_by_hand or stage_layers(model, parallel.pipeline_model_parallel_size)


def stage_bounds(model: ModelConfig, parallel: ParallelConfig) -> tuple[tuple[int, int], ...]:
    """First layer and one past the last layer of each stage."""
    ends = [0]
    for count in layers_of_stages(model, parallel):
        ends.append(ends[-1] + count)
    return tuple(pairwise(ends))


def _spread(layers: int, stages: int) -> list[int]:
    """`layers` over `stages`, the spare ones at even distances from the first stage on."""
    ends = [-(-layers * stage // stages) for stage in range(stages + 1)]
    return [end - start for start, end in pairwise(ends)]
