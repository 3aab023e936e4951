"""Transforms that move whole cells: mirroring, rotation, shifts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from ...errors import ConfigError
from ...geometry import Box, Range, fold, sources_within
from ...registry.ranges import Count
from .base import Axis, Draw, Probability, Transform, along_axes, axis_numbers


class Flip(Transform):
    """Mirrors an image along each of the given axes independently with probability `rate`.

    Parameters
    ----------
    axes : sequence of {'depth', 'height', 'width'}
        Axes of images (H, W, C) are height and width; the axis of signals (L, C) is width.
    rate : float
    """

    moves = True

    def __init__(self, axes: Sequence[Axis] = ("width",), *, rate: Probability = 0.5) -> None:
        self.axes, self.rate = tuple(axes), rate

    def applies(self, draw: Draw) -> bool:
        """Return whether any axis is mirrored; each is drawn independently."""
        return True

    def check(self, shape: Sequence[int]) -> None:
        """Raise ConfigError if an axis does not exist."""
        axis_numbers(self, self.axes, shape)

    def reach(self, box: Box, extent: Sequence[int]) -> Box:
        """Return the box around the cells and their mirror images."""
        return box.hull(_mirror_box(box, axis_numbers(self, self.axes, (*extent, 1)), extent))

    def source(self, box: Box, draw: Draw) -> Box:
        """Return the cells' mirror images."""
        return _mirror_box(box, self._flipped(draw), draw.extent)

    def image(self, cells: np.ndarray, source: Box, box: Box, draw: Draw) -> np.ndarray:
        """Return the cells mirrored."""
        flipped = self._flipped(draw)
        return cells[tuple(slice(None, None, -1 if axis in flipped else 1) for axis in range(len(draw.extent)))]

    labels = image

    def _flipped(self, draw: Draw) -> tuple[int, ...]:
        axes = axis_numbers(self, self.axes, draw.shape)
        return tuple(axis for axis in axes if draw.numbers[1 + axis] < self.rate)


class QuarterTurns(Transform):
    """Rotates an image by 0, 90, 180 or 270 degrees with equal probability, in the plane of two axes of equal extent.

    Parameters
    ----------
    axes : sequence of two of {'depth', 'height', 'width'}
        Axes of the plane of rotation.
    """

    moves = True

    def __init__(self, axes: Sequence[Axis] = ("height", "width")) -> None:
        if len(set(axes)) != 2 or len(axes) != 2:
            raise ConfigError(f"QuarterTurns: axes: {list(axes)} do not span a plane; give two of depth, height, width")
        self.axes = tuple(axes)

    def check(self, shape: Sequence[int]) -> None:
        """Raise ConfigError if an axis does not exist, or the extents of the two axes differ."""
        a, b = axis_numbers(self, self.axes, shape)
        if shape[a] != shape[b]:
            raise ConfigError(
                f"QuarterTurns: images of shape {tuple(shape)} have {shape[a]} cells along {self.axes[0]} and"
                f" {shape[b]} along {self.axes[1]}, so a quarter turn does not fit; use Flip of both, or square images"
            )

    def reach(self, box: Box, extent: Sequence[int]) -> Box:
        """Return the box around the cells in all four directions."""
        box = box.hull(self._rotate(box, 1, extent))
        return box.hull(self._rotate(box, 2, extent))

    def source(self, box: Box, draw: Draw) -> Box:
        """Return the cells before the rotation."""
        return self._rotate(box, _count_turns(draw), draw.extent)

    def image(self, cells: np.ndarray, source: Box, box: Box, draw: Draw) -> np.ndarray:
        """Return the cells rotated from the first axis to the second."""
        a, b = axis_numbers(self, self.axes, draw.shape)
        return np.rot90(cells, _count_turns(draw), (a, b))

    labels = image

    def _rotate(self, box: Box, turns: int, extent: Sequence[int]) -> Box:
        a, b = axis_numbers(self, self.axes, (*extent, 1))
        for _ in range(turns):
            ranges = list(box.axes())
            ranges[a], ranges[b] = ranges[b], _mirror(ranges[a], extent[b])
            box = Box.from_ranges(ranges)
        return box


class Shift(Transform):
    """Shifts an image by up to `max` cells along each axis: a random crop of the padded image.

    Parameters
    ----------
    max : int
        Shifts are uniform in [-max, max].
    mode : {'reflect', 'replicate', 'zeros'}
        Padding: the image mirrored at its edge cells, the nearest cell, or 0, the normalised value of the data set's
        `mean`; label maps are padded with class 0.
    """

    moves = True

    def __init__(self, max: Count = 4, *, mode: Literal["reflect", "replicate", "zeros"] = "reflect") -> None:
        self.max, self.mode = max, mode

    def check(self, shape: Sequence[int]) -> None:
        """Raise ConfigError if the image is too small for reflection."""
        if self.mode == "reflect" and self.max >= min(shape[:-1]):
            raise ConfigError(
                f"Shift: max: images of shape {tuple(shape)} cannot be reflected by {self.max} cells; give less than"
                f" {min(shape[:-1])}, or mode: replicate"
            )

    def reach(self, box: Box, extent: Sequence[int]) -> Box:
        """Return the box and `max` cells around it."""
        return along_axes(box, extent, lambda lo, hi, n: self._sources(lo - self.max, hi + self.max, n))

    def source(self, box: Box, draw: Draw) -> Box:
        """Return the cells before the shift, including the sources of the padding."""
        return along_axes(box.shift(self._offsets(draw)), draw.extent, self._sources)

    def image(self, cells: np.ndarray, source: Box, box: Box, draw: Draw) -> np.ndarray:
        """Return the cells shifted."""
        shifted = box.shift(self._offsets(draw))
        for axis, ((lo, hi), n) in enumerate(zip(shifted.axes(), draw.extent, strict=True)):
            if lo < 0 or hi > n:
                coordinates = np.arange(lo, hi)
                sources = fold(coordinates, n, self._fold)
                cells = cells.take(sources - source.lo[axis], axis)
                if self.mode == "zeros":
                    cells[(slice(None),) * axis + (sources != coordinates,)] = 0
        return cells

    labels = image

    @property
    def _fold(self) -> str:
        return "reflect" if self.mode == "reflect" else "replicate"

    def _sources(self, lo: int, hi: int, n: int) -> Range:
        return sources_within(lo, hi, n, self._fold)

    def _offsets(self, draw: Draw) -> list[int]:
        return [int(number * (2 * self.max + 1)) - self.max for number in draw.numbers[1 : len(draw.shape)]]


def _count_turns(draw: Draw) -> int:
    return int(4 * draw.numbers[1])


def _mirror(cells: Range, n: int) -> Range:
    return n - cells[1], n - cells[0]


def _mirror_box(box: Box, axes: Sequence[int], extent: Sequence[int]) -> Box:
    ranges = list(box.axes())
    for axis in axes:
        ranges[axis] = _mirror(ranges[axis], extent[axis])
    return Box.from_ranges(ranges)
