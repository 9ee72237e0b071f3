"""Which transformer layers each pipeline stage holds."""

from __future__ import annotations

from itertools import pairwise

from bert_ds.config.model import ModelConfig
from bert_ds.config.parallel import ParallelConfig

PREDICTED_PERCENT = 15
"""Share of the positions whose logits are computed, Megatron's --mask-prob; other shares hardly move the cut."""


def layer_flops(model: ModelConfig) -> int:
    """Multiplications and additions of one transformer layer for one token, forward: matrices and attention."""
    hidden, projected = model.hidden_size, model.projection_size
    return 8 * hidden * projected + 4 * hidden * model.ffn_size + 4 * model.seq_length * projected


def head_flops(model: ModelConfig) -> int:
    """The same for the masked-LM head, spread over all tokens: only predicted positions are computed."""
    hidden = model.hidden_size
    return (2 * hidden * hidden + 2 * hidden * model.padded_vocab_size) * PREDICTED_PERCENT // 100


def stage_layers(model: ModelConfig, stages: int) -> tuple[int, ...]:
    """Layers of each of `stages` stages, in order; they sum to `model.num_layers` and none is empty.

    The most expensive stage is as cheap as possible, the head counting on the last one; among such cuts the most even
    is taken. 1 <= stages <= model.num_layers, which `ParallelConfig.problems` checks.
    """
    others, with_head = _layers_of_ranks(model, stages, least=1)
    return (*others, with_head)


def dualpipev_stage_layers(model: ModelConfig, ranks: int) -> tuple[int, ...]:
    """The same for the 2 x `ranks` stages of DualPipeV, of which rank r holds r and the one as far from the end.

    The most expensive rank is as cheap as possible, the head counting on the first one; then each rank's two stages
    are made as even as they can be. 2 <= 2 x ranks <= model.num_layers.
    """
    others, with_head = _layers_of_ranks(model, ranks, least=2)
    layer, head = layer_flops(model), head_flops(model)
    last = min(range(1, with_head), key=lambda count: abs((with_head - 2 * count) * layer - head))
    out = [with_head - last, *(-(-count // 2) for count in others)]
    back = [last, *(count // 2 for count in others)]
    return (*out, *reversed(back))


def layers_of_stages(model: ModelConfig, parallel: ParallelConfig) -> tuple[int, ...]:
    """Layers of each stage of a run: given by hand, or balanced."""
    balanced = dualpipev_stage_layers if parallel.is_dualpipev else stage_layers
    return parallel.layers_by_hand or balanced(model, parallel.pipeline_model_parallel_size)


def stage_bounds(model: ModelConfig, parallel: ParallelConfig) -> tuple[tuple[int, int], ...]:
    """First layer and one past the last layer of each stage."""
    ends = [0]
    for count in layers_of_stages(model, parallel):
        ends.append(ends[-1] + count)
    return tuple(pairwise(ends))


def _layers_of_ranks(model: ModelConfig, ranks: int, least: int) -> tuple[list[int], int]:
    """Layers of each pipeline rank without the head, and of the one with it; none has fewer than `least`."""
    layers, layer, head = model.num_layers, layer_flops(model), head_flops(model)
    assert 1 <= ranks and least * ranks <= layers, (ranks, layers)
    if ranks == 1:
        return [], layers

    def unevenness(with_head: int) -> tuple[int, int]:
        costs = [count * layer for count in _spread(layers - with_head, ranks - 1)] + [with_head * layer + head]
        return max(costs), sum(cost * cost for cost in costs)

    with_head = min(range(least, layers - least * (ranks - 1) + 1), key=unevenness)
    return _spread(layers - with_head, ranks - 1), with_head


def _spread(layers: int, stages: int) -> list[int]:
    """`layers` over `stages`, the spare ones at even distances from the first stage on."""
    ends = [-(-layers * stage // stages) for stage in range(stages + 1)]
    return [end - start for start, end in pairwise(ends)]
