"""The score of a guesser that learns one thing: which masked token is the commonest."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bert_ds.data.samples import UNUSED_LABEL


def commonest_label(masked_labels_BP: NDArray[np.int32]) -> tuple[int, float]:
    """The commonest token id among masked labels, and its share of them; of several the smallest id."""
    ids, counts = np.unique(masked_labels_BP[masked_labels_BP != UNUSED_LABEL], return_counts=True)
    commonest = int(counts.argmax())
    return int(ids[commonest]), float(counts[commonest] / counts.sum())
