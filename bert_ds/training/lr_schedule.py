"""The learning rate as a function of the samples of successful updates.

Formulas and units are Megatron-LM's (core/optimizer_param_scheduler.py): the first update uses the rate at n = 0, an
update that was skipped for an overflow does not advance n.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from bert_ds.config.schedule import ScheduleConfig


@dataclass(frozen=True)
class LearningRate:
    """Learning rate in dependence on n, the samples of successful updates so far."""

    schedule: ScheduleConfig
    peak: float
    global_batch_size: int

    def after_updates(self, updates: float) -> float:
        """The rate of the next update after `updates`. Lengths are in iterations, so that a run which is resumed with
        another batch size stays at its place on the curve."""
        return self.at(updates * self.global_batch_size)

    def at(self, samples: float) -> float:
        """The rate of the next update after `samples`."""
        warmup = self.schedule.warmup_iters * self.global_batch_size
        decay = self.schedule.decay_iters * self.global_batch_size
        start, floor = self.schedule.lr_warmup_init, self.schedule.min_lr
        if warmup > 0 and samples <= warmup:
            return start + (self.peak - start) * samples / warmup
        if self.schedule.lr_decay_style == "constant":
            return self.peak
        if samples > decay:
            return floor
        if self.schedule.lr_decay_style == "inverse-square-root":
            return max(floor, self.peak * math.sqrt(max(warmup, 1)) / math.sqrt(max(samples, 1)))
        return floor + self._share(samples, warmup, decay) * (self.peak - floor)

    def _share(self, samples: float, warmup: float, decay: float) -> float:
        """How much of the way from min_lr to the peak is left, 1 at the end of the warm-up."""
        progress = (samples - warmup) / (decay - warmup)
        if self.schedule.lr_decay_style == "linear":
            return 1.0 - progress
        if self.schedule.lr_decay_style == "cosine":
            return 0.5 * (math.cos(math.pi * progress) + 1.0)
        length = self.schedule.lr_wsd_decay_iters * self.global_batch_size
        since = (samples - (decay - length)) / length
        if since <= 0:
            return 1.0
        return {
            "linear": 1.0 - since,
            "cosine": 0.5 * (math.cos(math.pi * since) + 1.0),
            "exponential": 2.0 * 0.5**since - 1.0,
            "minus_sqrt": 1.0 - math.sqrt(since),
        }[self.schedule.lr_wsd_decay_style]
