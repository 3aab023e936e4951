"""Mean negative log likelihood."""

from __future__ import annotations

import math

import numpy as np

from ..costs.cross_entropy import CrossEntropy
from .base import Metric
from .classes import as_classes


class LogLoss(Metric):
    """Mean of -log p of the label over samples (and cells), p being the softmax of the outputs."""

    name = "log_loss"

    def measure(self, y: np.ndarray, targets: np.ndarray) -> tuple[float, int]:
        """Return the sum of -log p and the number of predictions."""
        if y.shape[-1] == 1:
            if (classified := as_classes(y, targets)) is None:
                return math.nan, math.prod(y.shape[:-1])
            y, targets = classified
        return CrossEntropy().value(y, targets), math.prod(y.shape[:-1])
