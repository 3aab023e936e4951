"""Half the sum of squared differences."""

from __future__ import annotations

from typing import Any

from .elementwise import Regression


class SumSquared(Regression):
    """Half the sum of squared differences, averaged over the batch only; MSE averages over all elements.

    Outputs `y` are (n, C) or (n, *spatial, C), local to this rank. Targets are numbers with the shape of `y`, or, for
    one output, without the last axis; integer labels for several outputs stand for one-hot vectors.
    """

    def elementwise_costs(self, difference: Any) -> Any:
        """Return half the squares."""
        return 0.5 * difference * difference

    def elementwise_derivatives(self, difference: Any) -> Any:
        """Return the differences."""
        return difference

    def denominator_per_sample(self, y_shape: tuple[int, ...]) -> int:
        """Return 1: a sample's cost is the sum over all its outputs."""
        return 1
