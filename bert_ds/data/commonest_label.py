"""The score of a guesser that learns one thing: which masked token is the commonest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

UNUSED = -100


def commonest_label(masked_labels: Iterable[NDArray[np.integer]]) -> tuple[int, float]:
    """The commonest token id among the masked labels of some samples, [P] each, and its share of them."""
    counts: Counter[int] = Counter()
    for labels_P in masked_labels:
        counts.update(labels_P[labels_P != UNUSED].tolist())
    token_id, count = counts.most_common(1)[0]
    return token_id, count / counts.total()
