"""Cross entropy with the softmax inside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..arrays.namespace import namespace
from ..registry.ranges import NotNegative, UnitInterval
from .base import Cost, TileSum, no_reduction
from .labels import are_dense_targets, mask_ignored, one_hot, value_at_label


class CrossEntropy(Cost):
    """Negative log likelihood of targets under the softmax of outputs, equivalent to `torch.nn.CrossEntropyLoss`.

    Outputs `y` are scores (n, C) or (n, *spatial, C), local to this rank, without a softmax layer. Targets are integer
    labels (n,) or (n, *spatial), or probabilities with the shape of `y`. The mean is over batch and cells; for labels
    with `class_weights` or `ignore_index` it is weighted by the labels' weights over the whole batch.

    Parameters
    ----------
    class_weights : sequence of float, optional
        Weight of each class. Default: 1.
    ignore_index : int, optional
        Cells with this label are ignored. A batch with only this label has a mean of 0.
    label_smoothing : float
        Fraction of each target distributed over all classes, in [0, 1) (Szegedy et al. 2016).
    """

    has_target_per_output = True

    def __init__(
        self,
        *,
        class_weights: Sequence[NotNegative] | None = None,
        ignore_index: int | None = None,
        label_smoothing: UnitInterval = 0.0,
    ) -> None:
        self.class_weights, self.ignore_index = class_weights, ignore_index
        self.label_smoothing = float(label_smoothing)
        self.has_weighted_mean = class_weights is not None or ignore_index is not None

    def local_sum(self, y: Any, targets: Any, sum_over_tiles: TileSum = no_reduction) -> Any:
        """Return the weighted sum of -log p over the local cells, in float64."""
        xp, shifted = namespace(y), _subtract_maximum(y)
        if self._has_equal_weights(y, targets):
            label_terms, label_weight = value_at_label(shifted, targets)[..., 0], 1.0
        else:
            weights = self.log_probability_weights(y, targets)
            label_terms = (weights * shifted).sum(axis=-1, dtype="f8")
            label_weight = weights.sum(axis=-1, dtype="f8")
        exp_sums = xp.exp(shifted, out=shifted).sum(axis=-1, dtype="f8")
        return (label_weight * xp.log(exp_sums) - label_terms).sum()

    def local_sum_gradient(self, y: Any, targets: Any, sum_over_tiles: TileSum = no_reduction) -> Any:
        """Return softmax(y) minus the targets, each weighted, (n, C) or (n, *spatial, C)."""
        self.reject_single_softmax_output(y.shape[-1])
        p = softmax(y)
        if self._has_equal_weights(y, targets):
            p -= one_hot(targets, p)
        else:
            weights = self.log_probability_weights(y, targets)
            p *= weights.sum(axis=-1, keepdims=True)
            p -= weights
        return p

    def local_denominator(self, shape: Sequence[int], targets: Any) -> float:
        """Return the sum of the weights of all local labels; for probabilities the number of cells."""
        if are_dense_targets(shape, targets, self.ignore_index):
            return super().local_denominator(shape, targets)
        labels = targets if self.ignore_index is None else targets[targets != self.ignore_index]
        if self.class_weights is None:
            return float(labels.size)
        return float(namespace(labels).asarray(self.class_weights, "f8")[labels].sum())

    def check_output_shape(self, y_shape: tuple[int, ...], classes: int | None) -> None:
        """Raise UserError if the outputs do not match the classes, or the weights do not match the outputs."""
        super().check_output_shape(y_shape, classes)
        self.reject_single_softmax_output(y_shape[-1])
        self.check_output_weights("class_weights", self.class_weights, y_shape[-1])

    def log_probability_weights(self, y: Any, targets: Any) -> Any:
        """Return the weights of -log p of every class in every cell, with the shape of `y`."""
        xp, valid_mask = namespace(y), None
        if are_dense_targets(y.shape, targets, self.ignore_index):
            weights = xp.asarray(targets)
        else:
            targets, valid_mask = mask_ignored(targets, self.ignore_index)
            weights = one_hot(targets, y).astype(y.dtype)
        if self.label_smoothing:
            weights = weights * (1 - self.label_smoothing) + self.label_smoothing / y.shape[-1]
        if self.class_weights is not None:
            weights = weights * xp.asarray(self.class_weights, y.dtype)
        return weights if valid_mask is None else weights * xp.asarray(valid_mask)[..., None]

    def _has_equal_weights(self, y: Any, targets: Any) -> bool:
        """Return whether targets are labels with equal weights."""
        return not (self.has_weighted_mean or self.label_smoothing or are_dense_targets(y.shape, targets))


class SoftmaxCrossEntropy(CrossEntropy):
    """Cross entropy per cell of a segmentation; a synonym of CrossEntropy."""


def softmax(y: Any) -> Any:
    """Return the softmax over the last axis, a new array."""
    p = _subtract_maximum(y)
    namespace(y).exp(p, out=p)
    p /= p.sum(axis=-1, keepdims=True)
    return p


def log_softmax(y: Any) -> Any:
    """Return the logarithm of the softmax over the last axis, a new array."""
    xp, shifted = namespace(y), _subtract_maximum(y)
    shifted -= xp.log(xp.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted


def _subtract_maximum(y: Any) -> Any:
    """Return `y` minus the largest score of each cell, so that no exponential overflows (a new array)."""
    return y - y.max(axis=-1, keepdims=True)
