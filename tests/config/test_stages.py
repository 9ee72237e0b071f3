from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bert_ds.config.model import ModelConfig
from bert_ds.config.parallel import ParallelConfig
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
    bounds = stage_bounds(shape, ParallelConfig(pipeline_model_parallel_size=stages))
    assert [layer for start, end in bounds for layer in range(start, end)] == list(range(layers))
    layer, head = layer_flops(shape), head_flops(shape)
    worst = max(*(count * layer for count in counts), counts[-1] * layer + head)
    if stages > 1:
        others = [max(-(-(layers - last) // (stages - 1)) * layer, last * layer + head)
                  for last in range(1, layers - stages + 2)]
        assert worst == min(others)


def test_stages_by_hand() -> None:
    parallel = ParallelConfig(pipeline_model_parallel_size=4, stage_layers="7,6,6,5")
    assert list(parallel.problems(model(24), 4)) == []
    assert stage_bounds(model(24), parallel) == ((0, 7), (7, 13), (13, 19), (19, 24))


@pytest.mark.parametrize(("written", "reason"), [
    ("7,6,6", "gives 19 layers to 3 stages, not 24 to 4"), ("7,6,6,6", "gives 25 layers"), ("7,6,x,5", "no list"),
    ("12,12,0,0", "no list")])
def test_stages_by_hand_that_do_not_fit(written: str, reason: str) -> None:
    parallel = ParallelConfig(pipeline_model_parallel_size=4, stage_layers=written)
    assert reason in str(next(parallel.problems(model(24), 4)))
