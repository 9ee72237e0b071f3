from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bert_ds.cli.deepspeed_reader import DeepSpeedJson, read_deepspeed_json
from bert_ds.cli.settings import Settings
from bert_ds.errors import ConfigError


def read(folder: Path, content: str | dict[str, Any]) -> tuple[Settings, DeepSpeedJson]:
    path = folder / "own.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    settings = Settings()
    return settings, read_deepspeed_json(path, settings)


def test_comments_and_every_block_we_read(tmp_path: Path) -> None:
    settings, extras = read(tmp_path, """{
        // comments, as DeepSpeed allows them
        "train_batch_size": 64, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "fp16": {"enabled": true, "initial_scale_power": 12, "consecutive_hysteresis": true},
        "bf16": {"enabled": false},
        "data_types": {"grad_accum_dtype": "float32"},
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 5e8, "offload_optimizer": {"device": "cpu"}},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "betas": [0.9, 0.98], "eps": 1e-6, "weight_decay": 0,
                                                 "adam_w_mode": true, "torch_adam": true}},
        "pipeline": {"activation_checkpoint_interval": 1, "pipe_partitioned": false},
        "flops_profiler": {"enabled": false},
        "tensorboard": {"enabled": true}
    }""")
    assert not settings.problems
    values = {setting: given.value for setting, given in settings.values.items()}
    assert values == {
        "engine.global_batch_size": 64, "engine.micro_batch_size": 8, "engine.gradient_clipping": 0.5,
        "engine.precision": "fp16", "loss_scaling.initial_scale_power": 12, "engine.grad_accum_dtype": "fp32",
        "engine.zero_stage": 1, "engine.lr": 1e-3, "engine.betas": (0.9, 0.98), "engine.eps": 1e-6,
        "engine.weight_decay": 0.0, "engine.activation_checkpoint_interval": 1}
    assert extras.accumulation is not None and extras.accumulation.value == 2
    assert extras.handed_on == {
        "fp16": {"consecutive_hysteresis": True},
        "zero_optimization": {"reduce_bucket_size": 5e8, "offload_optimizer": {"device": "cpu"}},
        "tensorboard": {"enabled": True}}


@pytest.mark.parametrize(("content", "expected"), [
    ({"train_batchsize": 8}, "train_batchsize=8: is not a key of DeepSpeed. Fix: did you mean train_batch_size"),
    ({"fp16": {"enable": True}}, "fp16.enable=True: is not a known key. Fix: did you mean enabled"),
    ({"zero_optimization": {"stage": 2}}, "zero_optimization.stage=2: shards gradients"),
    ({"zero_optimization": {"stage": 3}}, "zero_optimization.stage=3: shards gradients"),
    ({"zero_optimization": {"stage3_max_live_parameters": 1}}, "belongs to ZeRO stage 3"),
    ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, 'write {"device": "cpu"}'),
    ({"zero_optimization": True}, "zero_optimization=True: is not an object"),
    ({"train_batch_size": "auto"}, "train_batch_size=auto: is not a whole number"),
    ({"gradient_accumulation_steps": 1.5}, "gradient_accumulation_steps=1.5: is not a whole number"),
    ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "contradicts bf16.enabled"),
    ({"fp16": {"enabled": "auto"}}, "fp16.enabled=auto: is not true or false"),
    ({"optimizer": {"type": "Lamb", "params": {}}}, "optimizer.type=Lamb: is not served"),
    ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}, "is another optimizer than AdamW"),
    ({"optimizer": {"params": {"weight_deacy": 0.1}}}, "did you mean weight_decay"),
    ({"optimizer": {"params": {"max_grad_norm": 1.0}}}, "set gradient_clipping"),
    ({"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 500, "total_num_steps": 9000}}},
     "set schedule.lr_decay_style and schedule.lr_warmup_iters=500, schedule.lr_decay_iters=9000 in the recipe"),
    ({"amp": {"enabled": True}}, "amp={...}: was removed from DeepSpeed. Fix: use fp16 or bf16"),
    ({"curriculum_learning": {"enabled": True}}, "was removed from DeepSpeed. Fix: train in two runs"),
    ({"elasticity": {"enabled": True}}, "was removed from DeepSpeed. Fix: set the batch sizes"),
    ({"activation_checkpointing": {"partition_activations": True}}, "set pipeline.activation_checkpoint_interval"),
    ({"pipeline": {"pipe_partitioned": True}}, "cuts integer tensors"),
    ({"pipeline": {"stages": 4}}, "set parallel.pipeline_model_parallel_size in the recipe"),
    ({"gradient_allreduce_op": "sum"}, "multiplies the gradient"),
])
def test_what_cannot_be_served_is_refused_with_a_repair(tmp_path: Path, content: dict[str, Any], expected: str) -> None:
    settings, _ = read(tmp_path, content)
    assert len(settings.problems) == 1 and expected in str(settings.problems[0])
    assert "own.json: " in str(settings.problems[0])


@pytest.mark.parametrize(("content", "expected"), [
    ('{"train_batch_size": 8, "train_batch_size": 16}', "key train_batch_size is written twice"),
    ('{"train_batch_size": 8', "own.json"),
    ("[1]", "is not a JSON object"),
])
def test_files_that_are_no_configuration(tmp_path: Path, content: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        read(tmp_path, content)
