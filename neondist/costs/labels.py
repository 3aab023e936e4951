"""Targets: integer labels, or one value per output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..arrays.namespace import namespace
from ..errors import DataError, ShapeError
from ..terminal.console import counted


def are_dense_targets(shape: Sequence[int], targets: Any, ignore_index: int | None = None) -> bool:
    """Return whether `targets` has one value per output (one-hot, probabilities), and not one label per cell.

    Parameters
    ----------
    shape : sequence of int
        Shape of the outputs, (n, C) or (n, *spatial, C).
    ignore_index : int, optional
        A label that is exempt from validation.

    Raises
    ------
    ShapeError
        The shape of `targets` is neither that of the outputs nor that without its last axis.
    DataError
        `targets` has one value per cell, but the values are not integers, or not in [0, classes).
    """
    shape = tuple(shape)
    if targets.shape == shape:
        return True
    if targets.shape != shape[:-1]:
        raise ShapeError(
            f"targets of shape {targets.shape}, {targets.dtype}, do not fit outputs of shape {shape}: give integer"
            f" labels of shape {shape[:-1]}, or values of shape {shape}; for one label per image, end the model with an"
            " FC or a global pooling layer"
        )
    classes = shape[-1]
    if targets.dtype.kind not in "iu":
        raise DataError(f"targets: labels must be integers from 0 to {classes - 1}, not {targets.dtype}")
    labels = targets if ignore_index is None else targets[targets != ignore_index]
    if labels.size:
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= classes:
            bad_label = low if low < 0 else high
            raise DataError(
                f"targets: label {bad_label} is outside the {counted(classes, 'class', 'classes')} (0 to {classes - 1})"
                " of the last layer; give that layer more outputs, correct the labels, or set the cost's ignore_index"
            )
    return False


def mask_ignored(labels: np.ndarray, ignore_index: int | None) -> tuple[np.ndarray, np.ndarray | None]:
    """Return labels with class 0 in ignored cells, and the mask of other cells; None: no cell is ignored."""
    if ignore_index is None:
        return labels, None
    valid_mask = labels != ignore_index
    return np.where(valid_mask, labels, 0), valid_mask


def targets_as_values(y: Any, targets: Any) -> Any:
    """Return targets as numbers of the shape and dtype of `y`.

    For a single output the last axis may be missing; labels become one-hot vectors.
    """
    xp = namespace(y)
    if y.shape[-1] == 1 and targets.shape == y.shape[:-1]:
        targets = targets[..., None]
    if are_dense_targets(y.shape, targets):
        return xp.asarray(targets, y.dtype)
    return one_hot(targets, y).astype(y.dtype)


def targets_as_labels(y: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Return integer labels of the shape of `y` without its last axis; argmax of dense targets."""
    return targets.argmax(axis=-1) if are_dense_targets(y.shape, targets) else targets


def are_classification_targets(y: np.ndarray, targets: np.ndarray) -> bool:
    """Return whether `targets` are labels, one-hot vectors or probabilities, and not regression targets."""
    if not are_dense_targets(y.shape, targets):
        return True
    sums = targets.sum(axis=-1, dtype=np.float64)
    return bool(targets.min(initial=0) >= 0 and np.allclose(sums, 1, rtol=0, atol=1e-3))


def value_at_label(values: Any, labels: Any) -> Any:
    """Return the entry of each cell's label from `values`, with the last axis kept (length 1)."""
    xp = namespace(values)
    return xp.take_along_axis(values, xp.asarray(labels)[..., None].astype("i8", copy=False), axis=-1)


def one_hot(labels: Any, like: Any) -> Any:
    """Return one-hot vectors of labels as booleans of the shape of `like`."""
    xp = namespace(like)
    return xp.asarray(labels)[..., None] == xp.arange(like.shape[-1])
