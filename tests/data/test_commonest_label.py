"""The share of the commonest label counts used predictions only."""

from __future__ import annotations

import numpy as np

from bert_ds.data.commonest_label import commonest_label


def test_unused_predictions_do_not_count() -> None:
    labels = np.array([[7, 9, -100, -100], [7, 5, 7, -100], [-100] * 4], np.int32)
    assert commonest_label(labels) == (7, 3 / 5)
