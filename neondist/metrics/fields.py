"""Errors of forecasts by variable, in its units: RMSE, MAE, bias, R² and the anomaly correlation."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import ConfigError, DataError, ShapeError
from ..formats.cell_weights import cell_weights, check_weights
from ..formats.fields import Fields
from .base import Found, Meter, Metric
from .outputs import Outputs


class OfVariables(Metric):
    """A metric with a number for each output channel: 'rmse_t2m' of fields, else a list under the metric's name.

    Parameters
    ----------
    weights : str, optional
        What each cell counts: 'cos(lat)', or a file, 'FILE.nc:NAME'. Default: all alike.
    """

    #: how many sums each channel has
    kinds = 2

    def __init__(self, *, weights: str | None = None) -> None:
        self.weights = weights

    @abstractmethod
    def sums(self, y: np.ndarray, targets: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Return sums (k, C) over samples and cells, of outputs and targets (n, *tile, C) in float64."""

    def of_sums(self, sums: np.ndarray) -> np.ndarray:
        """Return the numbers (C,) of sums (k, ..., C) over all ranks: by default the means of the first kind."""
        return np.asarray(sums[0] / sums[1])

    def measure(self, y: np.ndarray, targets: np.ndarray) -> Sequence[float]:
        """Return the sums of whole images, by channel, one kind after the other."""
        found: list[float] = self._sums(y, targets, np.ones((1, 1))).ravel().tolist()
        return found

    def result(self, sums: np.ndarray) -> dict[str, Found]:
        """Return the number of each channel as a list, of one channel the number."""
        return self.named(self.of_sums(sums.reshape(self.kinds, -1)), None)

    def named(self, numbers: np.ndarray, fields: Fields | None) -> dict[str, Found]:
        """Return numbers by channel under the names that results have."""
        if fields is not None:
            return {f"{self.name}_{name}": float(one) for name, one in zip(fields.names, numbers, strict=True)}
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
    """Adds up what a metric measures of this rank's cells, in physical units."""

    metric: OfVariables

    def __init__(self, metric: OfVariables, outputs: Outputs) -> None:
        super().__init__(metric, outputs)
        self.fields, self.weights = outputs.fields, np.ones((1, 1))
        extent = outputs.shape[:-1]
        self.box = outputs.grid.partition(extent).box(outputs.grid.tile)
        if metric.weights is not None:
            self.weights = cell_weights(metric.weights, extent, self.box, self.fields)

    def add(self, y: Any, targets: Any) -> None:
        found = self.metric._sums(*self.physical(y, targets), self.weights)
        self.sums = found if self.sums is None else self.sums + found

    def result(self) -> dict[str, Found]:
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


class RMSE(OfVariables):
    """Root of the mean squared error of each variable, over all times and cells, in its units."""

    name = "rmse"

    def sums(self, y: np.ndarray, targets: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Return the sum of squared errors and the divisor."""
        return _weighted((y - targets) ** 2, weights)

    def of_sums(self, sums: np.ndarray) -> np.ndarray:
        """Return the roots of the means."""
        return np.sqrt(super().of_sums(sums))


class MeanAbsoluteError(OfVariables):
    """Mean absolute error of each variable, in its units; `!MAE` in the metrics of a YAML file."""

    name = "mae"
    _called_in_fields = ("MAE",)

    def sums(self, y: np.ndarray, targets: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Return the sum of absolute errors and the divisor."""
        return _weighted(np.abs(y - targets), weights)


class Bias(OfVariables):
    """Mean of output minus target of each variable, in its units."""

    name = "bias"

    def sums(self, y: np.ndarray, targets: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Return the sum of errors and the divisor."""
        return _weighted(y - targets, weights)


class R2(OfVariables):
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
        """Return the accumulator of one evaluation: of normalised values, whose squares lose fewer digits."""
        return _Normalised(self, outputs)


class _Normalised(_FieldMeter):
    def physical(self, y: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return y, targets


class ACC(OfVariables):
    """Anomaly correlation coefficient of each variable against the training climatology, averaged over all times.

    For each time it is sum(f o) / sqrt(sum(f²) sum(o²)) over cells, with f and o the output and the target minus their
    cell's mean over the training times.
    """

    name = "acc"
    larger_is_better = True
    kinds = 3

    def sums(self, y: np.ndarray, targets: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Return the sums of f o, f² and o²."""
        return np.stack([_weighted(one, weights)[0] for one in (y * targets, y * y, targets * targets)])

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
    """Adds up the correlations of samples, each over all its tiles."""

    def add(self, y: Any, targets: Any) -> None:
        if self.fields is None or self.fields.climatology is None:
            raise DataError("ACC: no climatology for these data; evaluate a split of the data set")
        y, targets = self.physical(y, targets)
        each = [
            self.metric._sums(f[None] - self.fields.climatology, o[None] - self.fields.climatology, self.weights)
            for f, o in zip(y, targets, strict=True)
        ]
        shape = len(y), self.metric.kinds, self.outputs.shape[-1]
        sums = self.outputs.over_tiles((len(y), *self.box.shape, shape[-1]), np.array(each, "f8").reshape(shape))
        with np.errstate(divide="ignore", invalid="ignore"):
            found = self.metric.of_sums(np.moveaxis(sums, 1, 0)).sum(0)
        self.sums = (0 if self.sums is None else self.sums) + np.array([*found.tolist(), len(y)])

    def result(self) -> dict[str, Found]:
        sums = np.zeros(self.outputs.shape[-1] + 1) if self.sums is None else self.sums
        *total, count = self.outputs.total_of_samples(sums)
        numbers = np.array(total) / count if count else np.full(len(total), np.nan)
        return self.metric.named(numbers, self.fields)


def _weighted(cells: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the weighted sums (2, C) of cells (n, *tile, C), and of the weights alone."""
    axes = tuple(range(cells.ndim - 1))
    count = np.broadcast_to(weights, (*cells.shape[:-1], 1)).sum()
    return np.stack([(cells * weights).sum(axes), np.full(cells.shape[-1], count)])
