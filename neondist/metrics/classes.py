"""Classification metrics from counts of predicted and true classes."""

from __future__ import annotations

from abc import abstractmethod
from math import prod
from typing import Any, Literal

import numpy as np

from ..costs.labels import are_classification_targets, targets_as_labels
from .base import Metric, MetricValue


def scores_and_labels(y: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the scores of every class (..., C) and the labels; None for regression targets.

    A single output, the score of class 1 with labels 0 and 1, is extended to two classes.
    """
    if y.shape[-1] == 1 and targets.dtype.kind in "iub" and targets.shape in (y.shape, y.shape[:-1]):
        labels = targets.reshape(y.shape[:-1]).astype("i8")
        if labels.size and not 0 <= labels.min() <= labels.max() <= 1:
            return None
        return np.concatenate([np.zeros_like(y), y], axis=-1), labels
    if (y.shape[-1] == 1 and targets.dtype.kind == "f") or not are_classification_targets(y, targets):
        return None
    return y, targets_as_labels(y, targets)


class Accuracy(Metric):
    """Fraction of samples (or cells) whose largest output is that of their label; ties go to the lower class.

    A single output predicts class 1 if it is above 0; labels are then 0 and 1. NaN if targets are real numbers.
    """

    name = "accuracy"
    larger_is_better = True

    def local_sums(self, y: np.ndarray, targets: np.ndarray) -> tuple[float, int]:
        """Return the number of correct predictions and the number of predictions."""
        if (classified := scores_and_labels(y, targets)) is None:
            return np.nan, prod(y.shape[:-1])
        scores, labels = classified
        return float(np.count_nonzero(scores.argmax(axis=-1) == labels)), labels.size


class ConfusionMatrix(Metric):
    """Confusion matrix: number of samples (or cells) by true class (rows) and predicted class (columns).

    Equal to `sklearn.metrics.confusion_matrix`. With a single output, labels are 0 and 1. NaN if targets are real
    numbers.
    """

    name = "confusion_matrix"

    def local_sums(self, y: np.ndarray, targets: np.ndarray) -> Any:
        """Return the counts in row-major order."""
        classes = max(2, y.shape[-1])
        if (classified := scores_and_labels(y, targets)) is None:
            return np.full(classes**2, np.nan)
        scores, labels = classified
        return np.bincount((labels.astype("i8") * classes + scores.argmax(axis=-1)).ravel(), minlength=classes**2)

    def result(self, sums: np.ndarray) -> dict[str, MetricValue]:
        """Return the matrix of integers."""
        table = _as_square_matrix(sums)
        return {self.name: float("nan") if np.isnan(table).any() else table.astype("i8").tolist()}


class ClassScore(ConfusionMatrix):
    """Base class of scores per class from the confusion matrix, as in scikit-learn.

    Parameters
    ----------
    average : {'macro', 'micro'}
        'macro': the mean over the classes, and a list NAME_per_class. 'micro': the score of the counts summed over all
        classes, as NAME_micro. Classes that occur neither as labels nor as predictions have score NaN and are excluded
        from the mean; any other score with denominator 0 is 0.
    """

    larger_is_better = True
    base_name: str

    def __init__(self, average: Literal["macro", "micro"] = "macro") -> None:
        self.average = average
        self.name = self.base_name if average == "macro" else f"{self.base_name}_micro"

    @abstractmethod
    def numerator_and_denominator(self, correct: Any, predicted: Any, true: Any) -> tuple[Any, Any]:
        """Return numerator and denominator, given the numbers of correct, predicted and true cells of each class."""

    def result(self, sums: np.ndarray) -> dict[str, MetricValue]:
        """Return the mean and the score of each class; for 'micro', only the score of the summed counts."""
        table = _as_square_matrix(sums)
        counts = np.stack([np.diag(table), table.sum(axis=0), table.sum(axis=1)])
        if self.average == "micro":
            counts = counts.sum(axis=1, keepdims=True)
        numerator, denominator = self.numerator_and_denominator(*counts)
        scores = np.where(denominator > 0, numerator / np.maximum(denominator, 1), 0.0) + 0 * numerator
        scores[counts[1:].sum(axis=0) == 0] = np.nan
        defined_scores = scores[~np.isnan(scores)]
        is_undefined = np.isnan(table).any() or not defined_scores.size
        mean: dict[str, MetricValue] = {self.name: float("nan") if is_undefined else float(defined_scores.mean())}
        return mean if self.average == "micro" else mean | {f"{self.name}_per_class": scores.tolist()}


class IoU(ClassScore):
    """Intersection over union, TP / (TP + FP + FN), as in `sklearn.metrics.jaccard_score`."""

    base_name = "iou"

    def numerator_and_denominator(self, correct: Any, predicted: Any, true: Any) -> tuple[Any, Any]:
        """Return the intersection and the union."""
        return correct, predicted + true - correct


class F1(ClassScore):
    """F1 score, 2 TP / (2 TP + FP + FN), as in `sklearn.metrics.f1_score`; also called Dice."""

    base_name = "f1"

    def numerator_and_denominator(self, correct: Any, predicted: Any, true: Any) -> tuple[Any, Any]:
        """Return 2 TP and 2 TP + FP + FN."""
        return 2 * correct, predicted + true


class Precision(ClassScore):
    """Precision, TP / (TP + FP), as in `sklearn.metrics.precision_score`."""

    base_name = "precision"

    def numerator_and_denominator(self, correct: Any, predicted: Any, true: Any) -> tuple[Any, Any]:
        """Return TP and TP + FP."""
        return correct, predicted


class Recall(ClassScore):
    """Recall, TP / (TP + FN), as in `sklearn.metrics.recall_score`."""

    base_name = "recall"

    def numerator_and_denominator(self, correct: Any, predicted: Any, true: Any) -> tuple[Any, Any]:
        """Return TP and TP + FN."""
        return correct, true


def _as_square_matrix(sums: np.ndarray) -> np.ndarray:
    side = round(len(sums) ** 0.5)
    return sums.reshape(side, side)
