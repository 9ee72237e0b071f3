"""The table of flags: Megatron-LM's names where Megatron has the setting; type, default and help are the field's."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bert_ds.cli.coerce import WrongTypeError

TAKES_VALUE = object()
"""Marks a flag whose value follows it; any other constant is what the bare flag means."""


@dataclass(frozen=True, kw_only=True)
class Flag:
    """One flag and the setting that it overrides."""

    name: str
    setting: str
    constant: Any = TAKES_VALUE
    item: int | None = None
    """Place within a setting of several values: --adam-beta2 is the second of `engine.betas`."""
    convert: Callable[[str], Any] | None = None
    """From the flag's unit to the setting's."""
    displaces: str | None = None
    """Another setting that means the same and loses its value from a file."""
    implies: tuple[tuple[str, Any], ...] = ()
    """Settings and the values that they get with it, unless a flag gives them others."""
    help: str = ""
    """Only where the documentation of the field does not fit the flag."""


def power_of_two(text: str) -> int:
    """The exponent of a loss scale that is a power of two."""
    try:
        scale = float(text)
    except ValueError:
        scale = 0.0
    if not (scale >= 1 and math.frexp(scale)[0] == 0.5):
        raise WrongTypeError("a power of two such as 65536")
    return math.frexp(scale)[1] - 1


def zero_stage(text: str) -> int:
    """A ZeRO stage that works with pipelines."""
    if text not in ("0", "1"):
        raise WrongTypeError("0 or 1, the stages that the pipeline engine serves")
    return int(text)


def local_spec(text: str) -> str:
    """The layer implementation that Megatron's `--spec local` names."""
    if text != "local":
        raise WrongTypeError("local; layers are not taken from a module")
    return text


def virtual_stages(text: str) -> str:
    """The pipeline schedule with so many stages a rank."""
    schedules = {"1": "1f1b", "2": "dualpipev"}
    if text not in schedules:
        raise WrongTypeError("1, or 2 as DualPipeV gives each pipeline rank; no schedule gives it more")
    return schedules[text]


MODEL_FLAGS = (
    Flag(name="--num-layers", setting="model.num_layers"),
    Flag(name="--hidden-size", setting="model.hidden_size"),
    Flag(name="--num-attention-heads", setting="model.num_attention_heads"),
    Flag(name="--kv-channels", setting="model.kv_channels"),
    Flag(name="--ffn-hidden-size", setting="model.ffn_hidden_size"),
    Flag(name="--seq-length", setting="model.seq_length"),
    Flag(name="--max-position-embeddings", setting="model.max_position_embeddings"),
    Flag(name="--position-embedding-type", setting="model.position_embedding_type"),
    Flag(name="--use-rotary-position-embeddings", setting="model.position_embedding_type", constant="rope",
         help="Megatron's former name for --position-embedding-type rope."),
    Flag(name="--rotary-percent", setting="model.rotary_percent"),
    Flag(name="--rotary-base", setting="model.rotary_base"),
    Flag(name="--make-vocab-size-divisible-by", setting="model.make_vocab_size_divisible_by"),
    Flag(name="--hidden-dropout", setting="model.hidden_dropout"),
    Flag(name="--attention-dropout", setting="model.attention_dropout"),
    Flag(name="--norm-epsilon", setting="model.layernorm_epsilon"),
    Flag(name="--layernorm-epsilon", setting="model.layernorm_epsilon"),
    Flag(name="--init-method-std", setting="model.init_method_std"),
    Flag(name="--norm-placement", setting="model.norm_placement"),
    Flag(name="--activation", setting="model.activation"),
    Flag(name="--head-activation", setting="model.head_activation"),
    Flag(name="--bert-no-binary-head", setting="model.binary_head", constant=False,
         help="Masked-LM loss only: no sentence-order head, no pooler, no token types."),
    Flag(name="--untie-embeddings-and-output-weights", setting="model.untie_embeddings_and_output_weights",
         constant=True),
    Flag(name="--transformer-impl", setting="model.transformer_impl"),
    Flag(name="--spec", setting="model.transformer_impl", convert=local_spec,
         help="Megatron's name for --transformer-impl local: local."),
    Flag(name="--attention-backend", setting="model.attention_backend"),
    Flag(name="--fp8-format", setting="model.fp8_format"),
    Flag(name="--fp8-recipe", setting="model.fp8_recipe"),
    Flag(name="--fp8-margin", setting="model.fp8_margin"),
    Flag(name="--fp8-amax-history-len", setting="model.fp8_amax_history_len"),
    Flag(name="--fp8-amax-compute-algo", setting="model.fp8_amax_compute_algo"),
    Flag(name="--recompute-granularity", setting="model.recompute_granularity"),
    Flag(name="--recompute-activations", setting="model.recompute_granularity", constant="selective",
         help="Megatron's short form of --recompute-granularity selective."),
    Flag(name="--recompute-method", setting="model.recompute_method"),
    Flag(name="--compile", setting="model.compile", constant=True),
    Flag(name="--no-compile", setting="model.compile", constant=False,
         help="Run the layers as they are written, as with Transformer Engine."),
)

PARALLEL_FLAGS = (
    Flag(name="--tensor-model-parallel-size", setting="parallel.tensor_model_parallel_size"),
    Flag(name="--sequence-parallel", setting="parallel.sequence_parallel", constant=True),
    Flag(name="--pipeline-model-parallel-size", setting="parallel.pipeline_model_parallel_size"),
    Flag(name="--pipeline-schedule", setting="parallel.pipeline_schedule"),
    Flag(name="--num-virtual-stages-per-pipeline-rank", setting="parallel.pipeline_schedule", convert=virtual_stages,
         help="Megatron's name for --pipeline-schedule: 2 is dualpipev, 1 is 1f1b."),
    Flag(name="--stage-layers", setting="parallel.stage_layers"),
)

DATA_FLAGS = (
    Flag(name="--data-path", setting="data.data_path"),
    *(Flag(name=f"--{split}-data-path", setting=f"data.{split}_data_path", displaces="data.data_path")
      for split in ("train", "valid", "test")),
    Flag(name="--vocab-file", setting="data.vocab_file"),
    Flag(name="--vocab-extra-bos-eos", setting="data.vocab_extra_bos_eos", constant=True),
    Flag(name="--tokenizer-type", setting="data.tokenizer_type"),
    Flag(name="--split", setting="data.split"),
    Flag(name="--planned-samples", setting="data.planned_samples"),
    Flag(name="--mid-level-dataset-surplus", setting="data.mid_level_dataset_surplus"),
    Flag(name="--data-cache-path", setting="data.data_cache_path"),
    Flag(name="--short-seq-prob", setting="data.short_seq_prob"),
    Flag(name="--sentence-task", setting="data.sentence_task"),
    Flag(name="--mask-prob", setting="data.mask_prob"),
    Flag(name="--masking-max-ngram", setting="data.masking_max_ngram"),
    Flag(name="--no-masking-full-word", setting="data.masking_do_full_word", constant=False,
         help="Mask each piece of a word by itself instead of whole words."),
    Flag(name="--masking-use-longer-ngrams", setting="data.masking_use_longer_ngrams", constant=True),
    Flag(name="--masking-use-geometric-distribution", setting="data.masking_use_geometric_distribution",
         constant=True),
    Flag(name="--masking-do-permutation", setting="data.masking_do_permutation", constant=True),
    Flag(name="--num-workers", setting="data.num_workers"),
    Flag(name="--rows-are-full", setting="data.rows_are_full", constant=True),
    Flag(name="--pack-sequences", setting="data.pack_sequences", constant=True),
    Flag(name="--max-sequences-per-row", setting="data.max_sequences_per_row"),
)

ENGINE_FLAGS = (
    Flag(name="--micro-batch-size", setting="engine.micro_batch_size"),
    Flag(name="--global-batch-size", setting="engine.global_batch_size"),
    Flag(name="--fp16", setting="engine.precision", constant="fp16", help="Half precision with loss scaling."),
    Flag(name="--bf16", setting="engine.precision", constant="bf16", help="bfloat16, gradients summed in fp32."),
    Flag(name="--fp32", setting="engine.precision", constant="fp32", help="Single precision."),
    Flag(name="--accumulate-allreduce-grads-in-fp32", setting="engine.grad_accum_dtype", constant="fp32",
         help="Sum the gradients of micro-batches in fp32; bf16 runs always do."),
    Flag(name="--zero-stage", setting="engine.zero_stage", convert=zero_stage,
         help="ZeRO stage: 1 shards the optimizer state over the data-parallel ranks, 0 does not."),
    Flag(name="--use-distributed-optimizer", setting="engine.zero_stage", constant=1,
         help="Megatron's name for ZeRO stage 1."),
    Flag(name="--clip-grad", setting="engine.gradient_clipping"),
    Flag(name="--lr", setting="engine.lr"),
    Flag(name="--adam-beta1", setting="engine.betas", item=0, help="Decay of AdamW's first moment."),
    Flag(name="--adam-beta2", setting="engine.betas", item=1, help="Decay of AdamW's second moment."),
    Flag(name="--adam-eps", setting="engine.eps"),
    Flag(name="--weight-decay", setting="engine.weight_decay"),
    Flag(name="--loss-scale", setting="loss_scaling.loss_scale"),
    Flag(name="--initial-loss-scale", setting="loss_scaling.initial_scale_power", convert=power_of_two,
         help="First dynamic loss scale, a power of two."),
    Flag(name="--min-loss-scale", setting="loss_scaling.min_loss_scale"),
    Flag(name="--loss-scale-window", setting="loss_scaling.loss_scale_window"),
    Flag(name="--hysteresis", setting="loss_scaling.hysteresis"),
    Flag(name="--recompute-num-layers", setting="engine.activation_checkpoint_interval"),
)

SCHEDULE_FLAGS = (
    Flag(name="--train-iters", setting="schedule.train_iters"),
    Flag(name="--seed", setting="schedule.seed"),
    Flag(name="--lr-decay-style", setting="schedule.lr_decay_style"),
    Flag(name="--lr-decay-iters", setting="schedule.lr_decay_iters"),
    Flag(name="--lr-warmup-fraction", setting="schedule.lr_warmup_fraction", displaces="schedule.lr_warmup_iters"),
    Flag(name="--lr-warmup-iters", setting="schedule.lr_warmup_iters", displaces="schedule.lr_warmup_fraction"),
    Flag(name="--lr-warmup-init", setting="schedule.lr_warmup_init"),
    Flag(name="--min-lr", setting="schedule.min_lr"),
    Flag(name="--lr-wsd-decay-iters", setting="schedule.lr_wsd_decay_iters"),
    Flag(name="--lr-wsd-decay-style", setting="schedule.lr_wsd_decay_style"),
    Flag(name="--eval-interval", setting="schedule.eval_interval"),
    Flag(name="--eval-iters", setting="schedule.eval_iters"),
    Flag(name="--eval-micro-batch-size", setting="schedule.eval_micro_batch_size"),
    Flag(name="--eval-seq-length", setting="schedule.eval_seq_length"),
    Flag(name="--loss-normalization", setting="schedule.loss_normalization"),
    Flag(name="--rampup-batch-size", setting="schedule.rampup_batch_size",
         displaces="schedule.step_batch_size_schedule"),
    Flag(name="--step-batch-size-schedule", setting="schedule.step_batch_size_schedule",
         displaces="schedule.rampup_batch_size"),
    Flag(name="--train-minutes", setting="schedule.train_minutes"),
    Flag(name="--skip-train", setting="schedule.skip_train", constant=True),
    Flag(name="--exit-interval", setting="schedule.exit_interval"),
    Flag(name="--exit-duration-in-mins", setting="schedule.exit_duration_in_mins"),
    Flag(name="--deterministic-mode", setting="schedule.deterministic_mode", constant=True),
)

OUTPUT_FLAGS = (
    Flag(name="--save", setting="output.save"),
    Flag(name="--load", setting="output.load"),
    Flag(name="--ckpt-step", setting="output.ckpt_step"),
    Flag(name="--exit-on-missing-checkpoint", setting="output.exit_on_missing_checkpoint", constant=True),
    Flag(name="--finetune", setting="output.finetune", constant=True),
    Flag(name="--use-checkpoint-args", setting="output.use_checkpoint_args", constant=True),
    Flag(name="--no-load-optim", setting="output.load_optim", constant=False,
         help="Start AdamW's moments and the loss scale afresh, at the checkpoint's iteration, learning rate and place "
              "in the data."),
    Flag(name="--no-save-optim", setting="output.save_optim", constant=False,
         help="Save weights without AdamW's moments: a third of the size, to resume with --no-load-optim."),
    Flag(name="--save-interval", setting="output.save_interval"),
    Flag(name="--keep-last", setting="output.keep_last"),
    Flag(name="--keep-every", setting="output.keep_every"),
    Flag(name="--save-retain-interval", setting="output.keep_every", implies=(("output.keep_last", 1),),
         help="Megatron's name for --keep-every, with --keep-last 1."),
    Flag(name="--no-async-save", setting="output.async_save", constant=False,
         help="Let training wait while a checkpoint is written, instead of writing it from a copy in host memory."),
    Flag(name="--export-hf-interval", setting="output.export_hf_interval"),
    Flag(name="--save-deepspeed", setting="output.save_deepspeed"),
    Flag(name="--tensorboard-dir", setting="output.tensorboard_dir"),
    Flag(name="--log-interval", setting="output.log_interval"),
)

GUARD_FLAGS = (
    Flag(name="--on-nan-loss", setting="guards.on_nan_loss"),
    Flag(name="--on-loss-spike", setting="guards.on_loss_spike"),
    Flag(name="--loss-spike-deviations", setting="guards.loss_spike_deviations"),
    Flag(name="--loss-spike-window", setting="guards.loss_spike_window"),
    Flag(name="--bad-losses-in-window", setting="guards.bad_losses_in_window"),
    Flag(name="--step-limit-mins", setting="guards.step_limit_mins"),
    Flag(name="--data-wait-s", setting="guards.data_wait_s"),
)

GROUPS: dict[str, tuple[Flag, ...]] = {
    "model (recipe)": MODEL_FLAGS,
    "layout (recipe)": PARALLEL_FLAGS,
    "data (recipe)": DATA_FLAGS,
    "batch, precision and optimizer (DeepSpeed JSON)": ENGINE_FLAGS,
    "schedule (recipe)": SCHEDULE_FLAGS,
    "output (recipe)": OUTPUT_FLAGS,
    "guards (recipe)": GUARD_FLAGS,
}
FLAGS = tuple(flag for group in GROUPS.values() for flag in group)
