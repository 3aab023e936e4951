"""Mean cost from the sums of all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from .base import Cost


def parts_of(cost: Any) -> Sequence[tuple[float, Cost]]:
    """Return a cost's parts; an object without parts, such as a pretraining stage's cost, is its only part."""
    return getattr(cost, "parts", ((1.0, cost),))


def weighted_mean_parts(cost: Any) -> list[Cost]:
    """Return the parts whose denominator depends on the targets."""
    return [part for _, part in parts_of(cost) if getattr(part, "has_weighted_mean", False)]


def local_weighted_denominators(cost: Any, shape: Sequence[int], targets: Any) -> list[float]:
    """Return this rank's denominators of the `weighted_mean_parts` for outputs of a local shape."""
    return [part.local_denominator(shape, targets) for part in weighted_mean_parts(cost)]


def part_factors_and_denominators(
    cost: Any, weighted_denominators: Iterable[float], samples: int, y_shape: tuple[int, ...]
) -> list[tuple[float, float]]:
    """Return the factor of each part and the denominator of its mean.

    Parameters
    ----------
    weighted_denominators : iterable of float
        Values of `local_weighted_denominators`, summed over all ranks.
    samples, y_shape
        Global number of samples, and global shape without the batch.
    """
    denominators, weighted_parts = iter(weighted_denominators), weighted_mean_parts(cost)
    return [
        (factor, next(denominators) if part in weighted_parts else samples * part.denominator_per_sample(y_shape))
        for factor, part in parts_of(cost)
    ]


def mean_cost(
    cost: Any, totals: Iterable[float], weighted_denominators: Iterable[float], samples: int, y_shape: tuple[int, ...]
) -> float:
    """Return the mean cost from its parts' sums and weighted denominators over all ranks; NaN if a denominator is 0."""
    terms = part_factors_and_denominators(cost, weighted_denominators, samples, y_shape)
    means = [factor * (total / n) if n else math.nan for total, (factor, n) in zip(totals, terms, strict=True)]
    return float(sum(means))
