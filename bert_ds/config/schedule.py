"""How long a run trains, how its learning rate moves and when it evaluates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from bert_ds.errors import Problem

LR_DECAY_STYLES = ("linear", "cosine", "constant", "inverse-square-root", "WSD")
LOSS_NORMALIZATIONS = ("global_batch", "micro_batch")


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Lengths are in iterations, that is global batches. The peak learning rate belongs to the DeepSpeed JSON."""

    train_iters: int
    """Iterations to train."""
    seed: int = 1234
    """Seed of the initial weights, the sample order, the masks and the dropout."""
    lr_decay_style: Literal["linear", "cosine", "constant", "inverse-square-root", "WSD"] = "linear"
    """Curve from the peak learning rate to min_lr; WSD is constant until its final decay."""
    lr_decay_iters: int | None = None
    """Iteration at which min_lr is reached; None means train_iters."""
    lr_warmup_fraction: float | None = None
    """Warm-up as a share of lr_decay_iters; excludes lr_warmup_iters."""
    lr_warmup_iters: int = 0
    """Iterations over which the learning rate rises to its peak; excludes lr_warmup_fraction."""
    lr_warmup_init: float = 0.0
    """Learning rate at the first update."""
    min_lr: float = 0.0
    """Learning rate at the end of the decay and after it."""
    lr_wsd_decay_iters: int = 0
    """Iterations of the final decay of WSD."""
    lr_wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] = "exponential"
    """Curve of the final decay of WSD."""
    eval_interval: int | None = None
    """Iterations between evaluations; None means never."""
    eval_iters: int = 10
    """Global batches of an evaluation."""
    eval_micro_batch_size: int | None = None
    """Rows in one forward pass of one rank in evaluation; None means that of training. The samples stay the same."""
    eval_seq_length: int | None = None
    """Tokens in a row of validation and test data; None means that of training."""
    loss_normalization: Literal["global_batch", "micro_batch"] = "global_batch"
    """global_batch: every masked token of the global batch counts the same, so the update does not depend on how the
    batch is split. micro_batch: Megatron's mean of the micro-batches' means."""

    rampup_batch_size: tuple[str, ...] = ()
    """START INCREMENT SAMPLES: the global batch grows from START to its size in equal steps over the first SAMPLES
    samples. Lengths stay in iterations, and the learning rate follows them."""
    step_batch_size_schedule: tuple[str, ...] = ()
    """Global batches from a number of tokens on, TOKENS:SIZE with K, M, B or T behind the tokens: 0:768 250B:1536. The
    last one is the global batch size. Tokens count padding."""
    train_minutes: float | None = None
    """Train for so many minutes, evaluations and saves included, those before a resume too: the learning rate moves
    along its curve with the clock, or with the iterations where these are further on, and train_iters is the most."""
    skip_train: bool = False
    """Evaluate on the validation and test data and stop; nothing is trained or saved."""
    exit_interval: int | None = None
    """Save and stop after an iteration that is a multiple of this; None trains to the end."""
    exit_duration_in_mins: float | None = None
    """Save and stop, with exit code 0, at the end of the first iteration after so many minutes since the run was
    started; None trains to the end."""
    deterministic_mode: bool = False
    """The same bits whenever the run is repeated on the same hardware, with slower kernels where there is a choice."""

    @property
    def decay_iters(self) -> int:
        return self.train_iters if self.lr_decay_iters is None else self.lr_decay_iters

    @property
    def warmup_iters(self) -> float:
        if self.lr_warmup_fraction is not None:
            return self.lr_warmup_fraction * self.decay_iters
        return self.lr_warmup_iters

    def problems(self, peak_lr: float) -> Iterator[Problem]:
        """Everything that is wrong with the schedule, given the peak learning rate."""
        if self.train_iters < 1:
            yield Problem("schedule.train_iters", self.train_iters, "must be at least 1", "give a positive number")
            return
        if self.lr_decay_style not in LR_DECAY_STYLES:
            yield Problem("schedule.lr_decay_style", self.lr_decay_style, "is not a known choice",
                          f"use one of {', '.join(LR_DECAY_STYLES)}")
        if self.loss_normalization not in LOSS_NORMALIZATIONS:
            yield Problem("schedule.loss_normalization", self.loss_normalization, "is not a known choice",
                          f"use one of {', '.join(LOSS_NORMALIZATIONS)}")
        yield from self._learning_rate_problems(peak_lr)
        if self.eval_interval is not None and (self.eval_interval < 1 or self.eval_iters < 1):
            name = "eval_iters" if self.eval_iters < 1 else "eval_interval"
            yield Problem(f"schedule.{name}", getattr(self, name), "must be at least 1",
                          "give a positive number, or train without evaluation (--eval-interval none)")
        if self.exit_interval is not None and self.exit_interval < 1:
            yield Problem("schedule.exit_interval", self.exit_interval, "must be at least 1",
                          "leave exit_interval out to train to the end")
        for name in ("train_minutes", "exit_duration_in_mins"):
            minutes = getattr(self, name)
            if minutes is not None and minutes <= 0:
                yield Problem(f"schedule.{name}", minutes, "is not positive", "leave it out to train to the end")
        if self.skip_train and self.eval_interval is None:
            yield Problem("schedule.skip_train", True, "leaves nothing to do, since there is no evaluation",
                          "set eval_interval to any number")
        if not 0 <= self.seed < 2**31 - 1:
            yield Problem("schedule.seed", self.seed, "does not fit the sample mapping's 31-bit seed",
                          "use 0 <= seed < 2147483647")

    def _learning_rate_problems(self, peak_lr: float) -> Iterator[Problem]:
        if self.lr_warmup_fraction is not None and self.lr_warmup_iters:
            yield Problem("schedule.lr_warmup_iters", self.lr_warmup_iters,
                          f"contradicts schedule.lr_warmup_fraction={self.lr_warmup_fraction}", "give one of the two")
        if self.warmup_iters < 0:
            yield Problem("schedule.lr_warmup_iters", self.warmup_iters, "is negative", "use 0 for no warm-up")
        if not 0 <= self.lr_warmup_init <= peak_lr:
            yield Problem("schedule.lr_warmup_init", self.lr_warmup_init,
                          f"is not between 0 and the peak learning rate {peak_lr}", "use 0")
        if not 0 <= self.min_lr <= peak_lr:
            yield Problem("schedule.min_lr", self.min_lr, f"is not between 0 and the peak learning rate {peak_lr}",
                          "lower min_lr or raise optimizer.params.lr in the JSON")
        if self.warmup_iters >= self.decay_iters:
            yield Problem("schedule.lr_warmup_iters", self.warmup_iters,
                          f"is not below the decay length {self.decay_iters}", "shorten the warm-up")
        if self.lr_decay_style == "WSD" and not 0 < self.lr_wsd_decay_iters <= self.decay_iters:
            yield Problem("schedule.lr_wsd_decay_iters", self.lr_wsd_decay_iters,
                          f"is not between 1 and the decay length {self.decay_iters}", "say how long WSD decays")
