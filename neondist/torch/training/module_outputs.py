"""Conversion of a module's outputs and labels for metrics and files, and its loss computed block by block."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from math import prod
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from ...comm import ProcessGrid, Reductions
from ...costs.labels import are_dense_targets
from ...errors import ConfigError
from ..ir.graph import ACCUMULATION_DTYPES
from .losses_and_optimizers import TorchLoss
from .module_inputs import channels_first


def channels_last(output: Any) -> np.ndarray:
    """Return the first tensor of an output with channels last, as metrics and files expect it."""
    tensor = next(leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)).detach()
    y = tensor.to(ACCUMULATION_DTYPES.get(tensor.dtype, tensor.dtype)).numpy()
    return np.ascontiguousarray(np.moveaxis(y, 1, -1) if y.ndim > 2 else y)


def metric_targets(y: np.ndarray, labels: Any, ignore_index: int | None = None) -> np.ndarray:
    """Return labels as metrics expect them; if they do not match the output, return NaN, so that metrics are NaN."""
    targets = channels_last(labels) if pytree.tree_leaves(labels)[0].dim() == y.ndim else labels
    targets = np.asarray(pytree.tree_leaves(targets)[0])
    if targets.shape == (*y.shape[:-1], 1) != y.shape:
        targets = targets[..., 0]
    if targets.shape == y.shape[:-1] and targets.dtype.kind == "f" and (targets == np.floor(targets)).all():
        targets = targets.astype(np.int64)
    are_classes = targets.shape == y.shape[:-1] and targets.dtype.kind in "iu"
    valid_targets = targets if ignore_index is None else targets[targets != ignore_index]
    if targets.shape == y.shape or (are_classes and ((valid_targets >= 0) & (valid_targets < y.shape[-1])).all()):
        return targets
    return np.full_like(y, np.nan)


class CellLoss:
    """A mean loss of outputs (n, *cells, C) and their labels, as a sum over cells and a denominator."""

    has_weighted_mean = True

    def __init__(self, loss: TorchLoss) -> None:
        self.ignore_index, self._weights = loss.ignore_index, getattr(loss.criterion, "weight", None)
        if getattr(loss.criterion, "reduction", None) != "mean":
            raise ConfigError(
                "loss: is not a mean over cells, so whole images are needed; give more memory, or use more ranks"
            )
        self._sum_criterion = copy(loss.criterion)
        self._sum_criterion.reduction = "sum"

    def reduced_elements_per_sample(self, y_shape: tuple[int, ...]) -> int:
        """Return 0, as no partial results are summed over a sample before the loss."""
        return 0

    def local_sum(self, y: np.ndarray, targets: np.ndarray, sum_over_tiles: Any = None) -> float:
        """Return the sum over the cells; NaN if `metric_targets` could not convert the labels."""
        if targets.dtype.kind == "f" and np.isnan(targets).any():
            return float("nan")
        try:
            return float(self._sum_criterion(*channels_first(y, targets)))
        except (IndexError, RuntimeError):
            if self.ignore_index is not None:
                are_dense_targets(y.shape, targets, self.ignore_index)
            raise

    def local_denominator(self, shape: Sequence[int], targets: np.ndarray) -> float:
        """Return the weight of labels not ignored, or the count of cells (class probabilities) or elements (others)."""
        if self.ignore_index is None:
            return float(prod(shape))
        if targets.ndim == len(shape):
            return float(prod(shape[:-1]))
        labels = torch.from_numpy(targets[targets != self.ignore_index])
        return float(len(labels) if self._weights is None else self._weights[labels].sum(dtype=torch.float64))


class OwnedOutputTotals:
    """Sums over the ranks of counts over their outputs; outputs replicated on several ranks are counted once."""

    def __init__(self, grid: ProcessGrid, owns_output: bool) -> None:
        self.owns_output = owns_output
        self.reductions = Reductions(grid)

    def sum_over_ranks(self, array: Any, replicas: bool = False) -> Any:
        """Return the sum over all ranks. Collective."""
        return self.reductions.allreduce("world", array * self.owns_output)
