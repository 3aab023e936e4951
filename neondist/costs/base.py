"""Interface of costs: a sum over the local cells, its gradient, and the denominator of the mean."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from ..errors import ConfigError, ShapeError, set_error_subject
from ..formats.fields import FieldMetadata
from ..geometry import Box
from ..registry import Registered
from ..terminal.console import counted

TileSum: TypeAlias = Callable[[Any], Any]
"""Function that sums an array over the tiles that share a sample, and returns the sum. Collective."""


def no_reduction(array: Any) -> Any:
    """Return the array itself, which is the sum if no other rank shares the samples."""
    return array


class Cost(Registered, ABC):
    """Base class of costs of outputs against targets, summed over this rank's cells.

    The sums of all ranks are added; the model divides the total by `global batch * denominator_per_sample(output
    shape)`, or, if `has_weighted_mean`, by the sum of the `local_denominator` of all ranks, so no rank needs the cells
    of the others. All arrays may be empty. Outputs may be on a device, to which the NumPy targets must then be moved:
    `namespace(y).asarray(targets)`.

    Attributes
    ----------
    has_weighted_mean : bool
        Whether the denominator of the mean depends on the targets.
    has_target_per_output : bool
        Whether the target of a cell must be a class label, or one value per output.
    ignore_index : int or None
        Label of the cells that are ignored, also by metrics.
    parts : sequence of (factor, Cost)
        The costs whose means are added; a simple cost is its only part.
    """

    has_weighted_mean = has_target_per_output = False
    ignore_index: int | None = None

    @property
    def parts(self) -> Sequence[tuple[float, Cost]]:
        """The costs whose means are added, each times its factor."""
        return ((1.0, self),)

    def check_cell_weights_available(self, y_shape: tuple[int, ...], fields: FieldMetadata | None) -> None:
        """Raise UserError unless the weights of cells, if any, exist for outputs of this global shape."""

    def restrict_to_box(self, extent: Sequence[int], box: Box, fields: FieldMetadata | None) -> Cost:
        """Return the cost for outputs whose local cells are a box of the global extent."""
        return self

    @abstractmethod
    def local_sum(self, y: Any, targets: Any, sum_over_tiles: TileSum = no_reduction) -> Any:
        """Return the sum of the cost over the local samples and cells of `y`: a number, or an array of shape ().

        `sum_over_tiles` is for costs that are not sums over cells: each rank returns its share of the result.
        """

    @abstractmethod
    def local_sum_gradient(self, y: Any, targets: Any, sum_over_tiles: TileSum = no_reduction) -> Any:
        """Return the gradient of `local_sum` with respect to `y`: a new array of its shape and dtype."""

    def local_denominator(self, shape: Sequence[int], targets: Any) -> float:
        """Return this rank's share of the mean's denominator, for outputs of the local `shape` (n, *spatial, C)."""
        return float(shape[0] * self.denominator_per_sample(tuple(shape[1:])))

    def denominator_per_sample(self, y_shape: tuple[int, ...]) -> int:
        """Return a sample's part of the mean's denominator, for outputs of the GLOBAL shape `y_shape` (no batch)."""
        return math.prod(y_shape[:-1])

    def reduced_elements_per_sample(self, y_shape: tuple[int, ...]) -> int:
        """Return the number of float64 elements per sample that `local_sum` and its gradient reduce in total."""
        return 0

    def check_output_shape(self, y_shape: tuple[int, ...], classes: int | None) -> None:
        """Raise ShapeError if outputs of the global shape `y_shape` cannot be compared with labels.

        `classes` is the number of classes, or None if the targets are not labels.
        """
        if classes is not None and y_shape[-1] < classes:
            raise ShapeError(
                f"the last layer has {counted(y_shape[-1], 'output')}, but the data set has"
                f" {counted(classes, 'class', 'classes')}; give the layer {counted(classes, 'output')}"
            )

    def check_target_shape(self, y_shape: tuple[int, ...], target_shape: tuple[int, ...] | None) -> None:
        """Raise ShapeError if outputs of the global shape `y_shape` cannot be compared with targets of these shapes.

        Only the spatial axes are compared unless `has_target_per_output` is set. `target_shape` is the shape of the
        targets of a sample; None: unknown.
        """
        if target_shape is None or target_shape in (y_shape, y_shape[:-1]):
            return
        if not self.has_target_per_output and target_shape[: len(y_shape) - 1] == y_shape[:-1]:
            return
        if not target_shape:
            remedy = "one class per image; end the network with a fully connected or a global pooling layer"
        else:
            alternative = f" or {y_shape[:-1]}" if y_shape[:-1] else ""
            remedy = f"targets of shape {target_shape}, not {y_shape}{alternative}; change the layers, or the targets"
        raise ShapeError(f"the network's outputs have shape {y_shape}, but the data set has {remedy}")

    def reject_single_softmax_output(self, outputs: int) -> None:
        """Raise ConfigError, naming this cost, if its softmax is over a single output."""
        if outputs == 1:
            with set_error_subject(self):
                raise ConfigError(
                    f"cost: {type(self).__name__} applies a softmax, which is always 1 for a single output, so nothing"
                    " would be trained; use BCE for two classes with one output, MSE for a number, or give the last"
                    " layer an output per class"
                )

    def check_output_weights(self, name: str, weights: Sequence[float] | None, outputs: int) -> None:
        """Raise ConfigError, naming this cost, unless there is a weight for each output and not all are 0."""
        if weights is None:
            return
        problem = ""
        if len(weights) != outputs:
            problem = f"{counted(len(weights), 'weight')} for {counted(outputs, 'output')}; give one per output"
        if problem or not any(weights):
            with set_error_subject(self):
                raise ConfigError(f"{name}: {problem or 'all are 0; set at least one above 0'}")
