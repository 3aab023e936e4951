"""Half the squared distance."""

from __future__ import annotations

from typing import Any

from ..namespace import namespace
from .base import Cost, Total, alone
from .labels import is_dense, one_hot


class SumSquared(Cost):
    """Half the sum of the squared differences; the mean is over the batch only.

    Outputs `y` are (n, C) or (n, *spatial, C), local to this rank. Targets have the shape of `y`, or are integer labels
    (n,) or (n, *spatial), which stand for their one-hot vectors.
    """

    def value(self, y: Any, targets: Any, total: Total = alone) -> Any:
        """Return 0.5 * sum((y - targets)^2) over everything local, summed in float64."""
        difference = self.gradient(y, targets)
        difference *= difference
        return 0.5 * difference.sum(dtype="f8")

    def gradient(self, y: Any, targets: Any, total: Total = alone) -> Any:
        """Return y - targets."""
        if is_dense(y, targets):
            return y - namespace(y).asarray(targets, y.dtype)
        return y - one_hot(y, targets)

    def cells(self, y_shape: tuple[int, ...]) -> int:
        """Return 1: a sample's cost is the sum over all its outputs."""
        return 1
