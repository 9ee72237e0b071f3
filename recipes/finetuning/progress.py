"""Lines that tell how far training is, how fast it goes, and how long it will take."""

from __future__ import annotations

import time

import torch
from torch import Tensor

_SECONDS_BETWEEN_LINES = 5.0


class Progress:
    """Counts steps and rows, and prints a line every few seconds; evaluations between epochs do not count as time."""

    def __init__(self, title: str, *, rows: int, epochs: int) -> None:
        """title: begins each line; rows: of one epoch."""
        self._title = title
        self._epochs, self._rows_of_all = epochs, rows * epochs
        self._epoch = self._rows = self._steps = 0
        self._busy_s = 0.0
        self._moment = self._told_at = time.monotonic()
        self._loss = torch.zeros(())

    def begin_epoch(self, epoch: int) -> None:
        """Starts the clock, and the mean of the loss."""
        self._epoch, self._steps = epoch, 0
        self._moment = time.monotonic()
        self._loss = torch.zeros(())

    def step(self, rows: int, loss: Tensor) -> None:
        """Counts one step. The loss stays on its device until a line tells it."""
        self._steps += 1
        self._rows += rows
        self._loss = self._loss.to(loss.device) + loss.float()
        moment = time.monotonic()
        self._busy_s += moment - self._moment
        self._moment = moment
        if moment - self._told_at >= _SECONDS_BETWEEN_LINES:
            self._told_at = moment
            rate = self._rows / self._busy_s
            print(f"{self._title}: epoch {self._epoch}/{self._epochs} | {self._rows / self._rows_of_all:.0%} done | "
                  f"loss {self.mean_loss_of_epoch():.4f} | {rate:.1f} rows/s | "
                  f"{_clock((self._rows_of_all - self._rows) / rate)} left", flush=True)

    def mean_loss_of_epoch(self) -> float:
        """Mean over the steps since `begin_epoch`."""
        return float(self._loss) / max(1, self._steps)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
