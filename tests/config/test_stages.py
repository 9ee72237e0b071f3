from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bert_ds.config.model import ModelConfig
from bert_ds.config.stages import head_flops, layer_flops, stage_bounds, stage_layers


def model(layers: int, hidden: int = 1024, vocab: int = 30522) -> ModelConfig:
    return ModelConfig(num_layers=layers, hidden_size=hidden, num_attention_heads=1, vocab_size=vocab)


def test_large_bert_over_sixteen_stages() -> None:
    assert stage_layers(model(24), 16) == (2, 2, 1, 2, 1, 2, 1, 2, 1, 2, 1, 2, 1, 2, 1, 1)


def test_even_cuts_stay_even() -> None:
    assert stage_layers(model(24), 4) == (6, 6, 6, 6)
    assert stage_layers(model(48, hidden=6144), 4) == (12, 12, 12, 12)
    assert stage_layers(model(24), 1) == (24,)


def test_a_head_dearer_than_a_layer_takes_layers_from_its_stage() -> None:
    small = model(4, hidden=64, vocab=30522)
    assert head_flops(small) > 2 * layer_flops(small)
    assert stage_layers(small, 2) == (3, 1)


def test_head_of_large_bert_costs_a_third_of_a_layer() -> None:
    assert 0.35 < head_flops(model(24)) / layer_flops(model(24)) < 0.36


@given(st.integers(1, 64), st.integers(1, 64), st.sampled_from([64, 256, 1024]))
def test_every_layer_once_no_stage_empty_and_no_cheaper_cut(layers: int, stages: int, hidden: int) -> None:
    stages = min(layers, stages)
    shape = model(layers, hidden)
    counts = stage_layers(shape, stages)
    assert sum(counts) == layers and len(counts) == stages and min(counts) >= 1
    bounds = stage_bounds(shape, stages)
    assert [layer for start, end in bounds for layer in range(start, end)] == list(range(layers))
    layer, head = layer_flops(shape), head_flops(shape)
    worst = max(*(count * layer for count in counts), counts[-1] * layer + head)
    if stages > 1:
        others = [max(-(-(layers - last) // (stages - 1)) * layer, last * layer + head)
                  for last in range(1, layers - stages + 2)]
        assert worst == min(others)
