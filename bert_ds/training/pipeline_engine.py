"""DeepSpeed's pipeline engines with one owner for the tied word table, and evaluation in a shape of its own.

DeepSpeed lets every stage that holds the table update its own copy: it sums the gradients over the stages, then
averages over the data-parallel ranks, bucket by bucket. The buckets of two stages differ, so do the orders of their
sums, and the copies drift apart by roundings (and by more where gradients accumulate outside `.grad`). Here the first
stage alone updates the table and hands the new weights on: the copies are equal to the bit, and a copy costs neither
masters nor moments. Under DualPipeV one rank holds both ends of the model, and there is no copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.dualpipev import DualPipeVEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import nn

from bert_ds.parallel.sharding import has_partial_gradient
from bert_ds.training.flat_optimizer import FlatZeroOptimizer
from bert_ds.training.fragments import accumulated_gradient


@dataclass(frozen=True)
class TiedWeight:
    """A weight that several ranks hold."""

    weight: nn.Parameter
    owner: int
    """Global rank of the stage that updates it."""
    group: dist.ProcessGroup
    is_copy: bool


class BertPipelineEngine(PipelineEngine):
    """The engine of one rank; see the head of this file."""

    micro_batches: int
    """Micro-batches of a step, or of one call of `eval_batch`."""
    allows_update: Callable[[], bool] | None = None
    """Asked on all ranks, alike, when the gradients of a step are summed; where it says no, the step counts as skipped.
    """

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        if FlatZeroOptimizer.serves(self.optimizer):
            FlatZeroOptimizer.take_over(self.optimizer)
        self.tied_weights = [
            TiedWeight(getattr(comm["module"], attribute), min(comm["ranks"]), comm["group"],
                       self.global_rank != min(comm["ranks"]))
            for comm in self.module.tied_comms.values() if len(comm["ranks"]) > 1
            for attribute in comm["weight_attr"]]
        self._partial = [parameter for parameter in self.module.parameters() if has_partial_gradient(parameter)]
        self._sums_of_copies: dict[nn.Parameter, torch.Tensor] = {}
        if self.using_bf16_optimizer:
            for tied in self.tied_weights:
                if tied.is_copy:
                    self._accumulate_in_fp32(tied.weight)

    @contextmanager
    def evaluation(self, micro_batches: int) -> Iterator[None]:
        """Within it, `eval_batch` takes so many micro-batches, of any one shape; all ranks enter and leave together.

        Stages agree on the shape of what they exchange once and for all, so the agreement is made anew inside and
        afterwards. What FP8 layers have seen in training is put back: forward passes without gradients add to it.
        """
        in_training, self.micro_batches = self.micro_batches, micro_batches
        fp8 = self.module.fp8
        seen = {name: tensor.clone() for name, tensor in fp8.state().items()} if fp8 else {}
        self.reset_activation_shape()
        try:
            yield
        finally:
            self.micro_batches = in_training
            self.reset_activation_shape()
            if fp8:
                fp8.restore(seen)

    def _accumulate_in_fp32(self, copy: nn.Parameter) -> None:
        """The bf16 optimizer accumulates its own parameters' gradients in fp32; a copy is not among them."""
        total = self._sums_of_copies[copy] = torch.zeros_like(copy, dtype=torch.float32)

        def add(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            total.add_(parameter.grad)
            parameter.grad = None

        copy.register_post_accumulate_grad_hook(add)

    def _exec_reduce_tied_grads(self) -> None:
        """Adds the gradients of the copies to the owner's, and the shares of replicated parameters to the whole."""
        for parameter in self._partial:
            dist.all_reduce(accumulated_gradient(parameter), group=self.grid.get_slice_parallel_group())
        for tied in self.tied_weights:
            gradient = self._sums_of_copies.get(tied.weight)
            dist.all_reduce(accumulated_gradient(tied.weight) if gradient is None else gradient, group=tied.group)

    def _exec_optimizer_step(self, lr_kwargs: Any = None) -> None:
        """Steps, then hands the owner's new weights to the copies, whose gradients start at zero again."""
        with nullcontext() if self.allows_update is None or self.allows_update() else self._update_refused():
            super()._exec_optimizer_step(lr_kwargs)
        for tied in self.tied_weights:
            if tied.is_copy:
                tied.weight.grad = None
            if tied.weight in self._sums_of_copies:
                self._sums_of_copies[tied.weight].zero_()
            if self._step_applied:
                dist.broadcast(tied.weight.data, src=tied.owner, group=tied.group)

    @contextmanager
    def _update_refused(self) -> Iterator[None]:
        """Within it, a step of the optimizer does nothing and looks like one that overflowed."""
        optimizer = self.optimizer
        had_flag = hasattr(optimizer, "overflow")
        optimizer.step = lambda *_, **__: _drop_sums(optimizer)
        optimizer.overflow = True
        try:
            yield
        finally:
            del optimizer.step
            if not had_flag:
                del optimizer.overflow

    _INSTRUCTION_MAP: ClassVar[dict[type, Any]] = {
        **PipelineEngine._INSTRUCTION_MAP,
        schedule.ReduceTiedGrads: _exec_reduce_tied_grads,
        schedule.OptimizerStep: _exec_optimizer_step,
    }


def _drop_sums(optimizer: Any) -> None:
    """Forgets the sums that DeepSpeed's ZeRO keeps beside the parameters, as it does after an overflow."""
    if getattr(optimizer, "cpu_offload", False):
        optimizer.reset_cpu_buffers()
    for sums in (getattr(optimizer, "averaged_gradients", {}), getattr(optimizer, "all_grad_tensors", {})):
        sums.update(dict.fromkeys(sums))


class BertDualPipeVEngine(BertPipelineEngine, DualPipeVEngine):
    """The engine of a rank that holds two stages.

    DeepSpeed numbers its buffers by the micro-batches of training, in evaluation too; within `evaluation` they are
    those of evaluation.
    """

    _INSTRUCTION_MAP: ClassVar[dict[type, Any]] = {
        **DualPipeVEngine._INSTRUCTION_MAP,
        schedule.ReduceTiedGrads: BertPipelineEngine._exec_reduce_tied_grads,
        schedule.OptimizerStep: BertPipelineEngine._exec_optimizer_step,
    }
