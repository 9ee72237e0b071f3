"""Accuracy, F1 and Matthews correlation of a classifier, from its confusion matrix."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

METRICS = ("accuracy", "f1", "matthews")


@dataclass(frozen=True)
class Scores:
    """How well predictions agree with the truth; fields are METRICS."""

    accuracy: float
    f1: float
    """Of the positive class where there are two; otherwise the mean over classes."""
    matthews: float
    """Between -1 and 1; 0 where truth or predictions are all of one class."""


def confusion_matrix(truth: Sequence[int], predicted: Sequence[int], classes: int) -> NDArray[np.int64]:
    """How often each class (row) was predicted as each (column)."""
    matrix = np.zeros((classes, classes), dtype=np.int64)
    np.add.at(matrix, (np.asarray(truth), np.asarray(predicted)), 1)
    return matrix


def scores(confusion: NDArray[np.int64], *, positive: int) -> Scores:
    """positive: the class whose F1 is taken where there are two."""
    f1_of_classes = [_f1(confusion, number) for number in range(len(confusion))]
    f1 = f1_of_classes[positive] if len(confusion) == 2 else sum(f1_of_classes) / len(confusion)
    return Scores(int(confusion.trace()) / int(confusion.sum()), f1, _matthews(confusion))


def _f1(confusion: NDArray[np.int64], number: int) -> float:
    """2 TP / (2 TP + FP + FN), 0 where the class neither occurs nor is predicted."""
    occurrences = int(confusion[number].sum() + confusion[:, number].sum())
    return 2 * int(confusion[number, number]) / occurrences if occurrences else 0.0


def _matthews(confusion: NDArray[np.int64]) -> float:
    """Gorodkin's R_K, which for two classes is Matthews' coefficient."""
    true, predicted = ([int(count) for count in confusion.sum(axis=axis)] for axis in (1, 0))
    total, correct = sum(true), int(confusion.trace())
    covariance = correct * total - sum(a * b for a, b in zip(true, predicted, strict=True))
    variances = (total**2 - sum(n * n for n in true)) * (total**2 - sum(n * n for n in predicted))
    return covariance / math.sqrt(variances) if variances else 0.0
