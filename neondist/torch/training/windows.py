"""Sliding-window application of a classifier to an image."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Any

import numpy as np
import torch
from torch import nn

from ...errors import ConfigError
from ...geometry import Box
from ...plan.blocks import OutputBlocks
from .module_outputs import channels_last

MAX_CELLS_PER_BATCH = 1 << 21
"""Maximum total number of cells in the windows of one call of the module."""


class WindowScores(OutputBlocks):
    """Scores of a module for windows of an image, computed block by block; the counterpart of `ModuleBlocks`.

    Parameters
    ----------
    module : nn.Module
        Module that maps windows (n, C, *window) to scores (n, classes); it is set to evaluation mode.
    dtype : numpy.dtype
        Dtype of the module's parameters.
    shape : (*spatial, C)
        Shape of the image.
    window, stride : int
        Number of cells along each axis of a window, and distance between neighbouring windows. Windows that are not
        entirely inside the image are left out.
    size : (*spatial,)
        Extents of a block of the map of scores; the last blocks along an axis may be smaller.

    Attributes
    ----------
    output_shape : (*spatial, classes)
        Shape of the map.

    Raises
    ------
    ConfigError
        The module fails, or does not return scores for a window.
    """

    def __init__(
        self, module: nn.Module, dtype: np.dtype, shape: Sequence[int], window: int, stride: int, size: Sequence[int]
    ) -> None:
        self.module, self.dtype, self.window, self.stride = module.eval(), dtype, window, stride
        *extent, channels = shape
        map_extent = tuple((n - window) // stride + 1 for n in extent)
        super().__init__(map_extent, tuple(map(min, zip(size, map_extent, strict=True))))
        self.batch_size = max(1, MAX_CELLS_PER_BATCH // window ** len(extent))
        zero_window = torch.from_numpy(np.zeros((1, channels, *(window for _ in extent)), dtype))
        scores = self._compute_scores(zero_window)
        self.output_shape = *map_extent, scores.shape[1]

    def input_box(self, number: int) -> Box:
        """Return the cells of the image that a block depends on."""
        box = self.output_box(number)
        lo = tuple(at * self.stride for at in box.lo)
        return Box(lo, tuple((at - 1) * self.stride + self.window for at in box.hi))

    def run(self, number: int, x: np.ndarray) -> np.ndarray:
        """Return a block of the map (1, *block, classes) from the cells of the image (1, *cells, C)."""
        windows = torch.from_numpy(np.ascontiguousarray(np.moveaxis(x[0], -1, 0)))
        for axis in range(1, windows.dim()):
            windows = windows.unfold(axis, self.window, self.stride)
        block_shape = self.output_box(number).shape
        window_indices: list[tuple[Any, ...]] = list(product(*map(range, block_shape)))
        scores = []
        for first in range(0, prod(block_shape), self.batch_size):
            batch = [windows[(slice(None), *index)] for index in window_indices[first : first + self.batch_size]]
            scores.append(self._compute_scores(torch.stack(batch)))
        return np.concatenate(scores).reshape(1, *block_shape, -1)

    def _compute_scores(self, windows: torch.Tensor) -> np.ndarray:
        subject = f"{type(self.module).__name__}: for windows {list(windows.shape)}, it"
        try:
            with torch.no_grad():
                output = self.module(windows)
        except Exception as error:
            first_line = str(error).strip().split("\n")[0]
            problem = f"{subject} fails: {type(error).__name__}: {first_line}"
            raise ConfigError(f"{problem}; set --windows to the module's input size") from error
        try:
            scores = channels_last(output)
        except StopIteration:
            raise ConfigError(f"{subject} returns a {type(output).__name__}; return a tensor of scores") from None
        if scores.ndim < 2 or len(scores) != len(windows) or scores[0].size != scores.shape[-1]:
            raise ConfigError(f"{subject} returns {list(scores.shape)}, channels last; return scores (n, classes)")
        return scores.reshape(len(scores), -1)
