"""Mean negative log likelihood."""

from __future__ import annotations

import math

import numpy as np

from ..costs.cross_entropy import CrossEntropy
from .base import Metric
from .classes import scores_and_labels


class LogLoss(Metric):
    """Mean of -log p of the label over samples (and cells), where p is the softmax of the outputs.

    With a single output, p of class 1 is the logistic function of the output, and the result is NaN if targets are real
    numbers.
    """

    name = "log_loss"

    def local_sums(self, y: np.ndarray, targets: np.ndarray) -> tuple[float, int]:
        """Return the sum of -log p and the number of predictions."""
        if y.shape[-1] == 1:
            if (classified := scores_and_labels(y, targets)) is None:
                return math.nan, math.prod(y.shape[:-1])
            y, targets = classified
        return CrossEntropy().local_sum(y, targets), math.prod(y.shape[:-1])
