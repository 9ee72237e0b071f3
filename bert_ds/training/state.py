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
    """Iterations that loss scaling skipped."""

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
