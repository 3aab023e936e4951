"""Padding copied from inside the image, halo cells copied from the rank's own tile, and the adjoints.

Both are copied axis by axis, so that corners are correct. Modes `reflect` and `replicate` copy cells that HaloPlan
includes in the buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import isinf
from typing import Any

from ..arrays.namespace import namespace
from ..geometry import Box, HaloPlan, Lattice, fold_index

Index = Callable[[Box | Lattice], tuple[slice, ...]]
"""Returns the index of cells of the image into an array with the buffer's shape."""


def fill_padding(buffer: Any, plan: HaloPlan) -> None:
    """Fill the cells outside the image along axes with the mode 'reflect' or 'replicate' from cells inside."""
    for target, source in _padding_index_pairs(plan):
        buffer[target] = buffer[source]


def add_padding_gradient(gradient: Any, plan: HaloPlan) -> None:
    """Add the gradient of the cells outside the image to the cells from which they were copied."""
    for target, source in reversed(list(_padding_index_pairs(plan))):
        gradient[source] += gradient[target]


def _padding_index_pairs(plan: HaloPlan) -> Iterator[tuple[tuple, tuple]]:
    """Yield (padding layer, source layer) as indices into the buffer; a layer is one cell thick."""
    if plan.need.empty:
        return
    for axis, ((lo, hi), n, mode) in enumerate(zip(plan.need.axes(), plan.extent, plan.window.modes, strict=True)):
        if mode not in ("reflect", "replicate"):
            continue
        leading_slices = (slice(None),) * (axis + 1)
        buffer_start = plan.buffer.lo[axis]
        for cell in (*range(lo, min(0, hi)), *range(max(n, lo), hi)):
            yield (*leading_slices, cell - buffer_start), (*leading_slices, fold_index(cell, n, mode) - buffer_start)


def fill_locally(buffer: Any, plan: HaloPlan, index: Index, mode: str) -> None:
    """Fill halo cells as if the image ended at the edge of this rank's tile; for an empty tile, with zeros.

    Modes are 'zeros', 'reflect' and 'replicate'. 'zeros' stands for the window's fill value. If that is infinite (max
    pooling), the nearest own cell is used instead, since the maximum of a window without own cells would be infinite;
    the maxima of other windows do not change.
    """
    own_box, fill_value = plan.own, plan.window.fill
    for piece in plan.receives:
        target_index = index(piece.target)
        if own_box.empty or (mode == "zeros" and not isinf(fill_value)):
            buffer[target_index] = 0 if isinf(fill_value) else fill_value
            continue
        own_cells = buffer[index(own_box)]
        for axis, sources in enumerate(_source_indices(piece.target, own_box, mode), start=1):
            own_cells = own_cells.take(sources, axis=axis)
        buffer[target_index] = own_cells


def add_gradients_locally(gradient: Any, plan: HaloPlan, index: Index, mode: str) -> None:
    """Add the gradients of cells filled by `fill_locally` to the cells of this tile from which they were copied."""
    own_box = plan.own
    if own_box.empty or (mode == "zeros" and not isinf(plan.window.fill)):
        return
    for piece in plan.receives:
        cells = gradient[index(piece.target)]
        for axis, sources in enumerate(_source_indices(piece.target, own_box, mode), start=1):
            leading_slices, folded_shape = (slice(None),) * axis, list(cells.shape)
            folded_shape[axis] = own_box.shape[axis - 1]
            folded = namespace(cells).zeros(folded_shape, cells.dtype)
            for at, source in enumerate(sources):
                folded[(*leading_slices, source)] += cells[(*leading_slices, at)]
            cells = folded
        gradient[index(own_box)] += cells


def _source_indices(target: Lattice, own: Box, mode: str) -> list[list[int]]:
    """Return, for every axis, the cells of the tile from which those of `target` are copied."""
    return [
        [source_cell(cell - start, stop - start, mode) for cell in cells]
        for cells, (start, stop) in zip(target.ranges, own.axes(), strict=True)
    ]


def source_cell(i: int, n: int, mode: str) -> int:
    """Return the cell of a tile of n cells from which cell i is filled; cells may be reflected repeatedly."""
    if mode != "reflect":
        return min(max(i, 0), n - 1)
    if n == 1:
        return 0
    i %= 2 * (n - 1)
    return min(i, 2 * (n - 1) - i)
