"""A module's outputs and labels as metrics and files take them, and its loss block by block."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from math import prod
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from ..comm import ProcessGrid, Reductions
from ..costs.labels import is_dense
from ..errors import ConfigError
from .by_name import TorchLoss
from .feeding import channels_first
from .graph import WIDER


def channels_last(output: Any) -> np.ndarray:
    """Return the first tensor of an output as metrics and files take it."""
    found = next(leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)).detach()
    y = found.to(WIDER.get(found.dtype, found.dtype)).numpy()
    return np.ascontiguousarray(np.moveaxis(y, 1, -1) if y.ndim > 2 else y)


def metric_targets(y: np.ndarray, labels: Any, ignored: int | None = None) -> np.ndarray:
    """Return labels as metrics take them: NaN, for which those have no number, where they cannot judge by them."""
    found = channels_last(labels) if pytree.tree_leaves(labels)[0].dim() == y.ndim else labels
    found = np.asarray(pytree.tree_leaves(found)[0])
    if found.shape == (*y.shape[:-1], 1) != y.shape:
        found = found[..., 0]
    if found.shape == y.shape[:-1] and found.dtype.kind == "f" and (found == np.floor(found)).all():
        found = found.astype(np.int64)
    of_classes = found.shape == y.shape[:-1] and found.dtype.kind in "iu"
    known = found if ignored is None else found[found != ignored]
    if found.shape == y.shape or (of_classes and known.min(initial=0) >= 0 and known.max(initial=0) < y.shape[-1]):
        return found
    return np.full_like(y, np.nan)


class LossOfCells:
    """A loss of outputs and labels (n, *cells, C), as the sum over cells and what their mean divides it by."""

    weighted = True

    def __init__(self, loss: TorchLoss) -> None:
        self.ignore_index, self._weights = loss.ignore_index, getattr(loss.criterion, "weight", None)
        if getattr(loss.criterion, "reduction", None) != "mean":
            raise ConfigError(
                "loss: is not a mean over cells, so it needs whole images; give more memory or use more ranks"
            )
        self._sum = copy(loss.criterion)
        self._sum.reduction = "sum"

    def sums_for(self, y_shape: tuple[int, ...]) -> int:
        """Return 0: nothing is summed over a sample first."""
        return 0

    def value(self, y: np.ndarray, targets: np.ndarray, total: Any = None) -> float:
        """Return the sum; NaN for what is judged by other labels than `metric_targets` has."""
        if targets.dtype.kind == "f" and np.isnan(targets).any():
            return float("nan")
        try:
            return float(self._sum(*channels_first(y, targets)))
        except (IndexError, RuntimeError):
            if self.ignore_index is not None:
                is_dense(y.shape, targets, self.ignore_index)
            raise

    def weight(self, shape: Sequence[int], targets: np.ndarray) -> float:
        """Return the weights of all labels that count; of a loss that knows no labels, how many numbers there are."""
        if self.ignore_index is None:
            return float(prod(shape))
        if targets.ndim == len(shape):
            return float(prod(shape[:-1]))
        labels = torch.from_numpy(targets[targets != self.ignore_index])
        return float(len(labels) if self._weights is None else self._weights[labels].sum(dtype=torch.float64))


class Owned:
    """Adds up what ranks counted in their own outputs; what several have alike, one of them counts."""

    def __init__(self, grid: ProcessGrid, owns: bool) -> None:
        self.owns = owns
        self.reductions = Reductions(grid)

    def total(self, array: Any, replicas: bool = False) -> Any:
        """Return the sum over all ranks; collective."""
        return self.reductions.allreduce("world", array * self.owns)
