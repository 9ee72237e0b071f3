"""What the DeepSpeed JSON says of a run: batch sizes, precision, optimizer, ZeRO, clipping, recomputation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from bert_ds.errors import Problem

PRECISIONS = ("fp32", "bf16", "fp16")


@dataclass(frozen=True, kw_only=True)
class LossScaleConfig:
    """fp16 loss scaling; the names are DeepSpeed's."""

    loss_scale: float = 0.0
    """0 scales dynamically, any other value is used as it stands."""
    initial_scale_power: int = 16
    """The first dynamic scale is 2 to this power."""
    loss_scale_window: int = 1000
    """Updates without overflow after which the scale doubles."""
    hysteresis: int = 2
    """Overflows within a window of which the last halves the scale."""
    min_loss_scale: float = 1.0
    """Floor of the dynamic scale."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The part of the DeepSpeed JSON that we read, check and complete; the rest travels in `passed_through`."""

    micro_batch_size: int
    """Rows in one forward pass of one rank."""
    global_batch_size: int
    """Rows in one optimizer step = micro_batch_size x accumulation x data-parallel size."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    zero_stage: Literal[0, 1] = 1
    gradient_clipping: float = 1.0
    """Largest norm of the whole gradient; 0 switches clipping off."""
    lr: float = 1e-4
    """Peak learning rate of AdamW."""
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    """Added to the root of AdamW's second moment."""
    weight_decay: float = 0.01
    """Decay of weights with two dimensions; biases and LayerNorms have none."""
    loss_scaling: LossScaleConfig = field(default_factory=LossScaleConfig)
    activation_checkpoint_interval: int = 0
    """Layers that the backward pass recomputes together or, with model.recompute_method block, in each stage; 0 for no
    whole layers."""
    grad_accum_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """Type in which the gradients of micro-batches are summed; None means fp16 in fp16 runs and fp32 in all others."""
    passed_through: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the JSON that go to DeepSpeed as the user wrote them (monitors, timers, ZeRO's bucket sizes)."""

    @property
    def accumulation_dtype(self) -> str:
        return self.grad_accum_dtype or ("fp16" if self.precision == "fp16" else "fp32")

    def accumulation(self, data_parallel_size: int) -> int:
        """Micro-batches of one rank in one optimizer step; call `problems` first."""
        return self.global_batch_size // (self.micro_batch_size * data_parallel_size)

    def problems(self, data_parallel_size: int) -> Iterator[Problem]:
        """Everything that is wrong with the engine's settings, given the data-parallel size."""
        yield from self._batch_problems(data_parallel_size)
        yield from self.layout_free_problems()

    def layout_free_problems(self) -> Iterator[Problem]:
        """What is wrong whatever the data-parallel size."""
        if self.precision not in PRECISIONS:
            yield Problem("precision", self.precision, "is not a known choice", f"use one of {', '.join(PRECISIONS)}")
        if self.grad_accum_dtype not in (None, "fp32", self.precision):
            yield Problem("data_types.grad_accum_dtype", self.grad_accum_dtype,
                          f"does not fit a run in {self.precision}", "use fp32")
        if self.zero_stage not in (0, 1):
            yield Problem("zero_optimization.stage", self.zero_stage,
                          "the pipeline engine serves stages 0 and 1 only", "use stage 1")
        if self.activation_checkpoint_interval < 0:
            yield Problem("pipeline.activation_checkpoint_interval", self.activation_checkpoint_interval,
                          "is negative", "use 0 to keep all activations")
        yield from self._optimizer_problems()

    def _batch_problems(self, data_parallel_size: int) -> Iterator[Problem]:
        micro, total = self.micro_batch_size, self.global_batch_size
        sizes = {"train_micro_batch_size_per_gpu": micro, "train_batch_size": total}
        wrong = {name: size for name, size in sizes.items() if size < 1}
        for name, size in wrong.items():
            yield Problem(name, size, "must be at least 1", "give a positive number")
        if wrong:
            return
        unit = micro * data_parallel_size
        if total % unit:
            yield Problem("train_batch_size", total,
                          f"is not micro batch {micro} x data-parallel size {data_parallel_size} x accumulation",
                          _fitting_batch(total, micro, data_parallel_size))

    def _optimizer_problems(self) -> Iterator[Problem]:
        if self.precision != "fp32" and self.zero_stage == 0:
            yield Problem("zero_optimization.stage", 0, f"loses accuracy in {self.precision}: DeepSpeed then sums bf16 "
                          "gradients in bf16, and scales fp16 losses without hysteresis", "use stage 1")
        if self.gradient_clipping < 0:
            yield Problem("gradient_clipping", self.gradient_clipping, "is negative", "use 1.0, or 0 for none")
        if not 0 < self.lr:
            yield Problem("optimizer.params.lr", self.lr, "is not positive", "use 1e-4")
        if not all(0 <= beta < 1 for beta in self.betas):
            yield Problem("optimizer.params.betas", list(self.betas), "are not below 1", "use [0.9, 0.999]")
        if self.weight_decay < 0:
            yield Problem("optimizer.params.weight_decay", self.weight_decay, "is negative", "use 0.01")


def _fitting_batch(total: int, micro: int, copies: int) -> str:
    """The global batches next to `total`, and the micro batch next to `micro` that fits `total` where there is one."""
    unit = micro * copies
    lower = total // unit * unit
    sizes = f"use {lower} or {lower + unit}" if lower else f"use {unit}"
    if total % copies:
        return sizes
    rows = total // copies
    return f"{sizes}, or a micro batch of {max(size for size in range(1, micro + 1) if rows % size == 0)}"
