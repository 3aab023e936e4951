"""From sums of all ranks to the mean that training makes small."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from .base import Cost


def parts_of(cost: Any) -> Sequence[tuple[float, Cost]]:
    """Return a cost's parts; what only behaves like a cost, as a stage's of pretraining, is its only one."""
    return getattr(cost, "parts", ((1.0, cost),))


def weighted(cost: Any) -> list[Cost]:
    """Return the parts whose mean depends on targets."""
    return [part for _, part in parts_of(cost) if getattr(part, "weighted", False)]


def weights_of(cost: Any, shape: Sequence[int], targets: Any) -> list[float]:
    """Return this rank's weights of the `weighted` parts for outputs of a local shape."""
    return [part.weight(shape, targets) for part in weighted(cost)]


def terms_of(cost: Any, weights: Iterable[float], samples: int, y_shape: tuple[int, ...]) -> list[tuple[float, float]]:
    """Return the factor of each part, and what its sum over all ranks is divided by.

    Parameters
    ----------
    weights : iterable of float
        Those of `weights_of`, summed over all ranks.
    samples, y_shape
        Of all ranks; the shape is global, without the batch.
    """
    known = iter(weights)
    return [
        (factor, next(known) if part in weighted(cost) else samples * part.cells(y_shape))
        for factor, part in parts_of(cost)
    ]


def mean_of(
    cost: Any, totals: Iterable[float], weights: Iterable[float], samples: int, y_shape: tuple[int, ...]
) -> float:
    """Return the mean cost, given the sums of its parts and of their weights over all ranks; NaN of nothing."""
    terms = terms_of(cost, weights, samples, y_shape)
    means = [factor * (total / n) if n else math.nan for total, (factor, n) in zip(totals, terms, strict=True)]
    return float(sum(means))
