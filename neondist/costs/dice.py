"""Dice loss for segmentation."""

from __future__ import annotations

from typing import Any

from ..namespace import namespace
from ..registry.ranges import Positive
from .base import Cost, Total, alone
from .labels import is_dense, one_hot


class Dice(Cost):
    """One minus the soft Dice overlap of each class, averaged over the classes (Milletari et al. 2016).

    With p the softmax of the outputs and t the one-hot targets, the loss of a sample is the mean over the classes of
    (sum(p + t) - 2 sum(p t)) / (sum(p + t) + smooth); the sums run over the whole image, over all its tiles. Outputs
    `y` are scores (n, *spatial, C), targets integer labels (n, *spatial) or of the shape of `y`, all local.

    Parameters
    ----------
    smooth : float
        Positive; keeps a class that is nowhere from dividing by zero.
    """

    def __init__(self, smooth: Positive = 1.0) -> None:
        self.smooth = smooth

    def value(self, y: Any, targets: Any, total: Total = alone) -> Any:
        """Return this rank's share: its own sums over those of the whole image."""
        p, t = _softmax(y), _one_hot(y, targets)
        both, overlap = _over_cells(p + t), _over_cells(p * t)
        whole = total(both)
        return ((both - 2 * overlap) / (whole + self.smooth)).sum() / y.shape[-1]

    def gradient(self, y: Any, targets: Any, total: Total = alone) -> Any:
        """Return the gradient of the whole image's loss with respect to the local scores."""
        p, t = _softmax(y), _one_hot(y, targets)
        both, overlap = total(namespace(y).stack([_over_cells(p + t), _over_cells(p * t)]))
        spatial = (slice(None), *(None for _ in y.shape[1:-1]))
        whole = (both + self.smooth)[spatial]
        by_p = ((2 * overlap + self.smooth)[spatial] / whole - 2 * t) / (whole * y.shape[-1])
        by_p = by_p.astype(y.dtype)
        return p * (by_p - (by_p * p).sum(axis=-1, keepdims=True))

    def sums_for(self, y_shape: tuple[int, ...]) -> int:
        """Return both sums of each class for the gradient, and one for the value."""
        return 3 * y_shape[-1]

    def cells(self, y_shape: tuple[int, ...]) -> int:
        """Return 1: a sample's cost is one number."""
        return 1


def _softmax(y: Any) -> Any:
    p = namespace(y).exp(y - y.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    return p


def _one_hot(y: Any, targets: Any) -> Any:
    return namespace(y).asarray(targets) if is_dense(y, targets) else one_hot(y, targets).astype(y.dtype)


def _over_cells(array: Any) -> Any:
    """Return the sums over the spatial axes, (n, C), in float64."""
    return array.sum(axis=tuple(range(1, array.ndim - 1)), dtype="f8")
