"""Misclassification rate."""

from __future__ import annotations

from math import prod

import numpy as np

from .base import Metric
from .classes import scores_and_labels


class Misclassification(Metric):
    """Fraction of samples (or cells) whose largest output is not that of their label; ties go to the lower class.

    A single output predicts class 1 if it is above 0; labels are then 0 and 1. NaN if targets are real numbers, which
    have no classes.
    """

    name = "misclassification"

    def local_sums(self, y: np.ndarray, targets: np.ndarray) -> tuple[float, int]:
        """Return the number of wrong predictions and the number of predictions."""
        if (classified := scores_and_labels(y, targets)) is None:
            return np.nan, prod(y.shape[:-1])
        scores, labels = classified
        is_wrong = scores.argmax(axis=-1) != labels
        return float(np.count_nonzero(is_wrong)), is_wrong.size
