"""Dice loss for segmentation, alone and with the cross entropy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..arrays.namespace import namespace
from ..registry.ranges import NotNegative, Positive, UnitInterval
from .base import Cost, TileSum, no_reduction
from .cross_entropy import CrossEntropy, softmax
from .labels import are_dense_targets, mask_ignored, one_hot


class Dice(Cost):
    """One minus the soft Dice overlap of each class, averaged over the classes (Milletari et al. 2016).

    With p the softmax of the outputs and t the one-hot targets, the loss of a sample is the mean over the classes of
    (sum(p + t) - 2 sum(p t)) / (sum(p + t) + smooth); the sums run over all tiles of the image. Outputs
    `y` are scores (n, *spatial, C), targets integer labels (n, *spatial) or arrays with the shape of `y`, all local.

    Parameters
    ----------
    smooth : float
        Positive term of the denominator, which avoids division by zero for absent classes.
    ignore_index : int, optional
        Cells with this label are excluded from all sums.
    """

    has_target_per_output = True

    def __init__(self, smooth: Positive = 1.0, *, ignore_index: int | None = None) -> None:
        self.smooth, self.ignore_index = smooth, ignore_index

    def local_sum(self, y: Any, targets: Any, sum_over_tiles: TileSum = no_reduction) -> Any:
        """Return this rank's share of the cost: its own sums divided by the sums over the whole image."""
        sums = self.sums_per_sample(y, targets)
        return self.losses_from_sums(sums, sum_over_tiles(sums[:, : y.shape[-1]])).sum()

    def sums_per_sample(self, y: Any, targets: Any) -> Any:
        """Return the sums of p + t and of p t of each sample and class, (n, 2 C)."""
        p, t, mask = softmax(y), *self._one_hot_and_mask(y, targets)
        return namespace(y).concatenate([_sum_over_cells((p + t) * mask), _sum_over_cells(p * t)], axis=1)

    def losses_from_sums(self, sums: Any, totals: Any | None = None) -> Any:
        """Return each sample's loss (n,), or, given the sums `totals` of p + t over the image, this part's share."""
        num_classes = sums.shape[1] // 2
        sizes, overlap = sums[:, :num_classes], sums[:, num_classes:]
        return ((sizes - 2 * overlap) / ((sizes if totals is None else totals) + self.smooth)).sum(axis=1) / num_classes

    def local_sum_gradient(self, y: Any, targets: Any, sum_over_tiles: TileSum = no_reduction) -> Any:
        """Return the gradient of the whole image's loss with respect to the local scores."""
        self.reject_single_softmax_output(y.shape[-1])
        p, t, mask = softmax(y), *self._one_hot_and_mask(y, targets)
        sizes, overlap = sum_over_tiles(namespace(y).stack([_sum_over_cells((p + t) * mask), _sum_over_cells(p * t)]))
        cell_index = (slice(None), *(None for _ in y.shape[1:-1]))
        denominator = (sizes + self.smooth)[cell_index]
        dp = ((2 * overlap + self.smooth)[cell_index] / denominator - 2 * t) / (denominator * y.shape[-1])
        dp = (dp * mask).astype(y.dtype)
        return p * (dp - (dp * p).sum(axis=-1, keepdims=True))

    def check_output_shape(self, y_shape: tuple[int, ...], classes: int | None) -> None:
        """Raise UserError if the outputs do not match the classes, or if there is only one output."""
        super().check_output_shape(y_shape, classes)
        self.reject_single_softmax_output(y_shape[-1])

    def reduced_elements_per_sample(self, y_shape: tuple[int, ...]) -> int:
        """Return 3 C: two sums per class for the gradient, and one for the value."""
        return 3 * y_shape[-1]

    def denominator_per_sample(self, y_shape: tuple[int, ...]) -> int:
        """Return 1: a sample's cost is one number."""
        return 1

    def _one_hot_and_mask(self, y: Any, targets: Any) -> tuple[Any, Any]:
        """Return the targets, 0 in ignored cells, and the mask of counted cells."""
        xp = namespace(y)
        if are_dense_targets(y.shape, targets, self.ignore_index):
            return xp.asarray(targets), 1.0
        labels, valid_mask = mask_ignored(targets, self.ignore_index)
        t = one_hot(labels, y).astype(y.dtype)
        if valid_mask is None:
            return t, 1.0
        mask = xp.asarray(valid_mask, y.dtype)[..., None]
        return t * mask, mask


class DiceCE(Cost):
    """Sum of Dice and mean cross entropy (Isensee et al. 2021), for the same outputs and targets as Dice.

    Parameters
    ----------
    dice_weight, ce_weight : float
        Factors of the two terms.
    smooth : float
        As in Dice.
    class_weights, ignore_index, label_smoothing : optional
        As in CrossEntropy; `ignore_index` applies to both terms.
    """

    has_target_per_output = True

    def __init__(
        self,
        *,
        dice_weight: Positive = 1.0,
        ce_weight: Positive = 1.0,
        smooth: Positive = 1.0,
        class_weights: Sequence[NotNegative] | None = None,
        ignore_index: int | None = None,
        label_smoothing: UnitInterval = 0.0,
    ) -> None:
        self.ignore_index, self.weights = ignore_index, (float(dice_weight), float(ce_weight))
        self.dice = Dice(smooth, ignore_index=ignore_index)
        self.cross_entropy = CrossEntropy(
            class_weights=class_weights, ignore_index=ignore_index, label_smoothing=label_smoothing
        )

    @property
    def parts(self) -> Sequence[tuple[float, Cost]]:
        """Dice, whose mean is over samples, and the cross entropy, whose mean is over cells."""
        return tuple(zip(self.weights, (self.dice, self.cross_entropy), strict=True))

    def local_sum(self, y: Any, targets: Any, sum_over_tiles: TileSum = no_reduction) -> Any:
        """Return n times the weighted sum of the mean Dice over samples and the mean cross entropy over cells."""
        return sum(scale * part.local_sum(y, targets, sum_over_tiles) for scale, part in self._scaled_parts(y, targets))

    def local_sum_gradient(self, y: Any, targets: Any, sum_over_tiles: TileSum = no_reduction) -> Any:
        """Return the gradient of `local_sum`."""
        dice_gradient, entropy_gradient = (
            y.dtype.type(scale) * part.local_sum_gradient(y, targets, sum_over_tiles)
            for scale, part in self._scaled_parts(y, targets)
        )
        return dice_gradient + entropy_gradient

    def denominator_per_sample(self, y_shape: tuple[int, ...]) -> int:
        """Return 1: a sample's cost is one number."""
        return 1

    def check_output_shape(self, y_shape: tuple[int, ...], classes: int | None) -> None:
        """Raise UserError as the cross entropy does."""
        super().check_output_shape(y_shape, classes)
        self.reject_single_softmax_output(y_shape[-1])
        self.check_output_weights("class_weights", self.cross_entropy.class_weights, y_shape[-1])

    def _scaled_parts(self, y: Any, targets: Any) -> list[tuple[float, Cost]]:
        denominators = [part.local_denominator(y.shape, targets) for _, part in self.parts]
        return [(f * len(y) / w if w else 0.0, part) for (f, part), w in zip(self.parts, denominators, strict=True)]


def _sum_over_cells(array: Any) -> Any:
    """Return the sums over the spatial axes, (n, C), in float64."""
    return array.sum(axis=tuple(range(1, array.ndim - 1)), dtype="f8")
