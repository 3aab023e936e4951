"""Area under the receiver operating characteristic."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from ..errors import DataError
from ..registry.ranges import Count
from .base import Meter, Metric, MetricValue
from .classes import scores_and_labels
from .output_layout import OutputLayout

MAX_DISTINCT_SCORES_PER_CLASS = 1 << 24
"""Largest number of distinct scores of a class."""


class ROCAUC(Metric):
    """Area under the ROC curve of each class against the rest, as in `sklearn.metrics.roc_auc_score`.

    Scores are softmax probabilities. The result for two classes, or one output with labels 0 and 1, is the area of
    class 1; for more classes, the mean over the classes ('ovr', 'macro') and `roc_auc_per_class`. A class to which all
    or no samples (or cells) belong has area NaN and is excluded from the mean; NaN if targets are real numbers.

    Parameters
    ----------
    bins : int, optional
        Number of bins to which probabilities are quantised. Default: no quantisation; the area is exact.

    Raises
    ------
    DataError
        At the end of an evaluation, if a class has more than 16.8 million distinct scores; `bins` limits their number.
        A rank stores 24 bytes per distinct score and class; at the end, each rank stores the scores of all ranks.
    """

    name = "roc_auc"
    larger_is_better = True

    def __init__(self, *, bins: Count | None = None) -> None:
        self.bins = bins

    def local_sums(self, y: np.ndarray, targets: np.ndarray) -> tuple[float, int]:
        """Return the area for these samples only, and 1; areas cannot be summed."""
        meter = _ROCMeter(self, OutputLayout.whole(y.shape[1:]))
        meter.add(y, targets)
        return float(np.asarray(meter.result()[self.name])), 1

    def create_meter(self, outputs: OutputLayout) -> Meter:
        """Return the accumulator of scores of one evaluation."""
        return _ROCMeter(self, outputs)

    def log_odds_or_bins(self, y: np.ndarray) -> np.ndarray:
        """Return log(p / (1 - p)) of every class (of two: class 1) in float64; with bins, floor(bins * p) instead."""
        y = y.astype("f8")
        if y.shape[-1] == 2:
            logits = y[..., 1:] - y[..., :1]
        else:
            other_scores = np.repeat(y[..., None, :], y.shape[-1], axis=-2)
            other_scores[..., np.arange(y.shape[-1]), np.arange(y.shape[-1])] = -np.inf
            max_score = other_scores.max(axis=-1, keepdims=True)
            logits = y - max_score[..., 0] - np.log(np.exp(other_scores - max_score).sum(axis=-1))
        if self.bins is None:
            return logits
        return np.floor(self.bins / (1 + np.exp(-np.clip(logits, -700, 700))))


class _ROCMeter(Meter):
    """Accumulator of positives and negatives by distinct score."""

    metric: ROCAUC

    def __init__(self, metric: ROCAUC, outputs: OutputLayout) -> None:
        super().__init__(metric, outputs)
        self.score_tables: list[np.ndarray] | None = None  # (3, scores) of each class: score, positives, negatives
        self.is_classification = self.fits_in_memory = True

    def add(self, y: Any, targets: Any) -> None:
        classified = scores_and_labels(y, targets)
        self.is_classification &= classified is not None
        if classified is None or not (self.is_classification and self.fits_in_memory):
            return
        scores, labels = (array.reshape(-1, *array.shape[y.ndim - 1 :]) for array in classified)
        class_scores = self.metric.log_odds_or_bins(scores).T
        first_class = scores.shape[-1] - len(class_scores)  # for two classes, the only scores are those of class 1
        new_tables = [_count_by_score(column, labels == first_class + at) for at, column in enumerate(class_scores)]
        if self.score_tables is not None:
            new_tables = [_merge_score_tables(pair) for pair in zip(self.score_tables, new_tables, strict=True)]
        self.score_tables = new_tables
        self.fits_in_memory = all(table.shape[1] <= MAX_DISTINCT_SCORES_PER_CLASS for table in self.score_tables)

    def result(self) -> dict[str, MetricValue]:
        outputs = self.outputs
        counts_outputs = outputs.owns_outputs and (len(outputs.shape) > 1 or outputs.grid.tile == 0)
        own_tables = self.score_tables if counts_outputs and self.is_classification and self.fits_in_memory else None
        gathered = outputs.grid.world.allgather((self.is_classification, self.fits_in_memory, own_tables))
        classification_flags, fit_flags, tables = zip(*gathered, strict=True)
        rank_tables = [table for table in tables if table is not None]
        if not all(classification_flags) or (all(fit_flags) and not rank_tables):
            return {self.metric.name: float("nan")}
        merged = [_merge_score_tables(pieces) for pieces in zip(*rank_tables, strict=True)] if all(fit_flags) else []
        if not merged or max(table.shape[1] for table in merged) > MAX_DISTINCT_SCORES_PER_CLASS:
            raise DataError(
                f"ROCAUC: more than {MAX_DISTINCT_SCORES_PER_CLASS:,} distinct scores, which would not fit in memory;"
                " quantise them with bins: 65536"
            ).mark_raised_on_all_ranks()
        areas = np.array([_area_under_curve(*table) for table in merged])
        if len(areas) == 1:
            return {self.metric.name: float(areas[0])}
        defined_areas = areas[~np.isnan(areas)]
        return {
            self.metric.name: float(defined_areas.mean()) if defined_areas.size else float("nan"),
            f"{self.metric.name}_per_class": areas.tolist(),
        }


def _count_by_score(scores: np.ndarray, positive: np.ndarray) -> np.ndarray:
    return _merge_score_tables([np.stack([scores, positive.astype("f8"), (~positive).astype("f8")])])


def _merge_score_tables(tables: Iterable[np.ndarray]) -> np.ndarray:
    """Return one table of distinct scores, sorted."""
    scores, *counts = np.concatenate(list(tables), axis=1)
    distinct_scores, indices = np.unique(scores, return_inverse=True)
    return np.stack([distinct_scores, *(np.bincount(indices.ravel(), count, len(distinct_scores)) for count in counts)])


def _area_under_curve(distinct_scores: np.ndarray, positive_counts: np.ndarray, negative_counts: np.ndarray) -> float:
    """Return the fraction of (positive, negative) pairs whose positive has the larger score; a tie counts as half."""
    pairs = positive_counts.sum() * negative_counts.sum()
    below = np.cumsum(negative_counts) - negative_counts / 2
    return float(positive_counts @ below / pairs) if pairs and not np.isnan(distinct_scores).any() else float("nan")
