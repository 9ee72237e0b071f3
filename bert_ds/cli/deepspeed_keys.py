"""Keys of a DeepSpeed configuration: those we read, those we hand on, those that cannot be served and why.

The lists are those of DeepSpeed 0.19.8, runtime/config.py and the constants beside it.
"""

from __future__ import annotations

READ = frozenset({
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping", "fp16",
    "bf16", "data_types", "zero_optimization", "optimizer", "pipeline",
})

HANDED_ON = frozenset({
    "aio", "checkpoint", "comet", "comms_logger", "communication_data_type", "compile", "csv_monitor",
    "dataloader_drop_last", "disable_allgather", "disable_python_gc", "dump_state", "gradient_allreduce_op",
    "gradient_predivide_factor", "log_level", "managed_gradient_accumulation", "memory_breakdown",
    "prescale_gradients", "seq_parallel_communication_data_type", "steps_per_print", "tensorboard", "timers",
    "vocabulary_size", "wall_clock_breakdown", "wandb", "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
})

PRECISIONS_INSTEAD = "use fp16 or bf16"
RECIPE_LAYOUT_INSTEAD = "set parallel.tensor_model_parallel_size in the recipe"

REFUSED: dict[str, tuple[str, str]] = {
    "amp": ("was removed from DeepSpeed", PRECISIONS_INSTEAD),
    "autotuning": ("does not know pipelines", "try micro batch sizes with --dry-run"),
    "bfloat16": ("is the former name of bf16", "write bf16"),
    "checkpoint_engine": ("checkpoints are written in this package's own format", "leave it out"),
    "compression_training": ("was removed from DeepSpeed", "leave it out"),
    "curriculum_learning": ("was removed from DeepSpeed", "train in two runs, the second with a longer seq_length"),
    "data_efficiency": ("does not reach the pipeline engine", "leave it out; the recipe's data section decides"),
    "eigenvalue": ("was removed from DeepSpeed", "leave it out"),
    "elasticity": ("was removed from DeepSpeed", "set the batch sizes; checkpoints resume on any number of ranks"),
    "expert_parallel": ("this model has no experts", "leave it out"),
    "flops_profiler": ("does not reach the pipeline engine", "read the FLOPS of the log line"),
    "graph_harvesting": ("was removed from DeepSpeed", "leave it out"),
    "hybrid_engine": ("is for reinforcement learning", "leave it out"),
    "nebula": ("was removed from DeepSpeed", "leave it out; set output.save in the recipe"),
    "progressive_layer_drop": ("was removed from DeepSpeed", "leave it out"),
    "quantize_training": ("was removed from DeepSpeed", "leave it out"),
    "sequence_parallel_size": ("does not work with the pipeline engine", RECIPE_LAYOUT_INSTEAD),
    "sparse_attention": ("was removed from DeepSpeed", "choose model.attention_backend in the recipe"),
    "sparse_gradients": ("was removed from DeepSpeed", "leave it out"),
    "tensor_parallel": ("the model's own layers are tensor parallel", RECIPE_LAYOUT_INSTEAD),
    "torch_autocast": ("does not reach the pipeline engine", PRECISIONS_INSTEAD),
    "weight_quantization": ("is for inference", "leave it out"),
    "activation_checkpointing": ("configures a recomputation that this package does not use",
                                 "set pipeline.activation_checkpoint_interval: 1"),
}

FP16_KEYS = frozenset({"enabled", "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis",
                       "min_loss_scale"})
FP16_HANDED_ON = frozenset({"consecutive_hysteresis"})
BF16_KEYS = frozenset({"enabled"})
BF16_HANDED_ON = frozenset({"immediate_grad_update", "check_grad_overflow"})
DATA_TYPES_KEYS = frozenset({"grad_accum_dtype"})
OPTIMIZER_PARAMS = frozenset({"lr", "betas", "eps", "weight_decay"})
ZERO_KEYS = frozenset({"stage"})
ZERO_HANDED_ON = frozenset({
    "allgather_bucket_size", "allgather_partitions", "contiguous_gradients", "ignore_unused_parameters",
    "offload_optimizer", "overlap_comm", "reduce_bucket_size", "reduce_scatter", "round_robin_gradients",
    "use_multi_rank_bucket_allreduce",
})
PIPELINE_KEYS = frozenset({"activation_checkpoint_interval", "pipe_partitioned", "grad_partitioned"})

NO_MASTERS = ("leaves no fp32 masters to save, resume and export", "leave it out")
STAGE_3_ONLY = ("belongs to ZeRO stage 3, which the pipeline engine does not serve", "leave it out")
REFUSED_IN_BLOCKS: dict[str, tuple[str, str]] = {
    "fp16.auto_cast": ("does not reach the pipeline engine", "leave it out"),
    "fp16.fp16_master_weights_and_grads": NO_MASTERS,
    "bf16.bf16_master_weights_and_grads": NO_MASTERS,
    "bf16.bf16_optimizer_states": NO_MASTERS,
    "data_types.param_dtype": ("follows from fp16 and bf16", "leave it out"),
    "data_types.buffer_dtype": ("the model has no float buffers", "leave it out"),
    "data_types.keep_in_fp32_modules": ("is not served in a pipeline", "leave it out; norms compute in fp32 anyway"),
    "zero_optimization.offload_param": STAGE_3_ONLY,
    "zero_optimization.cpu_offload": ("is a former name", 'write "offload_optimizer": {"device": "cpu"}'),
    "zero_optimization.cpu_offload_param": STAGE_3_ONLY,
    "zero_optimization.zenflow": ("replaces the optimizer step that the checkpoints rely on", "leave it out"),
    "zero_optimization.mics_shard_size": ("was removed from DeepSpeed", "leave it out"),
    "zero_optimization.mics_hierarchical_params_gather": ("was removed from DeepSpeed", "leave it out"),
    "zero_optimization.zeropp_loco_param": ("was removed from DeepSpeed", "leave it out"),
    "zero_optimization.elastic_checkpoint": ("concerns DeepSpeed's own checkpoints",
                                             "leave it out; checkpoints resume on any layout"),
    "pipeline.stages": ("the recipe decides", "set parallel.pipeline_model_parallel_size in the recipe"),
    "pipeline.partition": ("layers are cut by their cost", "leave it out"),
    "pipeline.partition_method": ("layers are cut by their cost", "leave it out"),
    "pipeline.seed_layers": ("weights are drawn from schedule.seed", "leave it out"),
}
