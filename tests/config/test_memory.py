from __future__ import annotations

from dataclasses import replace

import pytest

from bert_ds.config.data import DataConfig
from bert_ds.config.engine import EngineConfig
from bert_ds.config.memory import predict_memory, stage_parameters
from bert_ds.config.model import ModelConfig
from bert_ds.config.output import OutputConfig
from bert_ds.config.parallel import ParallelConfig
from bert_ds.config.run import RunConfig
from bert_ds.config.schedule import ScheduleConfig

LARGE = RunConfig(
    name="large", model=ModelConfig(num_layers=24, hidden_size=1024, num_attention_heads=16),
    parallel=ParallelConfig(), data=DataConfig(), schedule=ScheduleConfig(train_iters=1), output=OutputConfig(),
    engine=EngineConfig(micro_batch_size=4, global_batch_size=32, precision="fp16"),
)


@pytest.mark.parametrize("binary_head", [True, False])
@pytest.mark.parametrize("stages", [1, 2, 5, 24])
def test_stages_hold_the_model_once_and_the_word_table_twice(stages: int, binary_head: bool) -> None:
    model = replace(LARGE.model, binary_head=binary_head)
    run = replace(LARGE, model=model, parallel=ParallelConfig(pipeline_model_parallel_size=stages))
    table = model.padded_vocab_size * model.hidden_size if stages > 1 else 0
    assert sum(stage_parameters(run, stage) for stage in range(stages)) == model.num_parameters + table


def test_bytes_of_mixed_precision_and_zero() -> None:
    count = 336_297_858
    (alone,) = predict_memory(LARGE, 1)
    assert (alone.weights, alone.gradients, alone.optimizer) == (2 * count, 2 * count, 12 * count)
    (shared,) = predict_memory(LARGE, 8)
    assert shared.optimizer == 12 * count // 8 and shared.weights == alone.weights
    (bf16,) = predict_memory(replace(LARGE, engine=replace(LARGE.engine, precision="bf16", zero_stage=0)), 8)
    assert (bf16.gradients, bf16.optimizer) == (6 * count, 12 * count)


def test_activations_follow_micro_batches_in_flight_and_recomputation() -> None:
    run = replace(LARGE, parallel=ParallelConfig(pipeline_model_parallel_size=4))
    stages = predict_memory(run, 4)
    assert [stage.activations // stages[3].activations for stage in stages] == [4, 3, 2, 1]
    assert stages[3].activations == 6 * 34 * 4 * 512 * 1024
    recomputed = predict_memory(replace(run, engine=replace(run.engine, activation_checkpoint_interval=1)), 4)
    assert all(less.activations < full.activations for less, full in zip(recomputed, stages, strict=True))
    assert [stage.logits > 0 for stage in stages] == [False, False, False, True]
