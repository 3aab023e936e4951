"""Conversion of the images and labels that a rank reads to a module's inputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..errors import ConfigError
from ..halo import GlobalArray
from ..models.targets import slices_in
from .by_name import called


def channels_first(images: np.ndarray, labels: np.ndarray | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return images (n, *tile, C) as (n, C, *tile); whole numbers as int64, and target images as images."""
    if labels is not None:
        labels = np.moveaxis(labels, -1, 1) if labels.ndim == images.ndim else labels
        labels = labels.astype(images.dtype if labels.dtype.kind == "f" else np.int64)
    features = torch.from_numpy(np.ascontiguousarray(np.moveaxis(images, -1, 1)))
    return features, None if labels is None else torch.from_numpy(labels)


def expected_image(module: nn.Module) -> tuple[int, int | None]:
    """Return how many spatial axes a module's images have, and how many channels, by its first convolution.

    The first is that which the module has registered first; (2, None) of a module without any.
    """
    for one in module.modules():
        kernel, channels = getattr(one, "kernel_size", None), getattr(one, "in_channels", None)
        if isinstance(kernel, tuple) and isinstance(channels, int):
            return len(kernel), channels
    return 2, None


def fed(
    feed: Callable[..., Any], x: Any, targets: Any, shape: tuple[int, ...], dtype: torch.dtype, images: GlobalArray
) -> tuple[torch.Tensor, Any]:
    """Return the features and labels that a function makes of images and labels.

    Parameters
    ----------
    feed : callable
        That of TorchModel.
    x, targets
        Of the tile that this rank reads; targets may be None.
    shape, dtype
        What the features have to have.
    images : GlobalArray
        All of them, cut as they are read. Of labels of all cells that are read, those of this rank's own are returned.

    Raises
    ------
    ConfigError
        The function fails, or gives something else.
    """
    found = called("feed", feed, x, targets)
    if not isinstance(found, tuple) or len(found) != 2:
        raise ConfigError(f"feed: must return (features, labels), got {type(found).__name__}")
    features, labels = found
    for what, tensors in (("features", [features]), ("labels", pytree.tree_leaves(labels))):
        for tensor in tensors:
            if not (isinstance(tensor, torch.Tensor) or (targets is None and what == "labels")):
                raise ConfigError(f"feed: {what} are a {type(tensor).__name__}; return a torch.Tensor")
    if tuple(features.shape) != shape or features.dtype != dtype:
        raise ConfigError(
            f"feed: features are {features.dtype} of shape {tuple(features.shape)}, expected {dtype} of shape {shape}:"
            " samples, channels and this rank's tile; change feed, or set shape: [channels, *spatial]"
        )
    features = features.contiguous()  # in channels-last, some strided convolutions crash PyTorch 2.13
    return features, pytree.tree_map(partial(_own, images), labels) if images.tiles.overlaps else labels


def _own(images: GlobalArray, labels: Any) -> Any:
    """Return labels of this rank's own cells, given some of all that it reads."""
    if not isinstance(labels, torch.Tensor) or tuple(labels.shape[-len(images.extent) :]) != images.own.shape:
        return labels
    index: tuple[Any, ...] = (..., *slices_in(images, images.grid.tile_box(images.extent)))
    return labels[index]
