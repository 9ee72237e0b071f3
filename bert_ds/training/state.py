"""What a run has to remember between two steps, apart from weights and moments."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class TrainingState:
    """Counts since the start of the run. Data position, learning rate and dropout are functions of these."""

    step: int = 0
    """Iterations done, skipped ones included."""
    consumed_samples: int = 0
    """Rows of the training set read so far."""
    successful_samples: int = 0
    """Rows whose gradient was applied."""
    skipped_steps: int = 0
    """Iterations whose update is not in the weights: loss scaling skipped it, or a guard did or went back behind it."""
    training_s: float = 0.0
    """Seconds of training, evaluations and saves included."""

    @property
    def updates(self) -> int:
        """Iterations that were not skipped; the learning rate follows them."""
        return self.step - self.skipped_steps

    def after_step(self, samples: int, *, skipped: bool) -> TrainingState:
        """The state after one more iteration over `samples` rows."""
        return replace(
            self, step=self.step + 1, consumed_samples=self.consumed_samples + samples,
            successful_samples=self.successful_samples + (0 if skipped else samples),
            skipped_steps=self.skipped_steps + skipped)

    def rewound_to(self, saved: TrainingState) -> TrainingState:
        """This place in the data with the weights of `saved`: the updates since then count as skipped."""
        return replace(self, successful_samples=saved.successful_samples, skipped_steps=self.step - saved.updates)
