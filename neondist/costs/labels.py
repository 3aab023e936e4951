"""Targets: integer labels, or one value per output."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import DataError, ShapeError
from ..namespace import namespace


def is_dense(y: Any, targets: Any) -> bool:
    """Return whether `targets` has one value per output (one-hot, probabilities), and not one label per cell.

    Raises
    ------
    ShapeError
        The shape of `targets` is neither that of `y` nor that of `y` without its last axis.
    DataError
        `targets` has one value per cell, but they are not integers, or not in [0, classes).
    """
    if targets.shape == y.shape:
        return True
    if targets.shape != y.shape[:-1]:
        raise ShapeError(
            f"targets of shape {targets.shape} do not fit outputs of shape {y.shape}: give labels of shape"
            f" {y.shape[:-1]} or values of shape {y.shape}; one label per image needs an FC or a global pooling"
            " layer at the end"
        )
    classes = y.shape[-1]
    if targets.dtype.kind not in "iu":
        raise DataError(f"targets: labels must be integers from 0 to {classes - 1}, not {targets.dtype}")
    if targets.size:
        low, high = int(targets.min()), int(targets.max())
        if low < 0 or high >= classes:
            wrong = low if low < 0 else high
            raise DataError(
                f"targets: label {wrong} is outside the {classes} classes (0 to {classes - 1}) of the last layer;"
                " give that layer more outputs or correct the labels"
            )
    return False


def labels_of(y: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Return integer labels of the shape of `y` without its last axis; of dense targets the largest."""
    return targets.argmax(axis=-1) if is_dense(y, targets) else targets


def tells_classes(y: np.ndarray, targets: np.ndarray) -> bool:
    """Return whether `targets` are labels, one-hot vectors or probabilities, and not numbers to be met (regression)."""
    if not is_dense(y, targets):
        return True
    sums = targets.sum(axis=-1, dtype=np.float64)
    return bool(targets.min(initial=0) >= 0 and np.allclose(sums, 1, rtol=0, atol=1e-3))


def pick(values: Any, labels: Any) -> Any:
    """Return from every cell of `values` the entry of its label, with the last axis kept (length 1)."""
    xp = namespace(values)
    return xp.take_along_axis(values, xp.asarray(labels)[..., None].astype("i8", copy=False), axis=-1)


def one_hot(y: Any, labels: Any) -> Any:
    """Return where in every cell of `y` the entry of its label is: booleans of the shape of `y`."""
    xp = namespace(y)
    return xp.asarray(labels)[..., None] == xp.arange(y.shape[-1])
