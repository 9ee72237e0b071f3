"""The dict that deepspeed.initialize gets: what the user wrote, completed with all that must not depend on defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from bert_ds.config.engine import EngineConfig
from bert_ds.config.run import RunConfig

NEVER = 2**31 - 1
"""Interval of DeepSpeed's own log line; the trainer prints its own."""

OVERRIDABLE: dict[str, Any] = {
    "steps_per_print": NEVER,
    # DeepSpeed's throughput timer makes the host wait for the device in every micro-batch.
    "timers": {"throughput": {"enabled": False}},
    # DeepSpeed's default of 5e8 elements allocates a flat buffer of 1 GB in half precision.
    "zero_optimization": {"reduce_bucket_size": 50_000_000, "allgather_bucket_size": 50_000_000},
    # AdamW comes from torch, so that nothing is compiled at start; offload must accept it.
    "zero_force_ds_cpu_optimizer": False,
}


def engine_json(run: RunConfig, world_size: int) -> dict[str, Any]:
    """DeepSpeed's configuration of `run`, which must have no problems on `world_size` ranks.

    Holds neither `optimizer` nor `scheduler`: both are handed in as objects.
    """
    completed = _merged(OVERRIDABLE, run.engine.passed_through)
    return _merged(completed, _decided(run.engine, run.parallel.data_parallel_size(world_size)))


def _decided(engine: EngineConfig, data_parallel_size: int) -> dict[str, Any]:
    decided: dict[str, Any] = {
        "train_batch_size": engine.global_batch_size,
        "train_micro_batch_size_per_gpu": engine.micro_batch_size,
        "gradient_accumulation_steps": engine.accumulation(data_parallel_size),
        "gradient_clipping": engine.gradient_clipping,
        "zero_optimization": {"stage": engine.zero_stage},
        # Integers travel between stages beside the activations; cut in pieces they arrive damaged. Layers are
        # recomputed by the pipeline module itself.
        "pipeline": {"pipe_partitioned": False, "grad_partitioned": False, "activation_checkpoint_interval": 0},
        "fp16": {"enabled": False},
        "bf16": {"enabled": False},
    }
    if engine.precision == "fp16":
        decided["fp16"] = {"enabled": True, **asdict(engine.loss_scaling)}
    if engine.precision == "bf16":
        decided["bf16"] = {"enabled": True}
    if engine.accumulation_dtype != engine.precision or engine.grad_accum_dtype:
        decided["data_types"] = {"grad_accum_dtype": engine.accumulation_dtype}
    return decided


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Both, blocks merged key by key; `above` wins."""
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = _merged(merged[key], value) if both else value
    return merged
