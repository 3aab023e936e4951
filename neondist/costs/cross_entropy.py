"""Cross entropy with the softmax inside."""

from __future__ import annotations

from typing import Any

from ..namespace import namespace
from .base import Cost, Total, alone
from .labels import is_dense, one_hot, pick


class CrossEntropy(Cost):
    """Negative log likelihood of the targets under the softmax of the outputs, as `torch.nn.CrossEntropyLoss`.

    Outputs `y` are scores (n, C) or (n, *spatial, C), local to this rank, without a softmax layer. Targets are
    integer labels (n,) or (n, *spatial), or probabilities of the shape of `y`. The mean is over batch and cells.
    """

    def value(self, y: Any, targets: Any, total: Total = alone) -> Any:
        """Return the sum of -log p over the local cells, summed in float64."""
        xp, shifted = namespace(y), _shifted(y)
        if is_dense(y, targets):
            targets = xp.asarray(targets)
            fitted = (targets * shifted).sum(axis=-1, dtype="f8")
            weight = targets.sum(axis=-1, dtype="f8")
        else:
            fitted, weight = pick(shifted, targets)[..., 0], 1.0
        mass = xp.exp(shifted, out=shifted).sum(axis=-1, dtype="f8")
        return (weight * xp.log(mass) - fitted).sum()

    def gradient(self, y: Any, targets: Any, total: Total = alone) -> Any:
        """Return softmax(y) minus the targets, (n, C) or (n, *spatial, C)."""
        xp, p = namespace(y), _shifted(y)
        xp.exp(p, out=p)
        p /= p.sum(axis=-1, keepdims=True)
        if is_dense(y, targets):
            targets = xp.asarray(targets)
            p *= targets.sum(axis=-1, keepdims=True)
            p -= targets
        else:
            p -= one_hot(p, targets)
        return p


class SoftmaxCrossEntropy(CrossEntropy):
    """Cross entropy for each cell of a segmentation, under the name that people look for; the same as CrossEntropy."""


def _shifted(y: Any) -> Any:
    """Return `y` minus the largest score of each cell, so that no exponential overflows (a new array)."""
    return y - y.max(axis=-1, keepdims=True)
