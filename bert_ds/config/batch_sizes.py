"""The size of the global batch as a function of the samples consumed before it.

Formulas and notation are Megatron-LM's (core/num_microbatches_calculator.py). Which sample comes when does not depend
on the sizes: each global batch takes the next ones.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_RAMP_VALUES = 3
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_STEP = re.compile(r"([0-9.]+)([KMBT]?):([0-9]+)", re.IGNORECASE)


@dataclass(frozen=True)
class BatchSizes:
    """`sizes[i]` rows from the first batch on before which `starts[i]` samples are consumed; `starts[0]` is 0."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def constant(cls, size: int) -> BatchSizes:
        """One size for the whole run."""
        return cls((0,), (size,))

    @classmethod
    def ramp(cls, values: Sequence[str], size: int) -> BatchSizes:
        """From START in steps of INCREMENT to `size`, spread evenly over SAMPLES; `values` are these three.

        Raises:
            ValueError: with the reason, where they make no ramp.
        """
        if len(values) != _RAMP_VALUES or not all(value.isdecimal() for value in values):
            raise ValueError("is not START INCREMENT SAMPLES, three whole numbers")
        start, increment, samples = map(int, values)
        if not 0 < start < size or increment < 1 or (size - start) % increment:
            raise ValueError(f"does not lead from {start} to the global batch {size} in whole steps of {increment}")
        steps = (size - start) // increment
        if samples < steps:
            raise ValueError(f"has fewer samples than its {steps} steps")
        return cls(tuple(-(-step * samples // steps) for step in range(steps + 1)),
                   tuple(start + step * increment for step in range(steps + 1)))

    @classmethod
    def stepwise(cls, entries: Sequence[str], seq_length: int) -> BatchSizes:
        """From entries TOKENS:SIZE, where TOKENS may end in K, M, B or T: `0:768 250B:1536`.

        Raises:
            ValueError: with the reason, where they make no schedule.
        """
        matches = [_STEP.fullmatch(entry) for entry in entries]
        if not entries or not all(matches):
            raise ValueError("is not a list of TOKENS:SIZE such as 0:768 250B:1536")
        tokens = [float(match[1]) * _UNITS[match[2].upper()] for match in matches if match]
        starts = tuple(int(count // seq_length) for count in tokens)
        sizes = tuple(int(match[3]) for match in matches if match)
        if starts[0] != 0 or list(starts) != sorted(set(starts)):
            raise ValueError("does not start at 0 and rise from there")
        if min(sizes) < 1:
            raise ValueError("has a batch of no rows")
        return cls(starts, sizes)

    def at(self, consumed: int) -> int:
        """Rows of the batch before which `consumed` samples are consumed."""
        return self.sizes[bisect_right(self.starts, consumed) - 1]

    def after(self, consumed: int, iterations: int) -> int:
        """Samples consumed after so many iterations more."""
        for first, size, count in self.stretches(consumed, iterations):
            consumed = first + size * count
        return consumed

    def stretches(self, consumed: int, iterations: int) -> Iterator[tuple[int, int, int]]:
        """The next `iterations` as (samples consumed before, rows of a batch, number of batches) of equal size each."""
        while iterations > 0:
            place = bisect_right(self.starts, consumed)
            size, count = self.sizes[place - 1], iterations
            if place < len(self.starts):
                count = min(count, -(-(self.starts[place] - consumed) // size))
            yield consumed, size, count
            consumed, iterations = consumed + size * count, iterations - count
