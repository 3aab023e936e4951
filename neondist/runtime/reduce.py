"""Combination of the partial results of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..arrays.namespace import namespace
from ..comm import Reductions
from ..layers import Reduction


def combine_micro_batches(reduction: Reduction, partials: Sequence[Any]) -> Any:
    """Return the combined partial results of this rank's micro-batches; None if there are no partial results."""
    if len(partials) == 1 or partials[0] is None:
        return partials[0]
    if reduction.combine == "sum":
        return sum(partials[1:], partials[0])
    return merge_moments(namespace(partials[0]).stack(partials))


def combine_ranks(reductions: Reductions, reduction: Reduction, partial: Any) -> Any:
    """Return the combined partial results of all ranks; every rank gets the same result. Collective over the group."""
    assert reduction.group is not None
    if reduction.combine == "sum":
        return reductions.allreduce(reduction.group, partial.copy())  # the layer may have saved this array
    return merge_moments(reductions.gather(reduction.group, partial))


def merge_moments(partial_moments: Any) -> Any:
    """Return (count, means, sums of squared deviations from the mean) of all parts (n, 1 + 2 k), merged.

    Deviations from the overall mean avoid cancellation (Chan, Golub and LeVeque 1983).
    """
    if len(partial_moments) == 1:
        return partial_moments[0].copy()
    k = (partial_moments.shape[1] - 1) // 2
    counts, means, square_sums = partial_moments[:, :1], partial_moments[:, 1 : 1 + k], partial_moments[:, 1 + k :]
    moments = partial_moments[0].copy()
    moments[0] = total_count = counts.sum()
    moments[1 : 1 + k] = mean = (counts * means).sum(axis=0) / namespace(partial_moments).maximum(total_count, 1)
    moments[1 + k :] = square_sums.sum(axis=0) + (counts * (means - mean) ** 2).sum(axis=0)
    return moments
