"""Interface of metrics: a sum and a count, which are added over ranks and batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from ..errors import ShapeError
from ..formats.fields import Fields
from ..registry import Registered
from .outputs import Outputs

MetricValue: TypeAlias = "float | list[Any]"
"""A number, a list per class, or a table; NaN if no cell counts."""


class Metric(Registered, ABC):
    """Base class of metrics of outputs against targets, by default a mean over samples (and cells)."""

    name: str = ""
    """Name in results, such as 'misclassification'."""
    #: whether outputs are converted to NumPy arrays; False: arrays of the model's backend
    on_host = True
    #: whether larger values are better
    larger_is_better = False

    @abstractmethod
    def measure(self, y: np.ndarray, targets: np.ndarray) -> Sequence[float]:
        """Return the sum over the local samples and cells, and their number.

        `y` is (n, C) or (n, *spatial, C); `targets` are integer labels (n,) or (n, *spatial), or arrays with the shape
        of `y`: one-hot vectors or real values. The metric is the sum divided by the count, each summed over all ranks
        and batches; a sum of NaN means that it does not apply to the targets. Arrays may be empty. A metric that
        overrides `result` may return any fixed number of sums.
        """

    def result(self, sums: np.ndarray) -> dict[str, MetricValue]:
        """Return the metric's values by name, given the results of `measure` summed over all ranks and batches."""
        return {self.name: float(sums[0] / sums[1]) if sums[1] else float("nan")}

    def check(self, classes: int | None) -> None:
        """Raise ConfigError if the metric cannot be used with that number of classes (None: no classes)."""

    def check_outputs(self, y_shape: tuple[int, ...]) -> None:
        """Raise ShapeError if the metric cannot be used with outputs of that global shape, without the batch."""

    def check_place(self, y_shape: tuple[int, ...], fields: Fields | None) -> None:
        """Raise UserError if the metric cannot be used with the metadata of the output fields."""

    def meter(self, outputs: Outputs) -> Meter:
        """Return the accumulator of one evaluation, for metrics that are not sums over cells."""
        return Meter(self, outputs)


class Meter:
    """Accumulator of a metric over batches and ranks."""

    def __init__(self, metric: Metric, outputs: Outputs) -> None:
        self.metric, self.outputs = metric, outputs
        self.sums: Any = None

    def add(self, y: Any, targets: Any) -> None:
        """Add a batch; called on all ranks."""
        sums = np.asarray(self.metric.measure(y, targets), "f8")
        self.sums = sums if self.sums is None else self.sums + sums

    def result(self) -> dict[str, MetricValue]:
        """Return the metric's values by name, equal on every rank; collective."""
        if self.sums is None:  # no batch
            return {self.metric.name: float("nan")}
        return self.metric.result(self.outputs.total(self.sums))


class PerSample(Metric):
    """Base class of metrics of whole images, averaged over the samples; tiles of an image are evaluated together."""

    #: number of extra cells after the end of a part, along each axis, that its sums need
    beyond = 0

    @abstractmethod
    def sums(self, y: np.ndarray, targets: np.ndarray, outputs: Outputs) -> np.ndarray:
        """Return two sums per sample (n, 2) over this rank's tiles (n, *tile, C), in float64; collective."""

    @abstractmethod
    def of_samples(self, sums: np.ndarray) -> np.ndarray:
        """Return the metric of each sample (n,), given the sums (n, 2) over all its tiles."""

    def measure(self, y: np.ndarray, targets: np.ndarray) -> Sequence[float]:
        """Return the sum over whole samples, and their number."""
        return self.over_tiles(y, targets, Outputs.of_one(y.shape[1:]))

    def over_tiles(self, y: np.ndarray, targets: np.ndarray, outputs: Outputs) -> Sequence[float]:
        """Return the sum over the samples of this rank's tiles, and their number; collective over the tiles."""
        values = self.of_samples(outputs.over_tiles(y.shape, self.of_cells(y, targets, outputs)))
        return float(values.sum()), len(y)

    def of_cells(self, y: np.ndarray, targets: np.ndarray, outputs: Outputs | None = None) -> np.ndarray:
        """Return the sums (n, 2) over the given cells; NaN if targets are not images."""
        if targets.shape == y.shape[:-1] and y.shape[-1] == 1:
            targets = targets[..., None]
        if targets.shape != y.shape:
            return np.full((len(y), 2), np.nan)
        return self.sums(y.astype("f8"), targets.astype("f8"), outputs or Outputs.of_one(y.shape[1:]))

    def check_outputs(self, y_shape: tuple[int, ...]) -> None:
        """Raise ShapeError unless outputs are images."""
        if len(y_shape) < 2:
            raise ShapeError(
                f"{type(self).__name__} compares images, but the last layer returns a vector of {y_shape[-1]}"
                " elements; leave it out"
            )

    def meter(self, outputs: Outputs) -> Meter:
        """Return the accumulator of one evaluation."""
        return _SampleMeter(self, outputs)


class _SampleMeter(Meter):
    metric: PerSample

    def add(self, y: Any, targets: Any) -> None:
        self.sums = (0 if self.sums is None else self.sums) + np.array(self.metric.over_tiles(y, targets, self.outputs))

    def result(self) -> dict[str, MetricValue]:
        if self.sums is None:
            return {self.metric.name: float("nan")}
        return self.metric.result(self.outputs.total_of_samples(self.sums))
