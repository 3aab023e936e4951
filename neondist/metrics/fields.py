"""Metrics of forecasts per variable: RMSE, MAE and bias in its units, R², and the anomaly correlation."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import ConfigError, DataError, ShapeError
from ..formats.cell_weights import cell_weights, check_cell_weights
from ..formats.fields import FieldMetadata
from .base import Meter, Metric, MetricValue
from .output_layout import OutputLayout


class PerChannelMetric(Metric):
    """Base class of metrics of each output channel.

    The result has one value per variable if outputs are fields ('rmse_t2m'), else a list, or a number for one channel.

    Parameters
    ----------
    weights : str, optional
        Weight of each cell: 'cos(lat)', or a variable of a file, 'FILE.nc:NAME'. Default: uniform.
    """

    #: number of sums per channel
    sums_per_channel = 2

    def __init__(self, *, weights: str | None = None) -> None:
        self.weights = weights

    @abstractmethod
    def channel_sums(self, y: np.ndarray, targets: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Return sums (k, C) over samples and cells for outputs and targets (n, *tile, C) in float64."""

    def values_from_sums(self, sums: np.ndarray) -> np.ndarray:
        """Return the metric (C,) from global sums (k, ..., C); default: the first sum divided by the second."""
        return np.asarray(sums[0] / sums[1])

    def local_sums(self, y: np.ndarray, targets: np.ndarray) -> Sequence[float]:
        """Return the sums of whole images, flattened from (k, C)."""
        sums: list[float] = self._sums_or_nan(y, targets, np.ones((1, 1))).ravel().tolist()
        return sums

    def result(self, sums: np.ndarray) -> dict[str, MetricValue]:
        """Return the values of the channels as a list, or a number for a single channel."""
        return self.values_by_variable(self.values_from_sums(sums.reshape(self.sums_per_channel, -1)), None)

    def result_names(self, fields: FieldMetadata | None) -> list[str]:
        """Return the names of the metric of each variable."""
        return super().result_names(fields) if fields is None else [f"{self.name}_{name}" for name in fields.names]

    def values_by_variable(self, values: np.ndarray, fields: FieldMetadata | None) -> dict[str, MetricValue]:
        """Return the values of the channels by their names in results."""
        if fields is not None:
            return dict(zip(self.result_names(fields), values.tolist(), strict=True))
        return {self.name: float(values[0]) if len(values) == 1 else values.tolist()}

    def check_field_metadata(self, y_shape: tuple[int, ...], fields: FieldMetadata | None) -> None:
        """Raise UserError if outputs of this global shape (*spatial, C) do not match the weights."""
        if self.weights is not None:
            if len(y_shape) < 2:
                raise ShapeError("weights: the last layer returns a vector, which has no cells; leave them out")
            check_cell_weights(self.weights, y_shape[:-1], fields)

    def create_meter(self, outputs: OutputLayout) -> Meter:
        """Return the accumulator of one evaluation."""
        return _PerChannelMeter(self, outputs)

    def _sums_or_nan(self, y: np.ndarray, targets: np.ndarray, weights: np.ndarray) -> np.ndarray:
        if targets.shape == y.shape[:-1] and y.shape[-1] == 1:
            targets = targets[..., None]
        if targets.shape != y.shape:
            return np.full((self.sums_per_channel, y.shape[-1]), np.nan)
        return self.channel_sums(y.astype("f8"), targets.astype("f8"), weights)


class _PerChannelMeter(Meter):
    """Accumulator of a metric over this rank's cells, in physical units."""

    metric: PerChannelMetric

    def __init__(self, metric: PerChannelMetric, outputs: OutputLayout) -> None:
        super().__init__(metric, outputs)
        self.fields, self.weights = outputs.fields, np.ones((1, 1))
        extent = outputs.shape[:-1]
        self.box = outputs.grid.partition(extent).box(outputs.grid.tile)
        if metric.weights is not None:
            self.weights = cell_weights(metric.weights, extent, self.box, self.fields)

    def add(self, y: Any, targets: Any) -> None:
        sums = self.metric._sums_or_nan(*self.to_physical_units(y, targets), self.weights)
        self.sums = sums if self.sums is None else self.sums + sums

    def result(self) -> dict[str, MetricValue]:
        shape = self.metric.sums_per_channel, self.outputs.shape[-1]
        if self.sums is None:
            self.sums = np.zeros(shape)
        global_sums = np.asarray(self.outputs.sum_over_ranks(self.sums.ravel())).reshape(shape)
        with np.errstate(divide="ignore", invalid="ignore"):
            return self.metric.values_by_variable(self.metric.values_from_sums(global_sums), self.fields)

    def to_physical_units(self, y: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return outputs and targets in the units of the files."""
        if self.fields is None:
            return y, targets
        std, mean = self.fields.std, self.fields.mean
        return y.astype("f8") * std + mean, targets.astype("f8") * std + mean


class RMSE(PerChannelMetric):
    """Root of the mean squared error of each variable, over all times and cells, in the variable's units."""

    name = "rmse"

    def channel_sums(self, y: np.ndarray, targets: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Return the sum of squared errors of each channel, and the divisor."""
        return _sums_and_divisor((y - targets) ** 2, weights)

    def values_from_sums(self, sums: np.ndarray) -> np.ndarray:
        """Return the roots of the means."""
        return np.sqrt(super().values_from_sums(sums))


class MeanAbsoluteError(PerChannelMetric):
    """Mean absolute error of each variable, in the variable's units; `!MAE` in the metrics of a YAML file."""

    name = "mae"
    _short_names = ("MAE",)

    def channel_sums(self, y: np.ndarray, targets: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Return the sum of absolute errors and the divisor."""
        return _sums_and_divisor(np.abs(y - targets), weights)


class Bias(PerChannelMetric):
    """Mean of output minus target of each variable, in the variable's units."""

    name = "bias"
    larger_is_better = None

    def channel_sums(self, y: np.ndarray, targets: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Return the sum of errors and the divisor."""
        return _sums_and_divisor(y - targets, weights)


class R2(PerChannelMetric):
    """Coefficient of determination of each variable: 1 - (squared errors) / (squared differences from the mean target).

    The mean target is taken over all times and cells of the evaluated split, as in `sklearn.metrics.r2_score`.
    """

    name = "r2"
    larger_is_better = True
    sums_per_channel = 4

    def channel_sums(self, y: np.ndarray, targets: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Return the sums of squared errors, targets and squared targets, and the divisor."""
        error_sums, cells = _sums_and_divisor((y - targets) ** 2, weights)
        return np.stack([error_sums, *(_sums_and_divisor(array, weights)[0] for array in (targets, targets**2)), cells])

    def values_from_sums(self, sums: np.ndarray) -> np.ndarray:
        """Return the coefficients."""
        errors, targets, squares, cells = sums
        return np.asarray(1 - errors / (squares - targets**2 / cells))

    def create_meter(self, outputs: OutputLayout) -> Meter:
        """Return the accumulator of one evaluation; it sums normalised values, whose squares are more accurate."""
        return _NormalisedUnitsMeter(self, outputs)


class _NormalisedUnitsMeter(_PerChannelMeter):
    def to_physical_units(self, y: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return y, targets


class ACC(PerChannelMetric):
    """Anomaly correlation coefficient of each variable against the training climatology, averaged over all times.

    For each time it is sum(f o) / sqrt(sum(f²) sum(o²)) over cells, where f and o are the output and the target minus
    the cell's mean over the training times.
    """

    name = "acc"
    larger_is_better = True
    sums_per_channel = 3

    def channel_sums(self, y: np.ndarray, targets: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Return the sums of f o, f² and o²."""
        return np.stack([_sums_and_divisor(product, weights)[0] for product in (y * targets, y * y, targets * targets)])

    def values_from_sums(self, sums: np.ndarray) -> np.ndarray:
        """Return the correlations of sums (3, ..., C)."""
        return np.asarray(sums[0] / np.sqrt(sums[1] * sums[2]))

    def check_field_metadata(self, y_shape: tuple[int, ...], fields: FieldMetadata | None) -> None:
        """Raise UserError unless the weights and a climatology match the outputs."""
        super().check_field_metadata(y_shape, fields)
        if fields is None:
            raise ConfigError("ACC needs the climatology of a data set of fields, such as ClimateFiles; leave ACC out")
        if tuple(y_shape[:-1]) != tuple(fields.extent):
            raise ShapeError(
                f"ACC: outputs have {list(y_shape[:-1])} cells, but the climatology has {list(fields.extent)};"
                " make the network preserve the extent, or leave ACC out"
            )

    def create_meter(self, outputs: OutputLayout) -> Meter:
        """Return the accumulator of one evaluation."""
        return _CorrelationMeter(self, outputs)


class _CorrelationMeter(_PerChannelMeter):
    """Accumulator of the correlations of samples over all their tiles."""

    def add(self, y: Any, targets: Any) -> None:
        if self.fields is None or self.fields.climatology is None:
            raise DataError("ACC: no climatology for these data; evaluate a split of the data set")
        y, targets = self.to_physical_units(y, targets)
        parts = [
            self.metric._sums_or_nan(f[None] - self.fields.climatology, o[None] - self.fields.climatology, self.weights)
            for f, o in zip(y, targets, strict=True)
        ]
        shape = len(y), self.metric.sums_per_channel, self.outputs.shape[-1]
        sums = self.outputs.sum_over_tiles((len(y), *self.box.shape, shape[-1]), np.array(parts, "f8").reshape(shape))
        with np.errstate(divide="ignore", invalid="ignore"):
            correlations = self.metric.values_from_sums(np.moveaxis(sums, 1, 0)).sum(0)
        self.sums = (0 if self.sums is None else self.sums) + np.array([*correlations.tolist(), len(y)])

    def result(self) -> dict[str, MetricValue]:
        sums = np.zeros(self.outputs.shape[-1] + 1) if self.sums is None else self.sums
        *correlation_sums, num_samples = self.outputs.sum_over_replicas(sums)
        means = np.array(correlation_sums) / num_samples if num_samples else np.full(len(correlation_sums), np.nan)
        return self.metric.values_by_variable(means, self.fields)


def _sums_and_divisor(cells: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the weighted sums of cells (n, *tile, C) and the sums of the weights, (2, C)."""
    axes = tuple(range(cells.ndim - 1))
    weight_sum = np.broadcast_to(weights, (*cells.shape[:-1], 1)).sum()
    return np.stack([(cells * weights).sum(axes), np.full(cells.shape[-1], weight_sum)])
