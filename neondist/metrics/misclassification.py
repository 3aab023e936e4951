"""The share of wrong answers."""

from __future__ import annotations

from math import prod

import numpy as np

from ..costs.labels import labels_of, tells_classes
from .base import Metric


class Misclassification(Metric):
    """Share of samples (or cells) whose largest output is not that of their label; a tie goes to the lower class.

    NaN where targets are real numbers, which have no classes.
    """

    name = "misclassification"

    def measure(self, y: np.ndarray, targets: np.ndarray) -> tuple[float, int]:
        """Return the number of wrong answers and the number of answers."""
        if not tells_classes(y, targets):
            return np.nan, prod(y.shape[:-1])
        wrong = y.argmax(axis=-1) != labels_of(y, targets)
        return float(np.count_nonzero(wrong)), wrong.size
