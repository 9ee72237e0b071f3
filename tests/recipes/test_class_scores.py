"""Accuracy, F1 and Matthews correlation against values computed by hand."""

from __future__ import annotations

import math

import pytest

from finetuning.class_scores import confusion_matrix, scores


def test_two_classes() -> None:
    """TP 3, FN 1, FP 2, TN 4."""
    truth = [1, 1, 1, 1, 0, 0, 0, 0, 0, 0]
    predicted = [1, 1, 1, 0, 1, 1, 0, 0, 0, 0]
    matrix = confusion_matrix(truth, predicted, 2)
    assert matrix.tolist() == [[4, 2], [1, 3]]
    found = scores(matrix, positive=1)
    assert found.accuracy == 0.7
    assert found.f1 == 6 / 9
    assert found.matthews == pytest.approx((3 * 4 - 2 * 1) / math.sqrt(5 * 4 * 6 * 5))
    assert scores(matrix, positive=0).f1 == 8 / 11


def test_three_classes() -> None:
    """R_K: covariance of one-hot truth and predictions over the root of their variances' product."""
    matrix = confusion_matrix([0, 0, 0, 1, 1, 2, 2, 2], [0, 0, 1, 1, 2, 2, 2, 0], 3)
    assert matrix.tolist() == [[2, 1, 0], [0, 1, 1], [1, 0, 2]]
    found = scores(matrix, positive=2)
    assert found.accuracy == 5 / 8
    assert found.f1 == pytest.approx((4 / 6 + 2 / 4 + 4 / 6) / 3)
    # Rows sum to 3, 2, 3; columns to 3, 2, 3: (5 x 8 - 22) / (64 - 22).
    assert found.matthews == pytest.approx(18 / 42)


def test_extremes() -> None:
    assert scores(confusion_matrix([0, 1, 2], [0, 1, 2], 3), positive=2) == scores(
        confusion_matrix([0, 1], [0, 1], 2), positive=1)
    assert scores(confusion_matrix([0, 1], [1, 0], 2), positive=1).matthews == -1
    one_class_said = scores(confusion_matrix([0, 1, 1], [0, 0, 0], 2), positive=1)
    assert (one_class_said.f1, one_class_said.matthews) == (0, 0)
