"""Top-k error."""

from __future__ import annotations

from math import prod

import numpy as np

from ..costs.labels import value_at_label
from ..errors import ConfigError
from ..registry.ranges import Count
from ..terminal.console import counted
from .base import Metric
from .classes import scores_and_labels


class TopK(Metric):
    """Fraction of samples (or cells) whose label is not among the `k` largest outputs; ties go to the lower classes.

    NaN if targets are real numbers, which have no classes.

    Parameters
    ----------
    k : int
        Number of predictions per sample, from 1 (as in `Misclassification`) to the number of classes.
    """

    def __init__(self, k: Count = 5) -> None:
        self.k = int(k)
        self.name = f"top{self.k}_error"

    def local_sums(self, y: np.ndarray, targets: np.ndarray) -> tuple[float, int]:
        """Return the number of misses and the number of samples, or cells."""
        if (classified := scores_and_labels(y, targets)) is None:
            return np.nan, prod(y.shape[:-1])
        y, labels = classified
        label_score = value_at_label(y, labels)
        is_lower_class = np.arange(y.shape[-1]) < labels[..., None]
        num_ahead = ((y > label_score) | ((y == label_score) & is_lower_class)).sum(axis=-1)
        is_hit = (num_ahead < self.k) & ~np.isnan(label_score[..., 0])  # NaN scores count as misses
        return float(np.count_nonzero(~is_hit)), is_hit.size

    def check_class_count(self, classes: int | None) -> None:
        """Raise ConfigError if there are fewer than `k` classes."""
        if classes is not None and self.k > classes:
            raise ConfigError(
                f"k: {self.k} exceeds the {counted(classes, 'class', 'classes')}; set k to at most {classes}"
            )
