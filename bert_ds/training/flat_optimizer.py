"""ZeRO stage 1 with one pass over the data of each parameter: DeepSpeed's optimizer, its buffers, another step.

DeepSpeed's own step copies, checks, norms and scales gradients tensor by tensor, which keeps a GPU waiting for the
host. Here gradients accumulate in a flat buffer laid out like DeepSpeed's flat weights, the sum over ranks is one
collective, and one elementwise function, compiled on a GPU, unscales, clips, updates and casts. Masters, moments, loss
scaler and hence checkpoints are DeepSpeed's; DeepSpeed's own step is the oracle of the tests.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.utils import is_model_parallel_parameter
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor

from bert_ds.compat import missing_compiler


@dataclass(frozen=True)
class _Group:
    """One parameter group on this rank. n numbers, padded to a multiple of the data-parallel size."""

    weights: Tensor
    """[n], the flat weights that the parameters are views of."""
    gradients: Tensor
    """[n], the flat gradients that `.grad` of the parameters are views of."""
    own_weights: Tensor
    """This rank's partition of the weights."""
    own_gradients: Tensor
    """Where this rank's partition of the summed gradients arrives."""
    pieces: tuple[Tensor, ...]
    """The parameters' pieces of `own_gradients`."""
    counts: tuple[float, ...]
    """1 for each piece that counts in the norm, 0 for one that another tensor-parallel rank counts."""
    master: Tensor
    """fp32, this rank's partition."""


class FlatZeroOptimizer(DeepSpeedZeroOptimizer):
    """DeepSpeed's ZeRO-1 optimizer with a flat step; made of one that DeepSpeed has built, by `take_over`."""

    @staticmethod
    def serves(optimizer: Any) -> bool:
        """Whether `optimizer` is one whose step can be taken over: ZeRO 1 on the device, summing in its own type."""
        return (type(optimizer) is DeepSpeedZeroOptimizer and not optimizer.partition_gradients
                and not optimizer.cpu_offload and not optimizer.use_grad_accum_attribute
                and isinstance(optimizer.optimizer, torch.optim.AdamW)
                and not any(is_moe_param(parameter) for group in optimizer.bit16_groups for parameter in group))

    @classmethod
    def take_over(cls, optimizer: DeepSpeedZeroOptimizer) -> FlatZeroOptimizer:
        """Turns DeepSpeed's optimizer into this one; its buffers stay where they are."""
        for hook in optimizer._grad_acc_hooks:
            hook.remove()
        optimizer._grad_acc_hooks.clear()
        optimizer.__class__ = cls
        optimizer._set_up()
        return optimizer

    def _set_up(self) -> None:
        self._size, self._rank = dist.get_world_size(self.dp_process_group), dist.get_rank(self.dp_process_group)
        self._groups = [self._group(index) for index in range(len(self.bit16_groups))]
        device = self._groups[0].master.device
        self._counts = torch.tensor([count for group in self._groups for count in group.counts], device=device)
        compiled = device.type == "cuda" and missing_compiler(device.type) is None
        self._update = torch.compile(_adamw, dynamic=False, fullgraph=True) if compiled else _adamw
        self._expose_gradients()

    def _group(self, index: int) -> _Group:
        weights, master = self.bit16_groups_flat[index], self.single_partition_of_fp32_groups[index]
        gradients = torch.zeros_like(weights)
        start, length = self._rank * master.numel(), master.numel()
        own_gradients = gradients.narrow(0, start, length) if self._size == 1 else torch.empty_like(gradients[:length])
        pieces, counts = [], []
        for parameter in self.bit16_groups[index]:
            first = max(_offset(parameter, weights) - start, 0)
            last = min(_offset(parameter, weights) + parameter.numel() - start, length)
            if last > first:
                pieces.append(own_gradients[first:last])
                counts.append(float(self.model_parallel_rank == 0 or is_model_parallel_parameter(parameter)))
        return _Group(weights, gradients, weights.narrow(0, start, length), own_gradients, tuple(pieces),
                      tuple(counts), master)

    @torch.no_grad()
    def _expose_gradients(self) -> None:
        """Lets autograd accumulate in the flat buffers."""
        for parameters, group in zip(self.bit16_groups, self._groups, strict=True):
            for parameter in parameters:
                start = _offset(parameter, group.weights)
                parameter.grad = group.gradients[start : start + parameter.numel()].view_as(parameter)

    def process_gradients(self, param: Any, i: int) -> None:
        """Nothing: gradients are where they belong as soon as autograd has added them."""

    @torch.no_grad()
    def reduce_gradients(self, pipeline_parallel: bool = False) -> None:
        """Averages the gradients over the data-parallel ranks; each keeps its partition."""
        if self._size == 1:
            return
        for group in self._groups:
            group.gradients.div_(self._size)
            dist.reduce_scatter_tensor(group.own_gradients, group.gradients, group=self.dp_process_group)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Unscales, clips and applies the gradients, or skips all ranks' update where one rank's overflowed.

        Raises:
            Exception: DeepSpeed's own, where the loss scale cannot fall any further.
        """
        norm = float(self._scaled_norm())
        scale = float(self.loss_scale)
        self.overflow = not math.isfinite(norm)
        self._global_grad_norm = math.inf if self.overflow else norm / scale
        self._update_scale(self.overflow)
        if self.overflow:
            return
        clip = max((norm / scale + 1e-6) / self.clip_grad, 1.0) if self.clip_grad > 0 else 1.0
        for settings, group in zip(self.optimizer.param_groups, self._groups, strict=True):
            self._step_group(settings, group, 1 / (scale * clip))
        if self._size > 1:
            for group in self._groups:
                dist.all_gather_into_tensor(group.weights, group.own_weights, group=self.dp_process_group)
        self._lazy_init_hp_params_optimizer_state()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Starts the next sums; the parameters keep their views."""
        for group in self._groups:
            group.gradients.zero_()

    def _scaled_norm(self) -> Tensor:
        """Norm of the whole gradient, loss scale included; infinite or NaN on all ranks where it is so on one."""
        pieces = [piece for group in self._groups for piece in group.pieces]
        norms = torch.stack(torch._foreach_norm(pieces, 2, dtype=torch.float32)) if pieces else self._counts
        # An infinite norm that does not count still makes the sum NaN.
        squares = (norms.square() * self._counts).sum()
        if dist.get_world_size() > 1:
            dist.all_reduce(squares)
        return squares.sqrt()

    def _step_group(self, settings: dict[str, Any], group: _Group, unscale: float) -> None:
        state = self.optimizer.state[group.master]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=group.master.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(group.master), torch.zeros_like(group.master)
        state["step"] += 1
        step = state["step"].to(group.master.device)
        (beta1, beta2), lr = settings["betas"], settings["lr"]
        self._update(
            group.own_gradients, group.master, state["exp_avg"], state["exp_avg_sq"], group.own_weights,
            torch.stack([torch.full_like(step, unscale), torch.full_like(step, 1 - lr * settings["weight_decay"]),
                         lr / (1 - beta1**step), (1 - beta2**step).rsqrt()]), beta1, beta2, settings["eps"])


def _adamw(  # noqa: PLR0913, PLR0917 - one kernel, all that it reads and writes
    gradient: Tensor, master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, weight: Tensor, factors_4: Tensor,
    beta1: float, beta2: float, eps: float,
) -> None:
    """AdamW (Loshchilov and Hutter 2019, algorithm 2) on flat tensors, in place; `weight` gets the master in its type.

    factors_4: 1 / (loss scale x clipping), 1 - lr x decay, lr / (1 - beta1^step), 1 / sqrt(1 - beta2^step).
    """
    unscale, decay, rate, correction = factors_4.unbind()
    gradient = gradient.float() * unscale
    exp_avg.copy_(exp_avg + (gradient - exp_avg) * (1 - beta1))
    exp_avg_sq.copy_(exp_avg_sq * beta2 + gradient * gradient * (1 - beta2))
    master.copy_(master * decay - rate * exp_avg / (exp_avg_sq.sqrt() * correction + eps))
    weight.copy_(master)


def _offset(parameter: Tensor, flat: Tensor) -> int:
    """Where `parameter`, a view of `flat`, begins in it."""
    return int(parameter.storage_offset() - flat.storage_offset())
