"""Elementwise costs: squared, absolute and Huber errors, and the binary cross entropy."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from copy import copy
from typing import Any

from ..arrays.namespace import namespace
from ..errors import ConfigError, ShapeError
from ..formats.cell_weights import cell_weights, check_cell_weights
from ..formats.fields import FieldMetadata
from ..geometry import Box
from ..registry.ranges import NotNegative, Positive
from .base import Cost, TileSum, no_reduction
from .labels import are_dense_targets, mask_ignored, one_hot, targets_as_values


class Regression(Cost):
    """Base class of costs that average a function of the difference over batch, cells and outputs.

    Outputs `y` are (n, C) or (n, *spatial, C), local to this rank. Targets are numbers with the shape of `y`, or, for
    one output, without the last axis; integer labels for several outputs stand for one-hot vectors.

    Parameters
    ----------
    weights : str, optional
        Weight of each cell, relative to the mean over all cells: 'cos(lat)' for a data set with latitudes, or a
        variable of a file, 'FILE.nc:NAME'. Default: uniform.
    """

    has_target_per_output = True

    _cell_weights: Any = None  # weights of the local cells (*tile, 1)

    def __init__(self, *, weights: str | None = None) -> None:
        self.weights = weights

    def local_sum(self, y: Any, targets: Any, sum_over_tiles: TileSum = no_reduction) -> Any:
        """Return the sum over the local cells, summed in float64."""
        return self._apply_cell_weights(self.elementwise_costs(y - targets_as_values(y, targets))).sum(dtype="f8")

    def local_sum_gradient(self, y: Any, targets: Any, sum_over_tiles: TileSum = no_reduction) -> Any:
        """Return the derivative at every difference."""
        return self._apply_cell_weights(self.elementwise_derivatives(y - targets_as_values(y, targets)))

    def _apply_cell_weights(self, cells: Any) -> Any:
        """Return an array (n, *tile, C) times the weights of its cells."""
        if self.weights is None:
            return cells
        if self._cell_weights is None or self._cell_weights.shape[:-1] != cells.shape[1:-1]:
            raise ConfigError(
                "weights: a cost with cell weights can be used only in an experiment with a data set; leave weights out"
            )
        return cells * namespace(cells).asarray(self._cell_weights, cells.dtype)

    def check_cell_weights_available(self, y_shape: tuple[int, ...], fields: FieldMetadata | None) -> None:
        """Raise UserError unless there are weights for outputs of this global shape."""
        if self.weights is not None and len(y_shape) < 2:
            raise ShapeError("weights: apply to cells, but the last layer returns a vector; leave weights out")
        if self.weights is not None:
            check_cell_weights(self.weights, y_shape[:-1], fields)

    def restrict_to_box(self, extent: Sequence[int], box: Box, fields: FieldMetadata | None) -> Cost:
        """Return the cost with the weights of a box of cells."""
        if self.weights is None:
            return self
        cost = copy(self)
        cost._cell_weights = cell_weights(self.weights, extent, box, fields)
        return cost

    @abstractmethod
    def elementwise_costs(self, difference: Any) -> Any:
        """Return the cost of each difference."""

    @abstractmethod
    def elementwise_derivatives(self, difference: Any) -> Any:
        """Return the derivative of `elementwise_costs`."""

    def denominator_per_sample(self, y_shape: tuple[int, ...]) -> int:
        """Return the number of outputs of a sample."""
        return math.prod(y_shape)

    def check_output_shape(self, y_shape: tuple[int, ...], classes: int | None) -> None:
        """Raise ShapeError as other costs do, except that a single output fits any number of classes."""
        if y_shape[-1] > 1:
            super().check_output_shape(y_shape, classes)


class MSE(Regression):
    """Mean squared error, equivalent to `torch.nn.MSELoss`; for the sum over a sample see SumSquared.

    Parameters
    ----------
    weights : str, optional
        Weight of each cell, relative to the mean over all cells: 'cos(lat)' for a data set with latitudes, or a
        variable of a file, 'FILE.nc:NAME'. Default: uniform.
    """

    def elementwise_costs(self, difference: Any) -> Any:
        """Return the squares."""
        return difference * difference

    def elementwise_derivatives(self, difference: Any) -> Any:
        """Return twice the differences."""
        return 2 * difference


class MAE(Regression):
    """Mean absolute error, equivalent to `torch.nn.L1Loss`; the gradient at 0 is 0.

    Parameters
    ----------
    weights : str, optional
        Weight of each cell, as in MSE.
    """

    def elementwise_costs(self, difference: Any) -> Any:
        """Return the absolute values."""
        return abs(difference)

    def elementwise_derivatives(self, difference: Any) -> Any:
        """Return the signs."""
        return namespace(difference).sign(difference)


class Huber(Regression):
    """Huber loss, quadratic for small differences, else linear (Huber 1964); equivalent to `torch.nn.HuberLoss`.

    Parameters
    ----------
    delta : float
        Threshold above which the cost of a difference d is linear, ``delta * (|d| - delta / 2)``.
    weights : str, optional
        Weight of each cell, as in MSE.
    """

    def __init__(self, delta: Positive = 1.0, *, weights: str | None = None) -> None:
        super().__init__(weights=weights)
        self.delta = float(delta)

    def elementwise_costs(self, difference: Any) -> Any:
        """Return quadratic costs of small differences and linear costs of large ones."""
        xp, size = namespace(difference), abs(difference)
        return xp.where(size <= self.delta, 0.5 * size * size, self.delta * (size - 0.5 * self.delta))

    def elementwise_derivatives(self, difference: Any) -> Any:
        """Return the differences, clamped to delta."""
        xp = namespace(difference)
        return xp.minimum(xp.maximum(difference, -self.delta), self.delta)


class BCE(Cost):
    """Binary cross entropy of logits, one per output, equivalent to `torch.nn.BCEWithLogitsLoss`.

    Outputs `y` are logits (n, C) or (n, *spatial, C), local to this rank, not probabilities: the cost applies the
    logistic function itself. Targets are numbers from 0 to 1 with the shape of `y`; or labels (n,) or (n, *spatial): 0
    and 1 for one output, otherwise classes, each against the rest. The mean is over batch, cells and outputs.

    Parameters
    ----------
    pos_weight : float or sequence of float, optional
        Weight of positive targets, per output. Default: 1.
    ignore_index : int, optional
        Cells with this label are ignored, including in the mean. A batch with only this label has a mean of 0.
    """

    has_target_per_output = True

    def __init__(
        self, *, pos_weight: NotNegative | Sequence[NotNegative] | None = None, ignore_index: int | None = None
    ) -> None:
        self.pos_weight, self.ignore_index = pos_weight, ignore_index
        self.has_weighted_mean = ignore_index is not None

    def local_sum(self, y: Any, targets: Any, sum_over_tiles: TileSum = no_reduction) -> Any:
        """Return the sum over the local cells, summed in float64."""
        xp = namespace(y)
        t, positive_weight, valid_mask = self._targets_weights_and_mask(y, targets)
        common_term = xp.log1p(xp.exp(-abs(y)))  # common term of both classes
        costs = positive_weight * t * (common_term + xp.maximum(-y, 0)) + (1 - t) * (common_term + xp.maximum(y, 0))
        return (costs * valid_mask).sum(dtype="f8")

    def local_sum_gradient(self, y: Any, targets: Any, sum_over_tiles: TileSum = no_reduction) -> Any:
        """Return p (1 - t) - w (1 - p) t, with p the logistic function of `y` and w the weight of positive targets."""
        xp = namespace(y)
        t, positive_weight, valid_mask = self._targets_weights_and_mask(y, targets)
        exp_minus_abs = xp.exp(-abs(y))
        p = xp.where(y >= 0, 1 / (1 + exp_minus_abs), exp_minus_abs / (1 + exp_minus_abs))
        one_minus_p = xp.where(y >= 0, exp_minus_abs / (1 + exp_minus_abs), 1 / (1 + exp_minus_abs))
        return (valid_mask * (p * (1 - t) - positive_weight * t * one_minus_p)).astype(y.dtype)

    def local_denominator(self, shape: Sequence[int], targets: Any) -> float:
        """Return the number of local outputs in cells that are not ignored."""
        if tuple(targets.shape) == tuple(shape):
            return super().local_denominator(shape, targets)
        return float((targets != self.ignore_index).sum() * shape[-1])

    def denominator_per_sample(self, y_shape: tuple[int, ...]) -> int:
        """Return the number of outputs of a sample."""
        return math.prod(y_shape)

    def check_output_shape(self, y_shape: tuple[int, ...], classes: int | None) -> None:
        """Raise UserError if the outputs do not match the classes, or the weights do not match the outputs."""
        if y_shape[-1] > 1 or classes != 2:
            super().check_output_shape(y_shape, classes)
        weights = self.pos_weight if isinstance(self.pos_weight, Sequence) else None
        self.check_output_weights("pos_weight", weights, y_shape[-1])

    def _targets_weights_and_mask(self, y: Any, targets: Any) -> tuple[Any, Any, Any]:
        """Return the targets as numbers, the weights of positive ones, and the mask of counted cells."""
        xp, outputs = namespace(y), y.shape[-1]
        positive_weight = 1.0 if self.pos_weight is None else xp.asarray(self.pos_weight, y.dtype)
        if targets.dtype.kind == "f" or are_dense_targets((*y.shape[:-1], max(2, outputs)), targets, self.ignore_index):
            return targets_as_values(y, targets), positive_weight, 1.0
        labels, valid_mask = mask_ignored(targets, self.ignore_index)
        t = xp.asarray(labels, y.dtype)[..., None] if outputs == 1 else one_hot(labels, y).astype(y.dtype)
        return t, positive_weight, 1.0 if valid_mask is None else xp.asarray(valid_mask, y.dtype)[..., None]
