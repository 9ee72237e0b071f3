"""The share of the commonest label counts used predictions only."""

from __future__ import annotations

import numpy as np

from bert_ds.data.commonest_label import commonest_label


def test_unused_predictions_do_not_count() -> None:
    samples = [np.array([7, 9, -100, -100]), np.array([7, 5, 7, -100]), np.array([-100] * 4)]
    assert commonest_label(samples) == (7, 3 / 5)
