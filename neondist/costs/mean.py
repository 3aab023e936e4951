"""Mean cost from the sums of all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from .base import Cost


def parts_of(cost: Any) -> Sequence[tuple[float, Cost]]:
    """Return a cost's parts; an object without parts, such as a pretraining stage's cost, is its only part."""
    return getattr(cost, "parts", ((1.0, cost),))


def weighted(cost: Any) -> list[Cost]:
    """Return the parts whose denominator depends on the targets."""
    return [part for _, part in parts_of(cost) if getattr(part, "weighted", False)]


def weights_of(cost: Any, shape: Sequence[int], targets: Any) -> list[float]:
    """Return this rank's weights of the `weighted` parts for outputs of a local shape."""
    return [part.weight(shape, targets) for part in weighted(cost)]


def terms_of(cost: Any, weights: Iterable[float], samples: int, y_shape: tuple[int, ...]) -> list[tuple[float, float]]:
    """Return the factor of each part and the denominator of its mean.

    Parameters
    ----------
    weights : iterable of float
        Weights of `weights_of`, summed over all ranks.
    samples, y_shape
        Global number of samples, and global shape without the batch.
    """
    remaining = iter(weights)
    return [
        (factor, next(remaining) if part in weighted(cost) else samples * part.cells(y_shape))
        for factor, part in parts_of(cost)
    ]


def mean_of(
    cost: Any, totals: Iterable[float], weights: Iterable[float], samples: int, y_shape: tuple[int, ...]
) -> float:
    """Return the mean cost from the sums of its parts and their weights over all ranks; NaN if empty."""
    terms = terms_of(cost, weights, samples, y_shape)
    means = [factor * (total / n) if n else math.nan for total, (factor, n) in zip(totals, terms, strict=True)]
    return float(sum(means))
