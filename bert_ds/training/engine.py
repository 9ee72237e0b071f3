"""Model, optimizer and DeepSpeed's engine, put together for one rank."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from deepspeed.runtime.config import DeepSpeedConfig
from torch import nn

from bert_ds.compat import missing_compiler, quiet
from bert_ds.config.model import ModelConfig
from bert_ds.config.run import RunConfig
from bert_ds.config.stages import stage_bounds
from bert_ds.model.bert import ComputeSettings
from bert_ds.model.loss import LossSums, PretrainingLoss
from bert_ds.parallel.context import ParallelContext
from bert_ds.training.pipeline import BertPipeline, DualPipeVPipeline
from bert_ds.training.pipeline_engine import BertDualPipeVEngine, BertPipelineEngine

log = logging.getLogger(__name__)
_SCALER_FIELDS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def build_pipeline(run: RunConfig, ctx: ParallelContext, sums: LossSums) -> BertPipeline:
    """What this rank holds of the model with its initial weights, in fp32; DeepSpeed casts it."""
    accumulation = run.engine.accumulation(ctx.dp_size)
    loss = PretrainingLoss(run.model, ctx, sums, averaged_over=accumulation * ctx.dp_size,
                           per_micro_batch=run.schedule.loss_normalization == "micro_batch")
    compute = ComputeSettings(
        DTYPES[run.engine.precision], run.data.row_kind, run.data.sequences_per_row,
        deterministic=run.schedule.deterministic_mode)
    pipeline = DualPipeVPipeline if ctx.dualpipev else BertPipeline
    with quiet():
        return pipeline(settle_compilation(run.model, ctx.device, compute), ctx, compute, loss,
                        bounds=stage_bounds(run.model, run.parallel), seed=run.schedule.seed,
                        recompute_every=run.recompute_interval)


def settle_compilation(model: ModelConfig, device: torch.device, compute: ComputeSettings) -> ModelConfig:
    """The model with its choice of compilation settled: where it was left open, and where there is no compiler.

    A compiler picks among kernels by timing them, so that another process may sum in another order.
    """
    compiled = model.compile
    if compiled is None:
        compiled = device.type == "cuda" and model.transformer_impl == "local" and not compute.deterministic
    missing = missing_compiler(device.type) if compiled else None
    if missing is not None:
        log.warning("compile: this machine lacks %s; layers run uncompiled, which is slower", missing)
    return replace(model, compile=compiled and missing is None)


def parameter_groups(pipeline: BertPipeline, weight_decay: float) -> list[dict[str, Any]]:
    """Megatron-LM's two groups: matrices and tables decay, biases and LayerNorms do not. Copies are their owner's."""
    decayed: list[nn.Parameter] = []
    kept: list[nn.Parameter] = []
    for local in pipeline.local_parameters():
        if local.is_copy:
            continue
        no_decay = local.parameter.dim() == 1 or local.name.endswith(".bias")
        (kept if no_decay else decayed).append(local.parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": kept, "weight_decay": 0.0}]


def build_engine(
    run: RunConfig, ctx: ParallelContext, pipeline: BertPipeline, settings: Mapping[str, Any]
) -> BertPipelineEngine:
    """DeepSpeed's engine around `pipeline`, made as `deepspeed.initialize` makes its pipeline engines.

    Args:
        run: the run.
        ctx: this rank's place.
        pipeline: what this rank holds of the model.
        settings: the completed DeepSpeed JSON (cli.deepspeed_json.engine_json).
    """
    optimizer = torch.optim.AdamW(
        parameter_groups(pipeline, run.engine.weight_decay), lr=run.engine.lr, betas=run.engine.betas,
        eps=run.engine.eps, fused=ctx.device.type == "cuda")
    engine = BertDualPipeVEngine if ctx.dualpipev else BertPipelineEngine
    with quiet():
        return engine(
            args=None, model=pipeline, optimizer=optimizer, mpu=pipeline.mpu(), dist_init_required=False,
            config=dict(settings), config_class=DeepSpeedConfig(dict(settings), pipeline.mpu()))


def set_global_batch_size(engine: Any, rows: int) -> None:
    """Sets the rows of the next step: more or fewer micro-batches of the same size, over which losses are averaged."""
    if rows != engine.train_batch_size():
        engine.set_train_batch_size(rows)
        loss = engine.module.loss_fn
        engine.module.loss_fn = replace(loss, averaged_over=engine.micro_batches * engine.dp_world_size)


def set_learning_rate(engine: Any, rate: float) -> None:
    """Sets the rate of the next update in every parameter group."""
    for group in engine.optimizer.param_groups:
        group["lr"] = rate


class LossScaleCollapse(Exception):  # noqa: N818 - a state of the run, which the trainer answers
    """Gradients overflow although the loss scale cannot fall any further; the weights are those before the step."""


def train_step(engine: Any, micro_batches: Iterator[Any] | None) -> bool:
    """Forward, backward and update over one accumulation window; returns whether the update was skipped.

    Raises:
        LossScaleCollapse: on all ranks alike.
    """
    skipped_before = engine.skipped_steps
    try:
        engine.train_batch(micro_batches)
    except Exception as error:
        # DeepSpeed's loss scaler raises a bare Exception here (runtime/fp16/loss_scaler.py).
        if "loss scale already at minimum" in str(error):
            raise LossScaleCollapse from error
        raise
    return bool(engine.skipped_steps > skipped_before)


def loss_scale(engine: Any) -> float | None:
    """The current fp16 loss scale; None for other precisions."""
    return float(engine.optimizer.loss_scaler.cur_scale) if engine.fp16_enabled() else None


def scaler_state(engine: Any) -> dict[str, Any] | None:
    """What dynamic loss scaling has to remember; None for other precisions."""
    if not engine.fp16_enabled():
        return None
    scaler = engine.optimizer.loss_scaler
    return {name: getattr(scaler, name) for name in _SCALER_FIELDS if getattr(scaler, name, None) is not None}


def load_scaler_state(engine: Any, saved: Mapping[str, Any]) -> None:
    """Goes on from a saved state; a run in another precision, or with a static scale, keeps its own."""
    if engine.fp16_enabled() and engine.dynamic_loss_scale():
        for name, value in saved.items():
            if hasattr(engine.optimizer.loss_scaler, name):
                setattr(engine.optimizer.loss_scaler, name, value)
