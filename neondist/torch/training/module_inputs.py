"""Conversion of a rank's images and labels to a module's inputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike
from torch import nn
from torch.utils import _pytree as pytree

from ...errors import ConfigError
from ...halo import GlobalArray
from ...models.targets import own_slices_in_tile
from ..exchange.channel import with_default_strides
from .losses_and_optimizers import call_checked


def channels_first(
    images: np.ndarray, labels: np.ndarray | None, dtype: DTypeLike | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return images (n, *tile, C) and target images as (n, C, *tile), and integer labels as int64.

    Other labels have the given dtype, by default that of the images.
    """
    if labels is not None:
        labels = np.moveaxis(labels, -1, 1) if labels.ndim == images.ndim else labels
        labels = labels.astype((images.dtype if dtype is None else dtype) if labels.dtype.kind == "f" else np.int64)
    features = torch.from_numpy(np.ascontiguousarray(np.moveaxis(images, -1, 1)))
    return features, None if labels is None else torch.from_numpy(labels)


def expected_ndim_and_channels(module: nn.Module) -> tuple[int, int | None]:
    """Return the numbers of spatial axes and channels that the first registered convolution takes, else (2, None)."""
    for layer in module.modules():
        kernel_size = getattr(layer, "kernel_size", None)
        in_channels = getattr(layer, "in_channels", None)
        if isinstance(kernel_size, tuple) and isinstance(in_channels, int):
            return len(kernel_size), in_channels
    return 2, None


def apply_feed(
    feed: Callable[..., Any], x: Any, targets: Any, shape: tuple[int, ...], dtype: torch.dtype, images: GlobalArray
) -> tuple[torch.Tensor, Any]:
    """Return the features and labels that a feed function computes from images and labels.

    Parameters
    ----------
    feed : callable
        As in TorchModel.
    x, targets
        Images and labels of the tile that this rank reads; targets may be None.
    shape, dtype
        Expected shape and dtype of the features.
    images : GlobalArray
        The whole images, in the tiles that ranks read. Labels of a tile with a margin are cropped to this rank's own
        cells.

    Raises
    ------
    ConfigError
        The function fails, or does not return features of this shape and dtype and labels.
    """
    result = call_checked("feed", feed, x, targets)
    if not isinstance(result, tuple) or len(result) != 2:
        raise ConfigError(f"feed: must return (features, labels), got {type(result).__name__}")
    features, labels = result
    for kind, tensors in (("features", [features]), ("labels", pytree.tree_leaves(labels))):
        for tensor in tensors:
            if not (isinstance(tensor, torch.Tensor) or (targets is None and kind == "labels")):
                raise ConfigError(f"feed: returns {kind} of type {type(tensor).__name__}; return a torch.Tensor")
    if tuple(features.shape) != shape or features.dtype != dtype:
        raise ConfigError(
            f"feed: features are {features.dtype} of shape {tuple(features.shape)}, expected {dtype} of shape {shape}"
            " (samples, channels and this rank's tile); change feed, or set shape: [channels, *spatial]"
        )
    features = with_default_strides(features)  # channels-last inputs of some strided convolutions crash PyTorch 2.13
    if images.tiles.may_overlap:
        labels = pytree.tree_map(partial(_crop_labels_to_own_cells, images), labels)
    return features, labels


def _crop_labels_to_own_cells(images: GlobalArray, labels: Any) -> Any:
    """Return labels cropped to this rank's own cells, given the labels of all cells that it reads."""
    if not isinstance(labels, torch.Tensor) or tuple(labels.shape[-len(images.extent) :]) != images.own.shape:
        return labels
    index: tuple[Any, ...] = (..., *own_slices_in_tile(images, images.grid.tile_box(images.extent)))
    return labels[index]
