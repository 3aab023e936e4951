"""Errors of forecasts by variable, in its units: RMSE, MAE, bias, R² and the anomaly correlation."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import ConfigError, DataError, ShapeError
from ..formats.cell_weights import cell_weights, check_weights
from ..formats.fields import Fields
from .base import Meter, Metric, MetricValue
from .outputs import Outputs


class FieldMetric(Metric):
    """Base class of metrics per output channel: 'rmse_t2m' for fields, else a list under the metric's name.

    Parameters
    ----------
    weights : str, optional
        Weight of each cell: 'cos(lat)', or a file, 'FILE.nc:NAME'. Default: uniform.
    """

    #: number of sums per channel
    kinds = 2

    def __init__(self, *, weights: str | None = None) -> None:
        self.weights = weights

    @abstractmethod
    def sums(self, y: np.ndarray, targets: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Return sums (k, C) over samples and cells for outputs and targets (n, *tile, C) in float64."""

    def of_sums(self, sums: np.ndarray) -> np.ndarray:
        """Return the metric (C,) from global sums (k, ..., C); default: the first sum over the second."""
        return np.asarray(sums[0] / sums[1])

    def measure(self, y: np.ndarray, targets: np.ndarray) -> Sequence[float]:
        """Return the sums of whole images, flattened from (k, C)."""
        sums: list[float] = self._sums(y, targets, np.ones((1, 1))).ravel().tolist()
        return sums

    def result(self, sums: np.ndarray) -> dict[str, MetricValue]:
        """Return the values of the channels as a list, or a number for a single channel."""
        return self.named(self.of_sums(sums.reshape(self.kinds, -1)), None)

    def named(self, numbers: np.ndarray, fields: Fields | None) -> dict[str, MetricValue]:
        """Return the channels' numbers by their names in results."""
        if fields is not None:
            return {f"{self.name}_{name}": float(number) for name, number in zip(fields.names, numbers, strict=True)}
        return {self.name: float(numbers[0]) if len(numbers) == 1 else numbers.tolist()}

    def check_place(self, y_shape: tuple[int, ...], fields: Fields | None) -> None:
        """Raise UserError unless there are weights for outputs of this global shape (*spatial, C)."""
        if len(y_shape) < 2:
            raise ShapeError(
                f"{type(self).__name__} compares fields, but the last layer returns a vector; leave it out"
            )
        if self.weights is not None:
            check_weights(self.weights, y_shape[:-1], fields)

    def meter(self, outputs: Outputs) -> Meter:
        """Return the accumulator of one evaluation."""
        return _FieldMeter(self, outputs)

    def _sums(self, y: np.ndarray, targets: np.ndarray, weights: np.ndarray) -> np.ndarray:
        if targets.shape == y.shape[:-1] and y.shape[-1] == 1:
            targets = targets[..., None]
        if targets.shape != y.shape:
            return np.full((self.kinds, y.shape[-1]), np.nan)
        return self.sums(y.astype("f8"), targets.astype("f8"), weights)


class _FieldMeter(Meter):
    """Accumulator of a metric over this rank's cells, in physical units."""

    metric: FieldMetric

    def __init__(self, metric: FieldMetric, outputs: Outputs) -> None:
        super().__init__(metric, outputs)
        self.fields, self.weights = outputs.fields, np.ones((1, 1))
        extent = outputs.shape[:-1]
        self.box = outputs.grid.partition(extent).box(outputs.grid.tile)
        if metric.weights is not None:
            self.weights = cell_weights(metric.weights, extent, self.box, self.fields)

    def add(self, y: Any, targets: Any) -> None:
        sums = self.metric._sums(*self.physical(y, targets), self.weights)
        self.sums = sums if self.sums is None else self.sums + sums

    def result(self) -> dict[str, MetricValue]:
        channels = self.outputs.shape[-1]
        if self.sums is None:
            self.sums = np.zeros((self.metric.kinds, channels))
        total = np.asarray(self.outputs.total(self.sums.ravel())).reshape(self.metric.kinds, channels)
        with np.errstate(divide="ignore", invalid="ignore"):
            return self.metric.named(self.metric.of_sums(total), self.fields)

    def physical(self, y: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return outputs and targets in the units of the files."""
        if self.fields is None:
            return y, targets
        std, mean = self.fields.std, self.fields.mean
        return y.astype("f8") * std + mean, targets.astype("f8") * std + mean


class RMSE(FieldMetric):
    """Root of the mean squared error of each variable, over all times and cells, in its units."""

    name = "rmse"

    def sums(self, y: np.ndarray, targets: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Return the sum of squared errors and the divisor."""
        return _weighted((y - targets) ** 2, weights)

    def of_sums(self, sums: np.ndarray) -> np.ndarray:
        """Return the roots of the means."""
        return np.sqrt(super().of_sums(sums))


class MeanAbsoluteError(FieldMetric):
    """Mean absolute error of each variable, in its units; `!MAE` in the metrics of a YAML file."""

    name = "mae"
    _called_in_fields = ("MAE",)

    def sums(self, y: np.ndarray, targets: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Return the sum of absolute errors and the divisor."""
        return _weighted(np.abs(y - targets), weights)


class Bias(FieldMetric):
    """Mean of output minus target of each variable, in its units."""

    name = "bias"

    def sums(self, y: np.ndarray, targets: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Return the sum of errors and the divisor."""
        return _weighted(y - targets, weights)


class R2(FieldMetric):
    """Coefficient of determination of each variable: 1 - (squared errors) / (squared differences from the mean target).

    The mean target is that of the evaluated split, over all times and cells, as in `sklearn.metrics.r2_score`.
    """

    name = "r2"
    larger_is_better = True
    kinds = 4

    def sums(self, y: np.ndarray, targets: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Return the sums of squared errors, targets and squared targets, and the divisor."""
        errors, cells = _weighted((y - targets) ** 2, weights)
        return np.stack([errors, _weighted(targets, weights)[0], _weighted(targets**2, weights)[0], cells])

    def of_sums(self, sums: np.ndarray) -> np.ndarray:
        """Return the coefficients."""
        errors, targets, squares, cells = sums
        return np.asarray(1 - errors / (squares - targets**2 / cells))

    def meter(self, outputs: Outputs) -> Meter:
        """Return the accumulator of one evaluation, on normalised values for accuracy of their squares."""
        return _Normalised(self, outputs)


class _Normalised(_FieldMeter):
    def physical(self, y: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return y, targets


class ACC(FieldMetric):
    """Anomaly correlation coefficient of each variable against the training climatology, averaged over all times.

    For each time it is sum(f o) / sqrt(sum(f²) sum(o²)) over cells, with f and o the output and the target minus their
    cell's mean over the training times.
    """

    name = "acc"
    larger_is_better = True
    kinds = 3

    def sums(self, y: np.ndarray, targets: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Return the sums of f o, f² and o²."""
        return np.stack([_weighted(product, weights)[0] for product in (y * targets, y * y, targets * targets)])

    def of_sums(self, sums: np.ndarray) -> np.ndarray:
        """Return the correlations of sums (3, ..., C)."""
        return np.asarray(sums[0] / np.sqrt(sums[1] * sums[2]))

    def check_place(self, y_shape: tuple[int, ...], fields: Fields | None) -> None:
        """Raise UserError unless there is a climatology."""
        super().check_place(y_shape, fields)
        if fields is None:
            raise ConfigError("ACC needs the climatology of a data set of fields, such as ClimateFiles; leave it out")
        if tuple(y_shape[:-1]) != tuple(fields.extent):
            raise ShapeError(
                f"ACC: outputs have {list(y_shape[:-1])} cells, but the climatology has {list(fields.extent)}"
            )

    def meter(self, outputs: Outputs) -> Meter:
        """Return the accumulator of one evaluation."""
        return _Correlations(self, outputs)


class _Correlations(_FieldMeter):
    """Accumulator of the correlations of samples over all their tiles."""

    def add(self, y: Any, targets: Any) -> None:
        if self.fields is None or self.fields.climatology is None:
            raise DataError("ACC: no climatology for these data; evaluate a split of the data set")
        y, targets = self.physical(y, targets)
        parts = [
            self.metric._sums(f[None] - self.fields.climatology, o[None] - self.fields.climatology, self.weights)
            for f, o in zip(y, targets, strict=True)
        ]
        shape = len(y), self.metric.kinds, self.outputs.shape[-1]
        sums = self.outputs.over_tiles((len(y), *self.box.shape, shape[-1]), np.array(parts, "f8").reshape(shape))
        with np.errstate(divide="ignore", invalid="ignore"):
            correlations = self.metric.of_sums(np.moveaxis(sums, 1, 0)).sum(0)
        self.sums = (0 if self.sums is None else self.sums) + np.array([*correlations.tolist(), len(y)])

    def result(self) -> dict[str, MetricValue]:
        sums = np.zeros(self.outputs.shape[-1] + 1) if self.sums is None else self.sums
        *total, count = self.outputs.total_of_samples(sums)
        numbers = np.array(total) / count if count else np.full(len(total), np.nan)
        return self.metric.named(numbers, self.fields)


def _weighted(cells: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the weighted sums of cells (n, *tile, C) and the sums of the weights, (2, C)."""
    axes = tuple(range(cells.ndim - 1))
    count = np.broadcast_to(weights, (*cells.shape[:-1], 1)).sum()
    return np.stack([(cells * weights).sum(axes), np.full(cells.shape[-1], count)])
