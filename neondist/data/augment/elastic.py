"""Elastic deformation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from itertools import product
from math import ceil, prod

import numpy as np

from ...arrays import rng
from ...geometry import Box
from ...registry.ranges import Positive
from .base import Probability, RandomDraw, Transform, map_axis_ranges


class Elastic(Transform):
    """Elastic deformation: smooth random displacement of cells by up to `displacement` cells.

    The displacement is a cubic B-spline whose control points are `spacing` cells apart (Rueckert et al. 1999) and
    uniform in [-displacement, displacement] along each axis, so that the spline never exceeds these bounds. Values are
    interpolated linearly, and labels are taken from the nearest cell; outside the image, the nearest edge cell is used.
    There is no folding if `displacement` is below 0.4 `spacing` (Choi and Lee 2000).

    Parameters
    ----------
    displacement, spacing : float
        Largest displacement along each axis, and distance between control points, in cells.
    rate : float
        Fraction of the images that are deformed.
    """

    moves_cells = True

    def __init__(self, displacement: Positive = 8.0, spacing: Positive = 32.0, *, rate: Probability = 1.0) -> None:
        self.displacement, self.spacing, self.rate = displacement, spacing, rate

    def max_source_box(self, box: Box, extent: Sequence[int]) -> Box:
        """Return the box extended by the largest displacement."""
        margin = ceil(self.displacement)
        return map_axis_ranges(box, extent, lambda lo, hi, n: (max(0, lo - margin), min(n, hi + margin)))

    def source_box(self, box: Box, draw: RandomDraw) -> Box:
        """Return the box extended by the largest displacement, as `max_source_box` does."""
        return self.max_source_box(box, draw.extent)

    def transform_image(self, cells: np.ndarray, source: Box, box: Box, draw: RandomDraw) -> np.ndarray:
        """Return the interpolated cells, computed a few rows at a time to stay in the cache."""
        planes = np.ascontiguousarray(np.moveaxis(cells, -1, 0)).reshape(cells.shape[-1], -1)
        out = np.empty((*box.shape, len(planes)), cells.dtype)
        rows_per_block = max(1, _BLOCK_CELLS // (box.size // box.shape[0]))
        for top in range(box.lo[0], box.hi[0], rows_per_block):
            block = Box((top, *box.lo[1:]), (min(top + rows_per_block, box.hi[0]), *box.hi[1:]))
            corners = list(self._weighted_corners(source, block, draw, cells.dtype))
            for plane, values in zip(planes, np.moveaxis(out[top - box.lo[0] :][:rows_per_block], -1, 0), strict=True):
                values[...] = sum(plane.take(cell) * weight for cell, weight in corners)
        return out

    def _weighted_corners(
        self, source: Box, box: Box, draw: RandomDraw, dtype: np.dtype
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield flat indices into `source` and weights for a box, once for each corner of linear interpolation."""
        neighbours = []  # for each axis, indices and weights of the cells on both sides of the positions
        for axis, positions in enumerate(self._source_positions(box, draw)):
            stride, last_index = prod(source.shape[axis + 1 :]), source.hi[axis] - 1
            lower = positions.astype(np.intp)  # rounds down: no position is negative
            fraction = (positions - lower).astype(dtype)
            cells = [(np.minimum(lower + step, last_index) - source.lo[axis]) * stride for step in (0, 1)]
            neighbours.append(list(zip(cells, (1 - fraction, fraction), strict=True)))
        for corner in product(*neighbours):
            indices, weights = zip(*corner, strict=True)
            yield reduce(np.add, indices), reduce(np.multiply, weights)

    def transform_labels(self, cells: np.ndarray, source: Box, box: Box, draw: RandomDraw) -> np.ndarray:
        """Return the labels of the nearest cells."""
        nearest = [np.floor(position + 0.5).astype(np.intp) for position in self._source_positions(box, draw)]
        return cells[tuple(index - lo for index, lo in zip(nearest, source.lo, strict=True))]

    def _source_positions(self, box: Box, draw: RandomDraw) -> list[np.ndarray]:
        """Return the source positions of the cells of a box, an array (*box.shape) for each axis."""
        axis_knots, point_slices = zip(*(self._control_points(lo, hi) for lo, hi in box.axes()), strict=True)
        lattice_shape = tuple(int((n - 1) / self.spacing) + 4 for n in draw.extent)
        index = draw.stream_indices((len(lattice_shape), *lattice_shape), (slice(0, len(lattice_shape)), *point_slices))
        field = self.displacement * (2 * rng.uniform(draw.stream, index) - 1)
        for axis, pairs in enumerate(axis_knots, start=1):  # elementwise, so that cells are bitwise equal for any box
            weight_shape = (-1, *(1,) * (field.ndim - 1 - axis))
            field = sum(weight.reshape(weight_shape) * field.take(point, axis) for point, weight in pairs)
        cells = np.meshgrid(*(np.arange(lo, hi) for lo, hi in box.axes()), indexing="ij", sparse=True)
        return [np.clip(cell + shift, 0, n - 1) for cell, shift, n in zip(cells, field, draw.extent, strict=True)]

    def _control_points(self, lo: int, hi: int) -> tuple[list[tuple[np.ndarray, np.ndarray]], slice]:
        """Return four control points and weights for each cell in [lo, hi) of an axis, and the slice of all points.

        Control point 0 lies one spacing before the first cell of the image.
        """
        positions = np.arange(lo, hi) / self.spacing
        knot = np.floor(positions).astype(np.intp)
        t, first_knot = positions - knot, int(knot[0])
        basis = ((1 - t) ** 3, 3 * t**3 - 6 * t**2 + 4, -3 * t**3 + 3 * t**2 + 3 * t + 1, t**3)
        weighted_points = [(knot - first_knot + point, weight / 6) for point, weight in enumerate(basis)]
        return weighted_points, slice(first_knot, int(knot[-1]) + 4)


_BLOCK_CELLS = 1 << 14  # number of cells computed at a time
