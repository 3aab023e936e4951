"""Steps that change the values of cells where they are."""

from __future__ import annotations

import numpy as np

from ... import rng
from ...geometry import Box
from ...registry.ranges import Finite, NotNegative
from .base import Draw, Probability, Transform


class Brightness(Transform):
    """Adds one number to all cells of an image, drawn evenly from -amount to amount.

    Parameters
    ----------
    amount : float
        In units of what the network sees, which are standard deviations where the data set knows its own.
    """

    def __init__(self, amount: NotNegative = 0.2) -> None:
        self.amount = amount

    def image(self, cells: np.ndarray, source: Box, box: Box, draw: Draw) -> np.ndarray:
        """Return the cells, lighter or darker."""
        cells += self.amount * (2 * draw.numbers[1] - 1)
        return cells


class Contrast(Transform):
    """Multiplies the distance of all cells to one level, by a number drawn evenly from 1 - amount to 1 + amount.

    Parameters
    ----------
    amount : float
    level : float
        The value that stays. It is given, and not each image's mean, which would be a sum over all ranks; 0 is the mean
        of the training set, where the data set subtracts that.
    """

    def __init__(self, amount: NotNegative = 0.2, *, level: Finite = 0.0) -> None:
        self.amount, self.level = amount, level

    def image(self, cells: np.ndarray, source: Box, box: Box, draw: Draw) -> np.ndarray:
        """Return the cells with more contrast, or less."""
        factor = 1 + self.amount * (2 * draw.numbers[1] - 1)
        cells *= factor
        cells += self.level * (1 - factor)
        return cells


class Noise(Transform):
    """Adds normal noise, of which every cell and channel has its own, within 4.4 standard deviations.

    Parameters
    ----------
    sigma : float
        Its standard deviation, in units of what the network sees.
    rate : float
        Share of the images that get noise.
    """

    def __init__(self, sigma: NotNegative = 0.1, *, rate: Probability = 1.0) -> None:
        self.sigma, self.rate = sigma, rate

    def image(self, cells: np.ndarray, source: Box, box: Box, draw: Draw) -> np.ndarray:
        """Return the cells with noise, a few rows at a time, which stay in the cache."""
        channels = slice(0, draw.shape[-1])
        rows = max(1, _BLOCK // cells[0].size)
        for top in range(0, len(cells), rows):
            block = cells[top : top + rows]
            first = box.lo[0] + top
            index = draw.index(draw.shape, (slice(first, first + len(block)), *box.slices[1:], channels))
            block += (self.sigma * rng.coarse_normal(draw.stream, index)).astype(cells.dtype, copy=False)
        return cells


_BLOCK = 1 << 14  # cells
