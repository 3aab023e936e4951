"""Which consecutive layers make a run: dynamic programming on a cost model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, prod

from ..geometry import GridShape, HaloPlan, Partition, Window
from ..layers import Layer

Shape = tuple[int, ...]
Regions = tuple[Partition | None, Partition | None]
LONGEST = 12
"""layers with windows in a run, at most"""
PASSES = 3
"""what a training step computes, in units of fprop"""


def best_cuts(cost: Callable[[int, int], float], count: int) -> list[tuple[int, int]]:
    """Return the cheapest cut of `count` layers into ranges [first, last], given the cost of each range.

    Of equal ones the shorter runs win, since they compute less.
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


def run_seconds(
    figures: tuple[float, float, float, int],
    layers: Sequence[tuple[Layer, Shape, Regions]],
    grid: GridShape,
    itemsize: int = 4,
) -> float:
    """Return the seconds that a training step spends on a run's exchange and on what it computes twice.

    Those of the tile in the middle of the grid, which has all neighbours.

    Parameters
    ----------
    figures : latency, bandwidth, speed, samples
        As in `schemes.Auto`.
    layers : the run's layers, with the shapes of their inputs and which cells of input and output the tiles have
    """
    latency, bandwidth, speed, samples = figures
    tile = _middle(grid, len(layers[0][1]) - 1)
    first, shape, (_, outputs) = layers[0]
    messages = numbers = 0
    for array, window in first.halos_for(shape, grid):
        plan = HaloPlan.of(grid.partition(array[:-1]), window, tile, outputs)
        messages += len(plan.sends)
        numbers += plan.received_cells * array[-1]
    twice = 0.0
    for layer, input_shape, (_, out) in layers:
        own = grid.partition(layer.output_shape_for(input_shape)[:-1]).box(tile)
        extra = (out.box(tile).size if out is not None else own.size) - own.size
        twice += extra * _operations(layer, input_shape)
    exchange = 2 * (latency * messages + numbers * samples * itemsize / bandwidth)
    return exchange + PASSES * twice * samples / speed


def can_follow(layer: Layer, input_shape: Shape) -> bool:
    """Tell whether a layer can compute cells of other tiles."""
    window = layer.window_for(input_shape)
    return not layer.no_recompute and (window is None or window.mode != "wrap")


def _operations(layer: Layer, input_shape: Shape) -> float:
    """Return the floating point operations of one output cell in fprop."""
    window = layer.window_for(input_shape) or Window(1, padding=0, ndim=len(input_shape) - 1)
    weights = layer.parameters_for(input_shape).get("weights")
    return 2 * prod(weights.shape) if weights else prod(window.kernel) * input_shape[-1]


def _middle(grid: GridShape, ndim: int) -> int:
    tile = 0
    for parts in grid.parts(ndim):
        tile = tile * parts + parts // 2
    return tile
