"""Flags of Megatron-LM (and of DeepSpeed's programs) that are no setting here: without effect, or refused.

One without effect is accepted, so that a command line runs as it stands, and the log says why it changes nothing. What
would make another run than the one asked for is refused, with what to use instead.
"""

from __future__ import annotations

from dataclasses import dataclass

_FUSION = "the compiler decides about fusion"
_NO_GENERATOR = "dropout and data are functions of the seed and the step; no generator state is stored"
_ALWAYS_LOGGED = "it is always written"
_FORMAT = "checkpoints have one format, which any layout reads"
_SHARDED = "every rank writes its share of a checkpoint"
_ZERO = "DeepSpeed's ZeRO decides about it"
_OWN_HOOKS = "no cluster's own scheduler is asked"

WITHOUT_EFFECT: dict[str, str] = {
    "--use-mcore-models": "there is one implementation of the model",
    "--use-cpu-initialization": "initial weights are always drawn from the seed, the same on every device",
    "--no-initialization": "initial weights are drawn in any case, and a checkpoint replaces them",
    "--no-gradient-accumulation-fusion": "nothing is fused into gradient accumulation",
    "--no-async-tensor-model-parallel-allreduce": "tensor-parallel reductions are not overlapped",
    "--no-bias-gelu-fusion": _FUSION,
    "--no-bias-dropout-fusion": _FUSION,
    "--no-rope-fusion": _FUSION,
    "--no-persist-layer-norm": _FUSION,
    "--cross-entropy-loss-fusion": _FUSION,
    "--disable-jit-fuser": "--no-compile runs the layers as they are written",
    "--no-masked-softmax-fusion": "--attention-backend decides who computes the softmax",
    "--attention-softmax-in-fp32": "the softmax is always computed in fp32",
    "--allow-ambiguous-pad-tokens": "padding follows from the lengths of rows, whatever id [PAD] has",
    "--no-load-rng": _NO_GENERATOR,
    "--no-save-rng": _NO_GENERATOR,
    "--te-rng-tracker": _NO_GENERATOR,
    "--override-opt-param-scheduler": "a resumed run follows the schedule of its own settings; the log tells what "
                                      "differs from the checkpoint's",
    "--exit-signal-handler": "SIGTERM, SIGINT and SIGUSR1 always save a checkpoint before the run ends",
    "--exit-signal-handler-for-dataloader": "the loader has no processes of its own",
    "--check-for-nan-in-loss-and-grad": "it is always looked for; --on-nan-loss decides what follows",
    "--check-for-spiky-loss": "spikes are always looked for; --on-loss-spike decides what follows",
    "--check-for-large-grads": "the norm of gradients is always logged, and --clip-grad bounds it",
    "--log-max-attention-logit": "attention kernels do not tell their logits",
    "--log-runtime-to-tensorboard": "the time of a record stands in its event",
    "--decrease-batch-size-if-needed": "a batch that does not fit is told before the run, with one that does",
    "--decoupled-weight-decay": "AdamW's weight decay is decoupled",
    "--overlap-grad-reduce": _ZERO,
    "--overlap-param-gather": _ZERO,
    "--overlap-param-gather-with-optimizer-step": _ZERO,
    "--align-grad-reduce": _ZERO,
    "--no-align-param-gather": _ZERO,
    "--ddp-average-in-collective": _ZERO,
    "--no-overlap-p2p-communication": "stages exchange what DeepSpeed's schedule says",
    "--async-save": "checkpoints are written beside training; --no-async-save lets training wait",
    "--ckpt-fully-parallel-save": _SHARDED,
    "--ckpt-fully-parallel-load": "every rank reads what it needs of a checkpoint",
    "--ckpt-assume-constant-structure": _FORMAT,
    "--use-dist-ckpt": _FORMAT,
    "--auto-detect-ckpt-format": _FORMAT,
    "--log-progress": "progress is in the log and in metrics.jsonl",
    "--log-throughput": "tokens/s and MFU are always logged",
    "--log-params-norm": "the norm of parameters is not computed; that of gradients is always logged",
    "--log-num-zeros-in-grad": "zeros are not counted; the norm of gradients is always logged",
    "--log-energy": "energy is not measured",
    "--log-straggler": "timers of single ranks are not kept",
    "--log-memory-to-tensorboard": "metrics.jsonl always tells the memory of a GPU",
    "--log-timers-to-tensorboard": "iteration-time is always written",
    "--log-validation-ppl-to-tensorboard": _ALWAYS_LOGGED,
    "--log-world-size-to-tensorboard": "the start of the log tells the layout",
    "--no-log-loss-scale-to-tensorboard": _ALWAYS_LOGGED,
    "--no-log-learning-rate-to-tensorboard": _ALWAYS_LOGGED,
    "--no-one-logger": "nothing is sent to NVIDIA",
    "--manual-gc": "Python's garbage collection is left as it is",
    "--no-mmap-bin-files": "the data are mapped into memory",
    "--adlr-autoresume": f"{_OWN_HOOKS}; recipes/slurm.sh goes on by itself",
    "--data-sharding": "samples are always taken in the order of one list",
    "--no-barrier-with-level-1-timing": "timers do not wait for other ranks",
    "--use-tp-pp-dp-mapping": "ranks of one tensor-parallel group have neighbouring numbers",
}
"""Flags without a value that change nothing here, with the reason."""

VALUE_WITHOUT_EFFECT: dict[str, str] = {
    "--fp8-interval": "Transformer Engine updates its scaling factors after every pass",
    "--distributed-backend": "GPUs use NCCL, CPUs gloo",
    "--ckpt-format": _FORMAT,
    "--dist-ckpt-format": _FORMAT,
    "--dist-ckpt-strictness": "a checkpoint of another model is refused, missing tensors with it",
    "--ddp-bucket-size": _ZERO,
    "--ddp-num-buckets": _ZERO,
    "--timing-log-level": "the log always has the time of an iteration and of waiting for data",
    "--timing-log-option": "the log always has the time of an iteration and of waiting for data",
    "--tensorboard-queue-size": "events are flushed with every line of the log",
    "--tensorboard-log-interval": "--log-interval decides",
    "--manual-gc-interval": "Python's garbage collection is left as it is",
    "--adlr-autoresume-interval": _OWN_HOOKS,
    "--num-dataset-builder-threads": "an index is built by compiled code",
    "--logging-level": "the log is short",
    "--train-sync-interval": "all ranks meet before every step",
    "--distributed-timeout-minutes": "--step-limit-mins says when an iteration counts as stuck",
    "--wandb-project": 'Weights & Biases is switched on by "wandb" in the DeepSpeed JSON',
    "--wandb-entity": 'Weights & Biases is switched on by "wandb" in the DeepSpeed JSON',
    "--wandb-exp-name": 'Weights & Biases is switched on by "wandb" in the DeepSpeed JSON',
    "--wandb-save-dir": 'Weights & Biases is switched on by "wandb" in the DeepSpeed JSON',
}
"""The same for flags with a value."""


@dataclass(frozen=True)
class Only:
    """A flag that may say what happens in any case."""

    values: tuple[str, ...]
    """Values that change nothing; others are refused. Empty for any."""
    why: str
    instead: str = ""


ONLY: dict[str, Only] = {
    "--optimizer": Only(("adam", "adamw"), "the optimizer is AdamW", "leave it out"),
    "--context-parallel-size": Only(("1",), "a row is not cut over ranks", "use --tensor-model-parallel-size"),
    "--expert-model-parallel-size": Only(("1",), "there are no experts", "leave it out"),
    "--dataloader-type": Only(("single",), "samples are taken in the order of one shuffled list", "leave it out"),
    "--model-type": Only(("bert", "BERT"), "only BERT is trained here", "leave it out"),
    "--weight-decay-incr-style": Only(("constant",), "weight decay is constant", "give --weight-decay"),
    "--normalization": Only(("LayerNorm",), "BERT's norms are LayerNorms", "leave it out"),
    "--exit-signal": Only(("SIGTERM", "SIGINT", "SIGUSR1"), "SIGTERM, SIGINT and SIGUSR1 save and end the run",
                          "send one of these"),
    "--rerun-mode": Only(("disabled",), "steps are not computed twice", "leave it out"),
}
"""Flags with one right value."""

REFUSED: dict[str, tuple[str, str]] = {
    "--train-samples": ("lengths are in iterations", "give --train-iters, samples / global batch size"),
    "--lr-decay-samples": ("lengths are in iterations", "give --lr-decay-iters, samples / global batch size"),
    "--lr-warmup-samples": ("lengths are in iterations", "give --lr-warmup-iters, samples / global batch size"),
    "--lr-wsd-decay-samples": ("lengths are in iterations", "give --lr-wsd-decay-iters, samples / global batch size"),
    "--no-fp8-wgrad": ("Transformer Engine computes the gradients of weights in FP8 too", "leave it out"),
    "--fp8-param-gather": ("parameters stay in 16 bits beside their FP8 copies", "leave it out"),
    "--first-last-layers-bf16": ("all layers compute alike", "leave it out"),
    "--tp-only-amax-red": ("all ranks of a stage agree on scaling factors", "leave it out"),
    "--vocab-size": ("the vocabulary file decides", "give --vocab-file"),
    "--vocab-extra-ids": ("the vocabulary file decides", "add the tokens to --vocab-file"),
    "--tokenizer-model": ("the tokenizer is WordPiece with a vocabulary file", "give --vocab-file"),
    "--merge-file": ("the tokenizer is WordPiece with a vocabulary file", "give --vocab-file"),
    "--tokenizer-hf-no-include-special-tokens": (
        "data hold no [CLS] and [SEP]: samples get theirs when they are made",
        "leave it out, and prepare the data with bert_ds.preprocess_data"),
    "--rotary-interleaved": ("rope turns pairs of a head's two halves", "leave it out"),
    "--rotary-seq-len-interpolation-factor": ("positions are not stretched", "choose --rotary-base"),
    "--distribute-saved-activations": ("is not served", "use --sequence-parallel, which cuts the same activations"),
    "--recompute-modules": ("selective recomputation is that of core_attn", "give --recompute-granularity selective"),
    "--use-checkpoint-opt-param-scheduler": (
        "a resumed run follows the schedule of its own settings",
        "give --lr, --min-lr, --lr-decay-style, --lr-decay-iters and --lr-warmup-iters the values of the checkpoint's "
        "run; the log of a resumed run tells those that differ"),
    "--data-parallel-size": ("it is the world size / (tensor x pipeline)", "start more or fewer ranks"),
    "--gradient-accumulation-steps": ("it follows from the batch sizes",
                                      "give --global-batch-size, micro batch x data-parallel size x accumulation"),
    "--eval-global-batch-size": ("an evaluation takes global batches of training's size",
                                 "give --eval-iters, samples / global batch size"),
    "--full-validation": ("an evaluation has --eval-iters global batches", "raise --eval-iters"),
    "--multiple-validation-sets": ("there is one validation set", "blend them in --valid-data-path"),
    "--start-eval-at-iter": ("evaluations are --eval-interval iterations apart", "give --eval-interval"),
    "--iterations-to-skip": ("iterations are left out when their loss asks for it",
                             "give --on-loss-spike skip, or rewind; --on-nan-loss likewise"),
    "--no-check-for-nan-in-loss-and-grad": ("a NaN is never passed over in silence", "give --on-nan-loss skip"),
    "--grad-norm-skip-threshold": ("updates are skipped by the loss", "give --on-loss-spike skip, and --clip-grad"),
    "--mock-data": ("a sample needs text", "run ./run.sh, which brings a small corpus"),
    "--decoupled-lr": ("all parameters have one learning rate", "give --lr"),
    "--decoupled-min-lr": ("all parameters have one learning rate", "give --min-lr"),
    "--start-weight-decay": ("weight decay is constant", "give --weight-decay"),
    "--end-weight-decay": ("weight decay is constant", "give --weight-decay"),
    "--sgd-momentum": ("the optimizer is AdamW", "leave it out"),
    "--optimizer-cpu-offload": ("it is DeepSpeed's to do",
                                'give "zero_optimization": {"offload_optimizer": ...} in the DeepSpeed JSON'),
    "--use-precision-aware-optimizer": ("masters and moments are fp32", "leave it out"),
    "--use-legacy-models": ("there is one implementation of the model",
                            "bring its checkpoint along with python -m bert_ds.convert from-megatron"),
    "--swiglu": ("BERT's feed-forward layers have one matrix in and one out", "choose --activation"),
    "--squared-relu": ("is no activation of BERT", "choose --activation"),
    "--quick-geglu": ("BERT's feed-forward layers have one matrix in and one out", "choose --activation"),
    "--group-query-attention": ("every head has keys and values of its own", "leave it out"),
    "--num-query-groups": ("every head has keys and values of its own", "leave it out"),
    "--num-experts": ("there are no experts", "leave it out"),
    "--disable-bias-linear": ("BERT's layers have biases", "leave it out"),
    "--add-qkv-bias": ("BERT's layers have biases", "leave it out"),
    "--qk-layernorm": ("queries and keys are not normalised", "leave it out"),
    "--apply-layernorm-1p": ("weights of norms start at 1", "leave it out"),
    "--apply-residual-connection-post-layernorm": ("the residual is added where the norm placement says",
                                                   "choose --norm-placement post for the original BERT's order"),
    "--fp32-residual-connection": ("hidden states between layers have the model's precision", "leave it out"),
    "--fp16-lm-cross-entropy": ("the loss is computed in fp32", "leave it out"),
    "--init-method-xavier-uniform": ("weights are drawn from a normal distribution", "choose --init-method-std"),
    "--onnx-safe": ("models leave by an export", "use python -m bert_ds.convert to-hf"),
    "--data-parallel-random-init": ("all data-parallel ranks start alike", "leave it out"),
    "--pipeline-model-parallel-layout": ("stages are cut by cost", "give --stage-layers, layers a stage"),
    "--pipeline-model-parallel-split-rank": ("there is no decoder", "leave it out"),
    "--decoder-first-pipeline-num-layers": ("stages are cut by cost", "give --stage-layers, layers a stage"),
    "--decoder-last-pipeline-num-layers": ("stages are cut by cost", "give --stage-layers, layers a stage"),
    "--account-for-embedding-in-pipeline-split": (
        "stages are cut by cost, embeddings and heads included", "leave it out, or give --stage-layers"),
    "--account-for-loss-in-pipeline-split": (
        "stages are cut by cost, embeddings and heads included", "leave it out, or give --stage-layers"),
    "--model-parallel-size": ("has been replaced in Megatron-LM", "give --tensor-model-parallel-size"),
    "--batch-size": ("has been replaced in Megatron-LM", "give --micro-batch-size"),
    "--checkpoint-activations": ("has been replaced in Megatron-LM", "give --recompute-num-layers 1"),
    "--use-flash-attn": ("has been replaced in Megatron-LM", "give --attention-backend flash, or auto"),
    "--openai-gelu": ("has been replaced by a choice", "give --activation gelu_tanh"),
    "--log-batch-size-to-tensorboard": ("has been removed from Megatron-LM; it is always written", "leave it out"),
    "--use-torch-fsdp2": ("the pipeline engine shards by ZeRO 1", "give --zero-stage 1"),
    "--use-megatron-fsdp": ("the pipeline engine shards by ZeRO 1", "give --zero-stage 1"),
    "--pretrained-checkpoint": ("what a run starts from is one flag", "give --load with --finetune"),
    "--non-persistent-save-interval": ("every checkpoint is a whole one", "give --save-interval and --keep-last"),
    "--ckpt-convert-format": ("conversion is a command of its own", "use python -m bert_ds.convert"),
    "--use-mp-args-from-checkpoint-args": ("any layout resumes any checkpoint",
                                           "give --tensor-model-parallel-size and --pipeline-model-parallel-size"),
    "--use-tokenizer-model-from-checkpoint-args": ("the vocabulary comes with the model", "give --use-checkpoint-args"),
    "--enable-ft-package": ("NVIDIA's fault-tolerance package is not used", "use recipes/slurm.sh, which goes on"),
    "--deepspeed-mpi": ("the ranks' place is read from the launcher's environment", "leave it out"),
    "--yaml-cfg": ("a run has a recipe", "give --recipe FILE, see recipes/README.md"),
}
"""Flags that cannot be served: the reason and what to use instead."""

PREPROCESSING_IDLE: dict[str, Only] = {
    "--partitions": Only((), "documents are handed to --workers processes in small pieces"),
    "--keep-sequential-samples": Only((), "documents always keep their order"),
    "--keep-newlines": Only((), "WordPiece drops all white space"),
    "--lang": Only(("english",), "sentences are split by the rules of English",
                   "split them beforehand, one a line, and give --sentence-splitter newline"),
}
"""Flags of Megatron-LM's tools/preprocess_data.py that change nothing."""

PREPROCESSING_REFUSED: dict[str, tuple[str, str]] = {
    "--find-optimal-num-workers": ("speed grows with the cores that there are", "give --workers, cores"),
    "--workers-to-check": ("speed grows with the cores that there are", "give --workers, cores"),
    "--max-documents": ("there is no trial run", "give a shorter --input"),
    "--merge-file": ("the tokenizer is WordPiece with a vocabulary file", "give --vocab-file"),
    "--tokenizer-model": ("the tokenizer is WordPiece with a vocabulary file", "give --vocab-file"),
    "--vocab-size": ("the vocabulary file decides", "give --vocab-file"),
}
"""Flags of that program that cannot be served."""
