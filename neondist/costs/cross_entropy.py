"""Cross entropy with the softmax inside."""

from __future__ import annotations

import numpy as np

from .base import Cost, Total, alone
from .labels import is_dense, pick


class CrossEntropy(Cost):
    """Negative log likelihood of the targets under the softmax of the outputs, as `torch.nn.CrossEntropyLoss`.

    Outputs `y` are scores (n, C) or (n, *spatial, C), local to this rank, without a softmax layer. Targets are
    integer labels (n,) or (n, *spatial), or probabilities of the shape of `y`. The mean is over batch and cells.
    """

    def value(self, y: np.ndarray, targets: np.ndarray, total: Total = alone) -> float:
        """Return the sum of -log p over the local cells, summed in float64."""
        shifted = _shifted(y)
        if is_dense(y, targets):
            fitted = (targets * shifted).sum(axis=-1, dtype=np.float64)
            weight = targets.sum(axis=-1, dtype=np.float64)
        else:
            fitted, weight = pick(shifted, targets)[..., 0], 1.0
        mass = np.exp(shifted, out=shifted).sum(axis=-1, dtype=np.float64)
        return float((weight * np.log(mass) - fitted).sum())

    def gradient(self, y: np.ndarray, targets: np.ndarray, total: Total = alone) -> np.ndarray:
        """Return softmax(y) minus the targets, (n, C) or (n, *spatial, C)."""
        p = _shifted(y)
        np.exp(p, out=p)
        p /= p.sum(axis=-1, keepdims=True)
        if is_dense(y, targets):
            p *= targets.sum(axis=-1, keepdims=True)
            p -= targets
        else:
            index = targets[..., None].astype(np.intp, copy=False)
            np.put_along_axis(p, index, pick(p, targets) - 1, axis=-1)
        return p


class SoftmaxCrossEntropy(CrossEntropy):
    """Cross entropy for each cell of a segmentation, under the name that people look for; the same as CrossEntropy."""


def _shifted(y: np.ndarray) -> np.ndarray:
    """Return `y` minus the largest score of each cell, so that no exponential overflows (a new array)."""
    return y - y.max(axis=-1, keepdims=True, initial=-np.inf)
