"""What a run watches over itself for, and what it does about it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from bert_ds.errors import Problem

NAN_POLICIES = ("stop", "skip", "rewind")
SPIKE_POLICIES = ("warn", *NAN_POLICIES)


@dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """`stop` saves the state before the bad iteration and ends the run with exit code 3. `skip` does not apply the
    iteration's gradients. `rewind` puts weights and optimizer back to the last checkpoint and goes on with the samples
    that come next. All ranks decide alike."""

    on_nan_loss: Literal["stop", "skip", "rewind"] = "stop"
    """What to do when the loss is NaN or infinite, or the gradients are in fp32 and bf16 (in fp16 loss scaling answers
    to that): stop, skip the update, or rewind to the last checkpoint and leave out the samples since then."""
    on_loss_spike: Literal["warn", "stop", "skip", "rewind"] = "warn"
    """The same for a loss far above the ones before it; warn goes on."""
    loss_spike_deviations: float = 10.0
    """A loss is a spike when it is above the median of the last loss_spike_window losses by more than so many standard
    deviations, estimated by the median distance from the median; 0 looks for none."""
    loss_spike_window: int = 100
    """Good iterations that a loss is compared with; none is a spike before there are so many, after a resume either."""
    bad_losses_in_window: int = 10
    """Skipped and rewound iterations within loss_spike_window iterations with which the run stops all the same."""
    step_limit_mins: float = 20.0
    """Minutes after which an iteration, or a batch of an evaluation, counts as stuck: every rank prints where it stands
    and the run ends with exit code 4. 0 waits for ever."""
    data_wait_s: float = 10.0
    """Seconds of waiting for the data of one iteration from which a rank says so."""

    def problems(self, *, saves: bool) -> Iterator[Problem]:
        """Everything that is wrong with these settings; `saves` says whether the run saves whole checkpoints."""
        for name, policies in (("on_nan_loss", NAN_POLICIES), ("on_loss_spike", SPIKE_POLICIES)):
            policy = getattr(self, name)
            if policy not in policies:
                yield Problem(f"guards.{name}", policy, "is not a known choice", f"use one of {', '.join(policies)}")
            elif policy == "rewind" and not saves:
                yield Problem(f"guards.{name}", policy, "has no checkpoints to go back to",
                              "set output.save and output.save_interval, with output.save_optim, or use skip")
        for name in ("loss_spike_window", "bad_losses_in_window"):
            if getattr(self, name) < 1:
                yield Problem(f"guards.{name}", getattr(self, name), "must be at least 1", "give a positive number")
        for name in ("loss_spike_deviations", "step_limit_mins", "data_wait_s"):
            if getattr(self, name) < 0:
                yield Problem(f"guards.{name}", getattr(self, name), "is negative", "use 0 or more")
