"""What a run notices about its losses, and which parameters are behind it."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bert_ds.checkpoint.parameters import parameter_shapes
from bert_ds.config.guards import GuardConfig
from bert_ds.config.model import ModelConfig
from bert_ds.model.loss import METRICS, LossSums
from bert_ds.parallel.context import ParallelContext
from bert_ds.training.batches import StepInputs
from bert_ds.training.coordination import Coordinator
from bert_ds.training.fragments import accumulated_gradient

log = logging.getLogger(__name__)
_DEVIATION = 1.4826
"""Standard deviations in a median distance from the median, for a normal distribution."""
_LEAST_DEVIATION = 0.01
"""Share of the median below which losses do not count as varying: a curve that is flat has no spikes of 1 %."""


@dataclass(frozen=True)
class BadLoss:
    """A loss that the run does not accept as it is; the same on all ranks."""

    policy: str
    """warn, stop, skip or rewind."""
    reason: str
    """`the loss is nan`."""

    @property
    def allows_update(self) -> bool:
        return self.policy == "warn"


class LossHistory:
    """Judges each loss by the good ones before it; warns once in a window."""

    def __init__(self, config: GuardConfig) -> None:
        self._config = config
        self._good: deque[float] = deque(maxlen=config.loss_spike_window)
        self._iterations = 0
        self._warned = -config.loss_spike_window
        self._bad: deque[int] = deque(maxlen=config.bad_losses_in_window)

    def judge(self, loss: float) -> BadLoss | None:
        """Counts an iteration with this loss; None where it is as it should be."""
        self._iterations += 1
        if not math.isfinite(loss):
            return self._answer(self._config.on_nan_loss, f"the loss is {loss}")
        typical, limit = self._limits()
        if loss <= limit:
            self._good.append(loss)
            return None
        if self._config.on_loss_spike == "warn":
            self._good.append(loss)
            if self._iterations - self._warned < self._config.loss_spike_window:
                return None
            self._warned = self._iterations
        return self._answer(
            self._config.on_loss_spike, f"the loss jumped to {loss:.4f}, from a median of {typical:.4f} over "
            f"{len(self._good)} iterations; {limit:.4f} is the limit")

    def gradients_not_finite(self) -> BadLoss:
        """The answer where the loss was good and its gradients are not."""
        return self._answer(self._config.on_nan_loss, "the gradients are not finite, though the loss is")

    def _limits(self) -> tuple[float, float]:
        """The median of the window, and the loss above which there is a spike."""
        deviations = self._config.loss_spike_deviations
        if not deviations or len(self._good) < self._config.loss_spike_window:
            return math.nan, math.inf
        typical = median(self._good)
        deviation = _DEVIATION * median(abs(loss - typical) for loss in self._good)
        return typical, typical + deviations * max(deviation, _LEAST_DEVIATION * abs(typical))

    def _answer(self, policy: str, reason: str) -> BadLoss:
        if policy in ("skip", "rewind"):
            self._bad.append(self._iterations)
            since = self._iterations - self._config.loss_spike_window
            bad = self._config.bad_losses_in_window
            if len(self._bad) == bad and self._bad[0] > since:
                return BadLoss("stop", f"{reason}, the {bad}th bad loss within {self._config.loss_spike_window} "
                               f"iterations")
        return BadLoss(policy, reason)


class LossGuard:
    """Decides before an update whether it may be applied. All ranks ask together."""

    def __init__(self, config: GuardConfig, ctx: ParallelContext, sums: LossSums) -> None:
        self._ctx, self._sums = ctx, sums
        self._history = LossHistory(config)
        self.verdict: BadLoss | None = None
        """On the last step."""

    def allows_update(self) -> bool:
        """Judges the loss of the global batch, whose micro-batches have all been computed."""
        self.verdict = self._history.judge(self._loss())
        return self.verdict is None or self.verdict.allows_update

    def gradients_not_finite(self) -> BadLoss:
        """For a step whose loss was good and that was skipped without a loss scale."""
        self.verdict = self._history.gradients_not_finite()
        return self.verdict

    def _loss(self) -> float:
        """Sum of both losses, each the mean over the global batch."""
        counts = self._ctx.is_last_stage and self._ctx.tp_rank == 0
        sums = self._sums.so_far.clone() if counts else torch.zeros_like(self._sums.so_far)
        if self._ctx.world_size > 1:
            dist.all_reduce(sums)
        named = dict(zip(METRICS, sums.tolist(), strict=True))
        return sum(named[f"{head}_loss"] / max(named[f"{head}_count"], 1) for head in ("lm", "sop"))


def where_not_finite(engine: Any, model: ModelConfig, coordinator: Coordinator) -> str:
    """The parameters whose weights or, while they are there, gradients hold inf or NaN, in a sentence; all ranks."""
    found: dict[str, list[str]] = {"weights": [], "gradients": []}
    for local in engine.module.local_parameters():
        for kind, tensor in (("weights", local.parameter), ("gradients", accumulated_gradient(local.parameter))):
            if tensor is not None and not bool(tensor.isfinite().all()):
                found[kind].append(local.name)
    of_ranks = coordinator.gather("the parameters that are not finite", found)
    places = {name: place for place, name in enumerate(parameter_shapes(model))}
    sentences = [_sentence(kind, sorted({name for rank in of_ranks for name in rank[kind]}, key=places.__getitem__),
                           len(places)) for kind in found]
    return " ".join(filter(None, sentences)) or "all weights and gradients of this step are finite"


def first_layer_not_finite(engine: Any, sums: LossSums, inputs: StepInputs, coordinator: Coordinator) -> str:
    """The first layer that makes inf or NaN of these inputs, found by a forward pass without dropout; all ranks."""
    met: list[int] = []

    def look(index: int, module: nn.Module, arguments: Any, output: Any) -> None:
        hidden = output if isinstance(output, torch.Tensor) else output[0]
        if not bool(hidden.isfinite().all()):
            met.append(index)

    hooks = [module.register_forward_hook(partial(look, index)) for index, module in engine.module.local_layers()
             if engine.module.layer_defs[index].second_use is None]
    with engine.evaluation(engine.micro_batches):
        engine.eval_batch(inputs.micro_batches)
    for hook in hooks:
        hook.remove()
    sums.take()
    layers = [min(indices) for indices in coordinator.gather("the layers that are not finite", met) if indices]
    if not layers:
        return "without dropout, all layers give finite values on the same samples"
    names = engine.module.layer_defs[min(layers)].names
    return f"the first layer whose output has inf or NaN is {names[0][1].rstrip('.')}"


def _sentence(kind: str, names: Sequence[str], of: int) -> str:
    """The backward pass goes from the last layer to the first, and what is not finite goes with it."""
    if not names:
        return ""
    first = names[0] if kind == "weights" else names[-1]
    where = "in the order of layers" if kind == "weights" else "in the order of the backward pass"
    return f"{len(names)} of {of} parameters have {kind} with inf or NaN, the first {where} is {first}"


class PlateauHint:
    """Explains once the plateau that BERT's loss rests on before it learns from context."""

    LOW, HIGH = 5.5, 7.5
    ITERATIONS = 1000
    """Without progress, before anybody wonders."""
    PROGRESS = 0.15

    def __init__(self) -> None:
        self._since: tuple[int, float] | None = None
        self._told = False

    def see(self, step: int, lm_loss: float | None) -> None:
        """Notes the mean loss that ends with `step`."""
        if self._told or lm_loss is None or not self.LOW < lm_loss < self.HIGH:
            self._since = None
        elif self._since is None or lm_loss < self._since[1] - self.PROGRESS:
            self._since = (step, lm_loss)
        elif step - self._since[0] >= self.ITERATIONS:
            self._told = True
            log.info("the lm loss has stayed near %.1f since iteration %d. That is normal: BERT first learns how often "
                     "words occur, then rests between 6 and 7 until attention begins to use the context, for several "
                     "thousand iterations at small global batches (7 to 8 thousand at 32, some hundred at 1,024 and "
                     "above). A larger batch shortens it. If it lasts beyond 15 thousand iterations, look at the data "
                     "(python -m bert_ds.inspect_data) and the learning rate", lm_loss, self._since[0])
