"""Division of consecutive layers into segments: dynamic programming on a cost model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, isqrt, prod
from typing import NamedTuple

from ..geometry import GridShape, HaloPlan, Partition, Window, index_of
from ..layers import Layer
from ..system.machine import MachineProfile

Shape = tuple[int, ...]
Regions = tuple[Partition | None, Partition | None]
MAX_SEGMENT_LAYERS = 12  # maximum number of layers with windows in a segment
TRAINING_COST_FACTOR = 3  # cost of a training step relative to fprop


class LayerWithRegions(NamedTuple):
    """A layer of a segment: the shape of its input, and the regions of its input and output."""

    layer: Layer
    input_shape: Shape
    regions: Regions = (None, None)


def cheapest_ranges(range_cost: Callable[[int, int], float], num_layers: int) -> list[tuple[int, int]]:
    """Return the cheapest cut of `num_layers` layers into ranges [first, last], given the cost of each range.

    Of equally cheap cuts, shorter ranges are preferred, because they compute less.
    """
    min_costs: list[float] = [0.0] + [inf] * num_layers
    range_starts = [0] * (num_layers + 1)
    for end in range(1, num_layers + 1):
        for first in range(end - 1, max(-1, end - 1 - MAX_SEGMENT_LAYERS), -1):
            total = min_costs[first] + range_cost(first, end - 1)
            if total < min_costs[end]:
                min_costs[end], range_starts[end] = total, first
    ranges, end = [], num_layers
    while end:
        ranges.append((range_starts[end], end - 1))
        end = range_starts[end]
    return ranges[::-1]


def recompute_cuts(costs: Sequence[float]) -> list[int]:
    """Return cuts of consecutive steps into about sqrt(n) units, each run again in the backward pass.

    Parameters
    ----------
    costs : sequence of float
        For each of the n steps, the cost of a cut before it; inf: impossible.
    """
    num_steps, cuts = len(costs), [0]
    unit_size = max(1, isqrt(num_steps))
    while num_steps - cuts[-1] > 3 * unit_size // 2:
        middle = cuts[-1] + unit_size
        candidates = range(middle - unit_size // 2, middle + unit_size // 2 + 1)
        cuts.append(min(candidates, key=lambda at: (costs[at], abs(at - middle), at)))
    return [*(at for at in cuts if not at or costs[at] < inf), num_steps]


def overhead_seconds(
    profile: MachineProfile, segment: Sequence[LayerWithRegions], grid: GridShape, needs_dx: bool = True
) -> list[float]:
    """Return the seconds of a segment's exchange and redundant computation in a training step, by layer.

    The exchange is that of the central tile, which has neighbours on all sides; the redundant computation is that of
    the largest tile, for which all ranks wait.

    Parameters
    ----------
    needs_dx : bool
        Whether the segment's input needs a gradient.
    """
    tile = _central_tile(grid, len(segment[0].input_shape) - 1)
    first_layer, shape, (inputs, outputs) = segment[0]
    seconds = [_redundant_computation_seconds(profile, placed_layer, grid) for placed_layer in segment]
    if inputs is None:
        for array, window in first_layer.halos_for(shape, grid):
            plan = HaloPlan.of(grid.partition(array[:-1]), window, tile, outputs)
            returns_dx = needs_dx or first_layer.adds_output_halo
            seconds[0] += profile.message_seconds(len(plan.sends), plan.halo_volume * array[-1]) * (1 + returns_dx)
    return seconds


def halo_seconds_if_gathered(profile: MachineProfile, placed_layer: LayerWithRegions, grid: GridShape) -> float:
    """Return the seconds of a layer's exchanges if it gathers gradients in bprop; inf if this is not possible."""
    layer, shape, _ = placed_layer
    gathered_gradient = layer.gradient_shape_and_window_if_gathered(shape)
    if gathered_gradient is None:
        return inf
    tile, window = _central_tile(grid, len(shape) - 1), layer.window_for(shape)
    seconds = 0.0
    for array, seen in [gathered_gradient, *([] if window is None else [(shape, window)])]:
        plan = HaloPlan.of(grid.partition(array[:-1]), seen, tile)
        seconds += profile.message_seconds(len(plan.receives), plan.halo_volume * array[-1])
    return seconds


def can_compute_halo_cells(layer: Layer, input_shape: Shape) -> bool:
    """Return whether a layer can compute cells of other tiles."""
    window = layer.window_for(input_shape)
    return not layer.recompute_blocker_for(input_shape) and (window is None or not window.wraps)


def _redundant_computation_seconds(profile: MachineProfile, placed_layer: LayerWithRegions, grid: GridShape) -> float:
    """Return the seconds that the largest tile of a layer spends on cells beyond its own."""
    layer, shape, (_, outputs) = placed_layer
    if outputs is None:
        return 0.0
    extra_cells = outputs.max_tile_size - grid.partition(layer.output_shape_for(shape)[:-1]).max_tile_size
    seconds_per_cell = profile.seconds_per_cell.get(
        str(layer.name), TRAINING_COST_FACTOR * forward_operations_per_cell(layer, shape) / profile.flops_per_second
    )
    return extra_cells * seconds_per_cell * profile.samples_per_replica


def forward_operations_per_cell(layer: Layer, input_shape: Shape) -> float:
    """Return the floating-point operations of one output cell in fprop."""
    window = layer.window_for(input_shape) or Window.for_pointwise(len(input_shape) - 1)
    weights = layer.parameters_for(input_shape).get("weights")
    return 2 * prod(weights.shape) if weights else prod(window.kernel) * input_shape[-1]


def _central_tile(grid: GridShape, ndim: int) -> int:
    parts = grid.parts(ndim)
    return index_of(parts, [count // 2 for count in parts])
