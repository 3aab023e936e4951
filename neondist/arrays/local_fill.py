"""Cells of other tiles, filled from the own tile as if the image ended there; and the way back.

Modes are 'zeros', 'reflect' and 'replicate'. 'zeros' is the window's fill value; where that is infinite (max pooling),
a window with no own cell would be infinite too, so the nearest own cell is taken, which changes no other maximum.
"""

from __future__ import annotations

from math import isinf
from typing import TYPE_CHECKING

from ..geometry import Box

if TYPE_CHECKING:
    from .frame import Frame


def fill_locally(frame: Frame, mode: str) -> None:
    """Fill the cells of the buffer that other tiles own; a tile without cells has nothing but zeros to give."""
    own, constant = frame.plan.own, frame.plan.window.fill
    for piece in frame.plan.receives:
        target = frame.index(piece.target)
        if own.empty or (mode == "zeros" and not isinf(constant)):
            frame.buffer[target] = 0 if isinf(constant) else constant
            continue
        cells = frame.buffer[frame.index(own)]
        for axis, sources in enumerate(_sources(piece.target, own, mode), start=1):
            cells = cells.take(sources, axis=axis)
        frame.buffer[target] = cells


def return_locally(frame: Frame, mode: str) -> None:
    """Add the gradients of those cells to the own cells that they were copied from."""
    own = frame.plan.own
    if own.empty or (mode == "zeros" and not isinf(frame.plan.window.fill)):
        return
    for piece in frame.plan.receives:
        cells = frame.gradient[frame.index(piece.target)]
        for axis, sources in enumerate(_sources(piece.target, own, mode), start=1):
            before, shape = (slice(None),) * axis, list(cells.shape)
            shape[axis] = own.shape[axis - 1]
            folded = frame.backend.xp.zeros(shape, frame.dtype)
            for place, source in enumerate(sources):
                folded[(*before, source)] += cells[(*before, place)]
            cells = folded
        frame.gradient[frame.index(own)] += cells


def _sources(target: Box, own: Box, mode: str) -> list[list[int]]:
    """Return, for every axis, which of the tile's cells those of `target` are copies of."""
    return [
        [mirror(cell - start, stop - start, mode) for cell in range(lo, hi)]
        for (lo, hi), (start, stop) in zip(target.axes(), own.axes(), strict=True)
    ]


def mirror(i: int, n: int, mode: str) -> int:
    """Return the cell of a tile of n that cell i outside of it shows; what is reflected may be so many times."""
    if mode != "reflect":
        return min(max(i, 0), n - 1)
    if n == 1:
        return 0
    i %= 2 * (n - 1)
    return min(i, 2 * (n - 1) - i)
