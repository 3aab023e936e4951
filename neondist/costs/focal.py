"""Focal loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..arrays.namespace import namespace
from ..registry.ranges import NotNegative
from .base import TileSum, no_reduction
from .cross_entropy import CrossEntropy, log_softmax


class Focal(CrossEntropy):
    """Focal loss: cross entropy with less weight on well-classified cells (Lin et al. 2017).

    With p the softmax of the outputs, a cell of class t costs -(1 - p_t)^gamma log p_t, times its weight. Outputs,
    targets and the denominator of the mean are those of CrossEntropy; with gamma 0 the cost equals CrossEntropy.

    Parameters
    ----------
    gamma : float
        Focusing parameter, at least 0.
    class_weights, ignore_index : optional
        As in CrossEntropy.
    """

    def __init__(
        self,
        gamma: NotNegative = 2.0,
        *,
        class_weights: Sequence[NotNegative] | None = None,
        ignore_index: int | None = None,
    ) -> None:
        super().__init__(class_weights=class_weights, ignore_index=ignore_index)
        self.gamma = float(gamma)

    def local_sum(self, y: Any, targets: Any, sum_over_tiles: TileSum = no_reduction) -> Any:
        """Return the sum over the local cells, summed in float64."""
        xp, log_p = namespace(y), log_softmax(y)
        return -(self.log_probability_weights(y, targets) * (-xp.expm1(log_p)) ** self.gamma * log_p).sum(dtype="f8")

    def local_sum_gradient(self, y: Any, targets: Any, sum_over_tiles: TileSum = no_reduction) -> Any:
        """Return the gradient of `local_sum` with respect to the scores."""
        self.reject_single_softmax_output(y.shape[-1])
        xp, log_p = namespace(y), log_softmax(y)
        p, q = xp.exp(log_p), -xp.expm1(log_p)
        tiny = np.finfo(y.dtype).tiny
        # derivative with respect to p, times p
        dp = self.gamma * p * log_p * q**self.gamma / xp.maximum(q, tiny) - q**self.gamma
        dp = (self.log_probability_weights(y, targets) * dp).astype(y.dtype)
        return dp - p * dp.sum(axis=-1, keepdims=True)
