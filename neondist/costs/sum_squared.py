"""Half the squared distance."""

from __future__ import annotations

import numpy as np

from .base import Cost, Total, alone
from .labels import is_dense, pick


class SumSquared(Cost):
    """Half the sum of the squared differences; the mean is over the batch only.

    Outputs `y` are (n, C) or (n, *spatial, C), local to this rank. Targets have the shape of `y`, or are integer labels
    (n,) or (n, *spatial), which stand for their one-hot vectors.
    """

    def value(self, y: np.ndarray, targets: np.ndarray, total: Total = alone) -> float:
        """Return 0.5 * sum((y - targets)^2) over everything local, summed in float64."""
        difference = self.gradient(y, targets)
        np.multiply(difference, difference, out=difference)
        return 0.5 * float(difference.sum(dtype=np.float64))

    def gradient(self, y: np.ndarray, targets: np.ndarray, total: Total = alone) -> np.ndarray:
        """Return y - targets."""
        if is_dense(y, targets):
            return np.subtract(y, targets, dtype=y.dtype, casting="same_kind")
        difference = y.copy()
        index = targets[..., None].astype(np.intp, copy=False)
        np.put_along_axis(difference, index, pick(y, targets) - 1, axis=-1)
        return difference

    def cells(self, y_shape: tuple[int, ...]) -> int:
        """Return 1: a sample's cost is the sum over all its outputs."""
        return 1
