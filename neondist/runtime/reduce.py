"""Combination of the partial results of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..arrays.namespace import namespace
from ..comm import Reductions
from ..layers import Reduction


def joined(how: Reduction, partials: Sequence[Any]) -> Any:
    """Return what the partial results of this rank's micro-batches come to; None, as each of them: nothing."""
    if len(partials) == 1 or partials[0] is None:
        return partials[0]
    return sum(partials[1:], partials[0]) if how.combine == "sum" else merged(namespace(partials[0]).stack(partials))


def combine(log: Reductions, how: Reduction, partial: Any) -> Any:
    """Return what all ranks' partial results come to, the same on each; collective over the group."""
    assert how.group is not None
    if how.combine == "sum":
        return log.allreduce(how.group, partial)
    return merged(log.gather(how.group, partial))


def merged(parts: Any) -> Any:
    """Return (count, means, sums of squared differences) of all parts (ranks, 1 + 2 k), added in their order.

    The differences from the mean of all are small numbers, so nothing cancels (Chan, Golub and LeVeque 1983).
    """
    if len(parts) == 1:
        return parts[0].copy()
    k = (parts.shape[1] - 1) // 2
    counts, means, squares = parts[:, :1], parts[:, 1 : 1 + k], parts[:, 1 + k :]
    found = parts[0].copy()
    found[0] = total = counts.sum()
    found[1 : 1 + k] = mean = (counts * means).sum(axis=0) / namespace(parts).maximum(total, 1)
    found[1 + k :] = squares.sum(axis=0) + (counts * (means - mean) ** 2).sum(axis=0)
    return found
