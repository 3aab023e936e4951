"""Interface of metrics: a sum and a count, which are added over ranks and batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from ..errors import PlanMismatchError, ShapeError, set_error_subject
from ..formats.fields import FieldMetadata
from ..registry import Registered
from .output_layout import OutputLayout

MetricValue: TypeAlias = "float | list[Any]"
"""A number, a list with one value per class or channel, or a list of rows; NaN if all cells are ignored."""


class Metric(Registered, ABC):
    """Base class of metrics of outputs against targets, by default a mean over samples (and cells)."""

    name: str = ""
    """Name in results, such as 'misclassification'."""
    #: whether outputs are converted to NumPy arrays; False: arrays of the model's backend
    needs_numpy = True
    #: whether larger values are better; None: neither larger nor smaller ones, as for a signed error
    larger_is_better: bool | None = False

    @abstractmethod
    def local_sums(self, y: np.ndarray, targets: np.ndarray) -> Sequence[float]:
        """Return the sum over the local samples and cells, and their number.

        `y` is (n, C) or (n, *spatial, C); `targets` are integer labels (n,) or (n, *spatial), or arrays with the shape
        of `y`: one-hot vectors or real values. The metric is the sum divided by the count, each summed over all ranks
        and batches; a sum of NaN means that the metric does not apply to the targets. Arrays may be empty. A metric
        that overrides `result` may return any fixed number of sums.
        """

    def result(self, sums: np.ndarray) -> dict[str, MetricValue]:
        """Return the metric's values by name, given the results of `local_sums` summed over all ranks and batches."""
        return {self.name: float(sums[0] / sums[1]) if sums[1] else float("nan")}

    def result_names(self, fields: FieldMetadata | None) -> list[str]:
        """Return the names of the numbers in results; `fields`: metadata of the outputs, if they are fields."""
        return [self.name]

    def check_class_count(self, classes: int | None) -> None:
        """Raise ConfigError if the metric cannot be used with that number of classes (None: no classes)."""

    def check_output_shape(self, y_shape: tuple[int, ...]) -> None:
        """Raise ShapeError if the metric cannot be used with outputs of that global shape, without the batch."""

    def check_field_metadata(self, y_shape: tuple[int, ...], fields: FieldMetadata | None) -> None:
        """Raise UserError if the metric cannot be used with the metadata of the output fields."""

    def create_meter(self, outputs: OutputLayout) -> Meter:
        """Return the accumulator of one evaluation; overridden by metrics that are not sums over cells."""
        return Meter(self, outputs)


class Meter:
    """Accumulator of a metric over batches and ranks."""

    def __init__(self, metric: Metric, outputs: OutputLayout) -> None:
        self.metric, self.outputs = metric, outputs
        self.sums: Any = None

    def add(self, y: Any, targets: Any) -> None:
        """Add a batch; called on all ranks."""
        sums = np.asarray(self.metric.local_sums(y, targets), "f8")
        min_length = 2 if type(self.metric).result is Metric.result else 1
        if sums.ndim != 1 or len(sums) < min_length or (self.sums is not None and self.sums.shape != sums.shape):
            with set_error_subject(self.metric):
                raise PlanMismatchError(
                    f"metrics: {type(self.metric).__name__}.local_sums returns {sums.tolist()}; expected a sum and a"
                    " count, or for a metric with its own `result` always the same number of sums"
                )
        self.sums = sums if self.sums is None else self.sums + sums

    def result(self) -> dict[str, MetricValue]:
        """Return the metric's values by name, equal on every rank. Collective."""
        if self.sums is None:  # no batch
            return {self.metric.name: float("nan")}
        return self.metric.result(self.outputs.sum_over_ranks(self.sums))


class PerSampleMetric(Metric):
    """Base class of metrics of whole images, averaged over the samples; tiles of an image are evaluated together."""

    #: number of extra cells that the sums of a block need after its end, along each axis
    overlap_cells = 0

    @abstractmethod
    def _sums_of_images(self, y: np.ndarray, targets: np.ndarray, outputs: OutputLayout) -> np.ndarray:
        """Return two sums per sample (n, 2) over this rank's tiles (n, *tile, C), in float64. Collective."""

    @abstractmethod
    def values_from_sums(self, sums: np.ndarray) -> np.ndarray:
        """Return the metric of each sample (n,), given the sums (n, 2) over all its tiles."""

    def local_sums(self, y: np.ndarray, targets: np.ndarray) -> Sequence[float]:
        """Return the metric's sum over whole samples, and the number of samples."""
        return self.sample_value_sum_and_count(y, targets, OutputLayout.whole(y.shape[1:]))

    def sample_value_sum_and_count(self, y: np.ndarray, targets: np.ndarray, outputs: OutputLayout) -> Sequence[float]:
        """Return the metric's sum over the samples of this rank's tiles, and their number. Collective over tiles."""
        values = self.values_from_sums(outputs.sum_over_tiles(y.shape, self.sums_per_sample(y, targets, outputs)))
        return float(values.sum()), len(y)

    def sums_per_sample(self, y: np.ndarray, targets: np.ndarray, outputs: OutputLayout | None = None) -> np.ndarray:
        """Return the sums (n, 2) over the given cells; NaN if targets are not images."""
        if targets.shape == y.shape[:-1] and y.shape[-1] == 1:
            targets = targets[..., None]
        if targets.shape != y.shape:
            return np.full((len(y), 2), np.nan)
        return self._sums_of_images(y.astype("f8"), targets.astype("f8"), outputs or OutputLayout.whole(y.shape[1:]))

    def check_output_shape(self, y_shape: tuple[int, ...]) -> None:
        """Raise ShapeError unless outputs are images."""
        if len(y_shape) < 2:
            raise ShapeError(
                f"{type(self).__name__} compares images, but the last layer returns a vector of {y_shape[-1]}"
                " elements; leave the metric out"
            )

    def create_meter(self, outputs: OutputLayout) -> Meter:
        """Return the accumulator of one evaluation."""
        return _PerSampleMeter(self, outputs)


class _PerSampleMeter(Meter):
    metric: PerSampleMetric

    def add(self, y: Any, targets: Any) -> None:
        sums = np.array(self.metric.sample_value_sum_and_count(y, targets, self.outputs))
        self.sums = sums if self.sums is None else self.sums + sums

    def result(self) -> dict[str, MetricValue]:
        if self.sums is None:
            return {self.metric.name: float("nan")}
        return self.metric.result(self.outputs.sum_over_replicas(self.sums))
