"""Transforms that move whole cells: mirroring, rotation, shifts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from ...errors import ConfigError
from ...geometry import Box, Range, fold_index, sources_within
from ...registry.ranges import Count
from ...terminal.console import counted
from .base import Axis, Probability, RandomDraw, Transform, axis_indices, map_axis_ranges


class Flip(Transform):
    """Random mirroring along each of the given axes, independently for each axis with probability `rate`.

    Parameters
    ----------
    axes : sequence of {'depth', 'height', 'width'}
        Axes of images (H, W, C) are height and width; the axis of signals (L, C) is width.
    rate : float
    """

    moves_cells = True

    def __init__(self, axes: Sequence[Axis] = ("width",), *, rate: Probability = 0.5) -> None:
        self.axes, self.rate = tuple(axes), rate

    def applies_to(self, draw: RandomDraw) -> bool:
        """Return True; whether an axis is mirrored is drawn separately for each axis."""
        return True

    def check_shape(self, shape: Sequence[int]) -> None:
        """Raise ConfigError if an axis does not exist."""
        axis_indices(self, self.axes, shape)

    def max_source_box(self, box: Box, extent: Sequence[int]) -> Box:
        """Return the box around the cells and their mirror images."""
        return box.hull(_mirror_box(box, axis_indices(self, self.axes, (*extent, 1)), extent))

    def source_box(self, box: Box, draw: RandomDraw) -> Box:
        """Return the cells' mirror images."""
        return _mirror_box(box, self._flipped_axes(draw), draw.extent)

    def transform_image(self, cells: np.ndarray, source: Box, box: Box, draw: RandomDraw) -> np.ndarray:
        """Return the mirrored cells."""
        flipped = self._flipped_axes(draw)
        return cells[tuple(slice(None, None, -1 if axis in flipped else 1) for axis in range(len(draw.extent)))]

    transform_labels = transform_image

    def _flipped_axes(self, draw: RandomDraw) -> tuple[int, ...]:
        axes = axis_indices(self, self.axes, draw.shape)
        return tuple(axis for axis in axes if draw.random_numbers[1 + axis] < self.rate)


class QuarterTurns(Transform):
    """Random rotation by 0, 90, 180 or 270 degrees, with equal probability, in the plane of two axes of equal extent.

    Parameters
    ----------
    axes : sequence of two of {'depth', 'height', 'width'}
        Axes of the plane of rotation.
    """

    moves_cells = True

    def __init__(self, axes: Sequence[Axis] = ("height", "width")) -> None:
        if len(set(axes)) != 2 or len(axes) != 2:
            raise ConfigError(f"QuarterTurns: axes: {list(axes)} do not span a plane; give two of depth, height, width")
        self.axes = tuple(axes)

    def check_shape(self, shape: Sequence[int]) -> None:
        """Raise ConfigError if an axis does not exist, or the extents of the two axes differ."""
        a, b = axis_indices(self, self.axes, shape)
        if shape[a] != shape[b]:
            raise ConfigError(
                f"QuarterTurns: images of shape {tuple(shape)} have {counted(shape[a], 'cell')} along {self.axes[0]}"
                f" and {shape[b]} along {self.axes[1]}, so a quarter turn does not fit; use Flip along both axes, or"
                " square images"
            )

    def max_source_box(self, box: Box, extent: Sequence[int]) -> Box:
        """Return a box that contains the cells before any of the four rotations."""
        box = box.hull(self._rotate_box(box, 1, extent))
        return box.hull(self._rotate_box(box, 2, extent))

    def source_box(self, box: Box, draw: RandomDraw) -> Box:
        """Return the cells before the rotation."""
        return self._rotate_box(box, _draw_quarter_turns(draw), draw.extent)

    def transform_image(self, cells: np.ndarray, source: Box, box: Box, draw: RandomDraw) -> np.ndarray:
        """Return the cells rotated from the first axis to the second."""
        a, b = axis_indices(self, self.axes, draw.shape)
        return np.rot90(cells, _draw_quarter_turns(draw), (a, b))

    transform_labels = transform_image

    def _rotate_box(self, box: Box, turns: int, extent: Sequence[int]) -> Box:
        a, b = axis_indices(self, self.axes, (*extent, 1))
        for _ in range(turns):
            ranges = list(box.axes())
            ranges[a], ranges[b] = ranges[b], _mirror_range(ranges[a], extent[b])
            box = Box.from_ranges(ranges)
        return box


class Shift(Transform):
    """Random shift by up to `max` cells along each axis: a random crop of the padded image.

    Parameters
    ----------
    max : int
        Shifts are uniform in [-max, max].
    mode : {'reflect', 'replicate', 'zeros'}
        Padding: the image mirrored at its edge cells, the nearest cell, or 0, which is the normalised value of the data
        set's `mean`, and class 0 in label maps.
    """

    moves_cells = True

    def __init__(self, max: Count = 4, *, mode: Literal["reflect", "replicate", "zeros"] = "reflect") -> None:
        self.max, self.mode = max, mode

    def check_shape(self, shape: Sequence[int]) -> None:
        """Raise ConfigError if the image is too small for reflection."""
        if self.mode == "reflect" and self.max >= min(shape[:-1]):
            raise ConfigError(
                f"Shift: max: images of shape {tuple(shape)} cannot be reflected by {counted(self.max, 'cell')};"
                f" give less than {min(shape[:-1])}, or mode: replicate"
            )

    def max_source_box(self, box: Box, extent: Sequence[int]) -> Box:
        """Return the box extended by `max` cells on each side, including the sources of the padding."""
        return map_axis_ranges(box, extent, lambda lo, hi, n: self._source_range(lo - self.max, hi + self.max, n))

    def source_box(self, box: Box, draw: RandomDraw) -> Box:
        """Return the cells before the shift, including the sources of the padding."""
        return map_axis_ranges(box.shift(self._draw_offsets(draw)), draw.extent, self._source_range)

    def transform_image(self, cells: np.ndarray, source: Box, box: Box, draw: RandomDraw) -> np.ndarray:
        """Return the shifted cells."""
        shifted = box.shift(self._draw_offsets(draw))
        for axis, ((lo, hi), n) in enumerate(zip(shifted.axes(), draw.extent, strict=True)):
            if lo < 0 or hi > n:
                coordinates = np.arange(lo, hi)
                sources = fold_index(coordinates, n, self._padding_mode)
                cells = cells.take(sources - source.lo[axis], axis)
                if self.mode == "zeros":
                    cells[(slice(None),) * axis + (sources != coordinates,)] = 0
        return cells

    transform_labels = transform_image

    @property
    def _padding_mode(self) -> str:
        return "reflect" if self.mode == "reflect" else "replicate"

    def _source_range(self, lo: int, hi: int, n: int) -> Range:
        return sources_within(lo, hi, n, self._padding_mode)

    def _draw_offsets(self, draw: RandomDraw) -> list[int]:
        return [int(number * (2 * self.max + 1)) - self.max for number in draw.random_numbers[1 : len(draw.shape)]]


def _draw_quarter_turns(draw: RandomDraw) -> int:
    return int(4 * draw.random_numbers[1])


def _mirror_range(cells: Range, n: int) -> Range:
    return n - cells[1], n - cells[0]


def _mirror_box(box: Box, axes: Sequence[int], extent: Sequence[int]) -> Box:
    ranges = list(box.axes())
    for axis in axes:
        ranges[axis] = _mirror_range(ranges[axis], extent[axis])
    return Box.from_ranges(ranges)
