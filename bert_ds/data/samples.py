"""The form in which samples leave the data layer.

B rows, S sequence length, P predictions kept per row, M sequences in a row (1 unless rows are packed).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

UNUSED_LABEL = -100
"""Label of what has no loss: PyTorch's ignore_index."""


class SampleBatch(NamedTuple):
    """Rows ready for the model."""

    input_ids: NDArray[np.int32]
    """[B, S], with masks applied; [PAD] behind the row's end."""
    token_type_ids: NDArray[np.int32]
    """[B, S], 1 for the second segment and its [SEP]."""
    segment_ids: NDArray[np.int32]
    """[B, S], 0 on padding, else the number of the sequence in its row, from 1. Follows from lengths, never from ids:
    a random replacement that drew [PAD] stays visible (Megatron hides it from attention)."""
    masked_positions: NDArray[np.int32]
    """[B, P], ascending; unused entries 0."""
    masked_labels: NDArray[np.int32]
    """[B, P], original ids; unused entries UNUSED_LABEL."""
    sentence_order_labels: NDArray[np.int32]
    """[B, M], 0 in order, 1 swapped or (random_next) from another document; UNUSED_LABEL without a sentence task and
    behind the row's sequences."""
    truncated: NDArray[np.bool_]
    """[B], whether tokens were cut off to meet the row's target; for statistics."""

    @classmethod
    def empty(cls, num_rows: int, seq_length: int, num_predictions: int, sequences_per_row: int = 1) -> SampleBatch:
        """Room for `num_rows` rows, not initialised."""
        def room(width: int) -> NDArray[np.int32]:
            return np.empty((num_rows, width), np.int32)
        return cls(room(seq_length), room(seq_length), room(seq_length), room(num_predictions), room(num_predictions),
                   room(sequences_per_row), np.empty(num_rows, np.bool_))


class SampleSource(Protocol):
    """A dataset: a pure function from sample indices to rows."""

    def __len__(self) -> int: ...

    def build_batch(self, indices: NDArray[np.int64]) -> SampleBatch:
        """The samples [B] of `indices`, in this order. Thread-safe. Raises DataError, or IndexError outside len."""
        ...


class MeasuredSource(SampleSource, Protocol):
    """A dataset whose samples' lengths are known before they are built."""

    def lengths(self, indices: NDArray[np.int64]) -> NDArray[np.int32]:
        """Tokens [B] of the samples with [CLS] and [SEP]: never too few, one too many where a segment is empty.

        Raises DataError where the corpus is damaged.
        """
        ...
