"""Division of consecutive layers into segments: dynamic programming on a cost model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, prod
from typing import NamedTuple

from ..geometry import GridShape, HaloPlan, Partition, Window
from ..layers import Layer
from ..system.machine import Figures

Shape = tuple[int, ...]
Regions = tuple[Partition | None, Partition | None]
LONGEST = 12
"""layers with windows in a segment, at most"""
PASSES = 3
"""what a training step computes, in units of fprop"""


class InSegment(NamedTuple):
    """A layer, the shape of its input, and which cells of its input and output the tiles have."""

    layer: Layer
    input_shape: Shape
    regions: Regions = (None, None)


def best_cuts(cost: Callable[[int, int], float], count: int) -> list[tuple[int, int]]:
    """Return the cheapest cut of `count` layers into ranges [first, last], given the cost of each range.

    Of equal ones the shorter segments win, since they compute less.
    """
    best: list[float] = [0.0] + [inf] * count
    start = [0] * (count + 1)
    for end in range(1, count + 1):
        for first in range(end - 1, max(-1, end - 1 - LONGEST), -1):
            total = best[first] + cost(first, end - 1)
            if total < best[end]:
                best[end], start[end] = total, first
    cuts, end = [], count
    while end:
        cuts.append((start[end], end - 1))
        end = start[end]
    return cuts[::-1]


def segment_seconds(
    figures: Figures, segment: Sequence[InSegment], grid: GridShape, backward: bool = True
) -> list[float]:
    """Return the seconds that a training step spends on a segment's exchange and on what it computes twice, by layer.

    The exchange is that of the tile in the middle of the grid, which has all neighbours; what is computed twice, by how
    much the most that a tile computes grows: all wait for that one.

    Parameters
    ----------
    backward : bool
        Whether the segment's input needs a gradient.
    """
    tile, (first, shape, (inputs, outputs)) = _middle(grid, len(segment[0].input_shape) - 1), segment[0]
    found = [_twice(figures, placed, grid) for placed in segment]
    if inputs is None:
        for array, window in first.halos_for(shape, grid):
            plan = HaloPlan.of(grid.partition(array[:-1]), window, tile, outputs)
            back = backward or first.reverse_halos
            found[0] += figures.sent(len(plan.sends), plan.halo_volume * array[-1]) * (1 + back)
    return found


def gather_seconds(figures: Figures, placed: InSegment, grid: GridShape) -> float:
    """Return the seconds of the exchanges of a layer that gathers in bprop; infinite for one that cannot."""
    layer, shape, _ = placed
    gathers = layer.gathers_of(shape)
    if gathers is None:
        return inf
    tile, window = _middle(grid, len(shape) - 1), layer.window_for(shape)
    total = 0.0
    for array, seen in [gathers, *([] if window is None else [(shape, window)])]:
        plan = HaloPlan.of(grid.partition(array[:-1]), seen, tile)
        total += figures.sent(len(plan.receives), plan.halo_volume * array[-1])
    return total


def can_follow(layer: Layer, input_shape: Shape) -> bool:
    """Return whether a layer can compute cells of other tiles."""
    window = layer.window_for(input_shape)
    return not layer.recompute_blocker and (window is None or not window.wraps)


def _twice(figures: Figures, placed: InSegment, grid: GridShape) -> float:
    """Return the seconds of the cells that the fullest tile of a layer computes beyond its own."""
    layer, shape, (_, out) = placed
    if out is None:
        return 0.0
    extra = out.largest - grid.partition(layer.output_shape_for(shape)[:-1]).largest
    each = figures.cell_seconds.get(str(layer.name), PASSES * operations(layer, shape) / figures.speed)
    return extra * each * figures.samples


def operations(layer: Layer, input_shape: Shape) -> float:
    """Return the floating point operations of one output cell in fprop."""
    window = layer.window_for(input_shape) or Window.of_one(len(input_shape) - 1)
    weights = layer.parameters_for(input_shape).get("weights")
    return 2 * prod(weights.shape) if weights else prod(window.kernel) * input_shape[-1]


def _middle(grid: GridShape, ndim: int) -> int:
    tile = 0
    for parts in grid.parts(ndim):
        tile = tile * parts + parts // 2
    return tile
