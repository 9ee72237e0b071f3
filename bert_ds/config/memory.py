"""Parameters and memory of every rank, predicted from the configuration alone.

Weights, gradients and optimizer state follow from what DeepSpeed allocates. Activations are an estimate after
Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022), section 4; caches of the
allocator, communication buffers and the CUDA context are not part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bert_ds.config.run import RunConfig
from bert_ds.config.stages import layers_of_stages

LOGIT_COPIES = 3
"""Half-precision logits, fp32 logits and their gradient live together for a moment."""


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """One rank of the pipeline. Sizes are in bytes."""

    stages: tuple[int, ...]
    """Stages that it holds."""
    parameters: int
    """Numbers that this rank holds, replicated ones and the last stage's copy of a tied word table included."""
    weights: int
    gradients: int
    optimizer: int
    """fp32 masters and both Adam moments, this rank's share of them under ZeRO 1."""
    activations: int
    """Kept for the backward pass of all micro-batches in flight."""
    logits: int
    saved: int
    """What it writes of a checkpoint at most, and keeps a copy of in the memory of its machine meanwhile."""

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits


def predict_memory(run: RunConfig, world_size: int) -> tuple[RankMemory, ...]:
    """What each rank of a pipeline needs; the run must have no problems on `world_size` ranks."""
    return tuple(_rank(run, world_size, pp_rank) for pp_rank in range(run.parallel.pipeline_model_parallel_size))


def _rank(run: RunConfig, world_size: int, pp_rank: int) -> RankMemory:
    engine, stages = run.engine, run.parallel.stages_of(pp_rank)
    parameters = sum(stage_parameters(run, stage) for stage in stages)
    copied = sum(_copied(run, stage) for stage in stages)
    shares = run.parallel.data_parallel_size(world_size) if engine.zero_stage == 1 else 1
    half = engine.precision != "fp32"
    masters = 4 if half or engine.zero_stage == 1 else 0
    return RankMemory(
        stages=stages,
        parameters=parameters,
        weights=parameters * (2 if half else 4),
        gradients=parameters * _gradient_bytes(run),
        # The word table's copy on the last stage is updated by the first one.
        optimizer=(parameters - copied) * (masters + 8) // shares,
        activations=_activations(run, world_size, stages),
        logits=_logits(run) if run.parallel.num_stages - 1 in stages else 0,
        saved=(parameters - copied) * (12 if run.output.save_optim else 4) // shares,
    )


def _copied(run: RunConfig, stage: int) -> int:
    """Numbers of the tied word table's copy, which the last stage holds on another rank than the first one."""
    apart = run.parallel.num_stages > 1 and not run.parallel.is_dualpipev
    if run.model.untie_embeddings_and_output_weights or not apart or stage < run.parallel.num_stages - 1:
        return 0
    return run.model.padded_vocab_size * run.model.hidden_size // run.parallel.tensor_model_parallel_size


def stage_parameters(run: RunConfig, stage: int) -> int:
    """Numbers held by one rank of `stage`: matrices and the word table cut by tensor parallelism, the rest whole."""
    model, tensor = run.model, run.parallel.tensor_model_parallel_size
    hidden, ffn, projected = model.hidden_size, model.ffn_size, model.projection_size
    word_table = model.padded_vocab_size * hidden // tensor
    sharded = (4 * projected * hidden + 3 * projected + 2 * hidden * ffn + ffn) // tensor
    count = layers_of_stages(model, run.parallel)[stage] * (sharded + 6 * hidden)
    if stage == 0:
        count += word_table + (model.num_positions + model.num_token_types) * hidden
    if stage == run.parallel.num_stages - 1:
        count += word_table if model.untie_embeddings_and_output_weights else _copied(run, stage)
        count += 2 * hidden + (hidden * hidden + 3 * hidden) + model.padded_vocab_size // tensor
        count += (hidden * hidden + 3 * hidden + 2) if model.binary_head else 0
    return count


def _gradient_bytes(run: RunConfig) -> int:
    """Bytes a parameter; with bf16 weights the fp32 sums stand beside the gradients of one micro-batch."""
    own = 4 if run.engine.precision == "fp32" else 2
    return own if run.engine.accumulation_dtype == run.engine.precision else own + 4


def _activations(run: RunConfig, world_size: int, stages: Sequence[int]) -> int:
    """Activations of the micro-batches whose backward pass is still to come.

    Of S stages, both schedules hold S - s micro-batches of stage s: 1F1B, and DualPipeV, whose rank r of S/2 has S - r
    on the way out and r + 1 on the way back.
    """
    accumulation = run.engine.accumulation(run.parallel.data_parallel_size(world_size))
    layers = layers_of_stages(run.model, run.parallel)
    kept, recomputed = 0, 0
    for stage in stages:
        kept_of_one, recomputed_of_one = _stage_activations(run, layers[stage])
        kept += min(run.parallel.num_stages - stage, accumulation) * kept_of_one
        recomputed = max(recomputed, recomputed_of_one)
    return kept + recomputed


def _stage_activations(run: RunConfig, layers: int) -> tuple[int, int]:
    """Bytes that `layers` keep for one micro-batch, and those that its backward pass computes again at a time."""
    linear, attention = _linear_activations(run), _attention_activations(run)
    if run.model.recompute_granularity == "selective":
        return layers * linear, attention
    layer, interval = linear + attention, run.recompute_interval
    if not interval:
        return layers * layer, 0
    if run.model.recompute_method == "block":
        recomputed = min(interval, layers)
        return recomputed * _hidden_bytes(run) + (layers - recomputed) * layer, layer
    return -(-layers // interval) * _hidden_bytes(run), min(interval, layers) * layer


def _linear_activations(run: RunConfig) -> int:
    """Bytes one layer keeps for one micro-batch, without those of attention between its two projections."""
    model, tensor = run.model, run.parallel.tensor_model_parallel_size
    scale = 2 if run.engine.precision == "fp32" else 1
    tokens = run.engine.micro_batch_size * model.seq_length
    return tokens * (10 * model.hidden_size + (8 * model.projection_size + 4 * model.ffn_size) // tensor) * scale


def _attention_activations(run: RunConfig) -> int:
    """Bytes that attention adds: its matrix where it is written to memory, and a mask as kernels take it."""
    model, tensor = run.model, run.parallel.tensor_model_parallel_size
    scale = 2 if run.engine.precision == "fp32" else 1
    tokens = run.engine.micro_batch_size * model.seq_length
    kept = 0
    if model.attention_backend in ("local", "unfused"):
        kept += 5 * model.num_attention_heads * tokens * model.seq_length * scale // tensor
    if run.data.row_kind == "packed":
        kept += 2 * tokens * model.seq_length * scale
    return kept


def _hidden_bytes(run: RunConfig) -> int:
    element = 4 if run.engine.precision == "fp32" else 2
    return run.engine.micro_batch_size * run.model.seq_length * run.model.hidden_size * element


def _logits(run: RunConfig) -> int:
    rows = run.engine.micro_batch_size * run.data.predictions_per_row(
        run.model.seq_length, run.data.sequences_per_row)
    return rows * run.model.padded_vocab_size // run.parallel.tensor_model_parallel_size * 4 * LOGIT_COPIES
