"""Transforms that change values of cells in place."""

from __future__ import annotations

import numpy as np

from ...arrays import rng
from ...geometry import Box
from ...registry.ranges import Finite, NotNegative
from .base import Probability, RandomDraw, Transform


class Brightness(Transform):
    """Random brightness: adds one number, uniform in [-amount, amount], to all cells of an image.

    Parameters
    ----------
    amount : float
        Largest change, in units of the network's input: standard deviations, if the data set divides images by them.
    """

    def __init__(self, amount: NotNegative = 0.2) -> None:
        self.amount = amount

    def transform_image(self, cells: np.ndarray, source: Box, box: Box, draw: RandomDraw) -> np.ndarray:
        """Return the brightened or darkened cells."""
        cells += self.amount * (2 * draw.random_numbers[1] - 1)
        return cells


class Contrast(Transform):
    """Random contrast: scales the deviation of all cells from `level` by a factor, uniform in [1 - amount, 1 + amount].

    Parameters
    ----------
    amount : float
    level : float
        The value that is unchanged. It is fixed rather than each image's mean, which would need a reduction over ranks;
        0 is the mean of the training set if the data set subtracts it.
    """

    def __init__(self, amount: NotNegative = 0.2, *, level: Finite = 0.0) -> None:
        self.amount, self.level = amount, level

    def transform_image(self, cells: np.ndarray, source: Box, box: Box, draw: RandomDraw) -> np.ndarray:
        """Return the cells with higher or lower contrast."""
        factor = 1 + self.amount * (2 * draw.random_numbers[1] - 1)
        cells *= factor
        cells += self.level * (1 - factor)
        return cells


class Noise(Transform):
    """Independent normal noise, truncated at 4.4 standard deviations, added to every cell and channel.

    Parameters
    ----------
    sigma : float
        Standard deviation, in units of the network's input.
    rate : float
        Fraction of the images to which noise is added.
    """

    def __init__(self, sigma: NotNegative = 0.1, *, rate: Probability = 1.0) -> None:
        self.sigma, self.rate = sigma, rate

    def transform_image(self, cells: np.ndarray, source: Box, box: Box, draw: RandomDraw) -> np.ndarray:
        """Return the cells with noise, computed a few rows at a time to stay in the cache."""
        channels = slice(0, draw.shape[-1])
        rows_per_block = max(1, _BLOCK_CELLS // cells[0].size)
        for top in range(0, len(cells), rows_per_block):
            block = cells[top : top + rows_per_block]
            row = box.lo[0] + top
            index = draw.stream_indices(draw.shape, (slice(row, row + len(block)), *box.slices[1:], channels))
            block += (self.sigma * rng.coarse_normal(draw.stream, index)).astype(cells.dtype, copy=False)
        return cells


_BLOCK_CELLS = 1 << 14  # number of cells computed at a time
