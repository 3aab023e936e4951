"""Block-wise inference: plan for images that do not fit in memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import product
from math import gcd, lcm, prod
from typing import Any

from ..errors import ConfigError
from ..geometry import Box, GridShape, OverlappingPartition, index_of
from ..layers import Layer, declared_with, method_class
from ..system.memory import format_bytes
from .graph import Graph, Step, needed_cells, trace_needed_cells
from .section import PlannedSection

Extent = tuple[int, ...]
Ratio = tuple[int, int]
IMAGE_COPIES = 4  # copies of a block's image and output in memory, as blocks are read ahead and written in parallel
_FILE_CHUNK_EXTENT = 256
"""extents of large blocks are multiples of this number of cells, so that each chunk of a file is in one block"""

MAX_CACHED_BLOCK_KINDS = 4  # kinds of blocks with cached sections: all interior blocks are of one kind


class OutputBlocks(ABC):
    """Blocks of an output, numbered like tiles.

    Parameters
    ----------
    extent : (*spatial,)
        Extent of the output.
    size : (*spatial,)
        Extent of a block; blocks at the end of an axis may be smaller.
    overlap : int
        Number of cells beyond its own that a block shares with the next block along each axis.
    """

    def __init__(self, extent: Extent, size: Sequence[int], overlap: int = 0) -> None:
        self.size = tuple(size)
        self.blocks = block_partition(extent, self.size, overlap)

    def __len__(self) -> int:
        return self.blocks.tiles

    def coords(self, number: int) -> tuple[int, ...]:
        """Return a block's position in the grid of blocks."""
        return self.blocks.coords(number)

    def output_box(self, number: int) -> Box:
        """Return a block's cells of the output."""
        return self.blocks.box(number)

    @abstractmethod
    def input_box(self, number: int) -> Box:
        """Return the cells of the image that a block depends on."""

    @property
    def largest_input_box(self) -> Box:
        """The largest `input_box` of a block."""
        return max(map(self.input_box, self.possibly_largest_blocks), key=lambda box: box.size)

    @cached_property
    def possibly_largest_blocks(self) -> list[int]:
        """Numbers of the blocks that may be the largest: along each axis, the first, the last, and one in between."""
        candidates = ({0, self.largest_block_index(axis), count - 1} for axis, count in enumerate(self.blocks.parts))
        return [index_of(self.blocks.parts, place) for place in product(*map(sorted, candidates))]

    def largest_block_index(self, axis: int) -> int:
        """Return the index along an axis of an inner block, which needs the most cells along that axis."""
        return self.blocks.parts[axis] // 2


class BlockPlan(OutputBlocks):
    """Blocks of a network's output, each computed from all image cells that it depends on.

    Padding is applied only at the true borders of each layer's image, so results equal those of the whole image.

    Parameters
    ----------
    graph : Graph
        Graph for which `find_blockwise_obstacles` yields nothing.
    size, overlap : see OutputBlocks

    Attributes
    ----------
    grid : GridShape
        Blocks, numbered like tiles.
    cells : list of Partition
        Cells of every value that each block needs.
    """

    def __init__(self, graph: Graph, size: Sequence[int], overlap: int = 0) -> None:
        super().__init__(graph.shapes[graph.output_value][:-1], size, overlap)
        self.graph = graph
        planes, rows, cols = [*[1] * (3 - len(self.blocks.parts)), *self.blocks.parts]
        self.grid = GridShape(1, rows, cols, planes)
        shapes = graph.shapes
        self.cells = trace_needed_cells(
            graph, self.blocks, lambda layer, outputs, value: needed_cells(layer, outputs, shapes[value])
        )

    def input_box(self, number: int) -> Box:
        """Return the cells of the image that a block depends on, including its margins."""
        return self.cells[0].box(number)

    @cached_property
    def section(self) -> PlannedSection:
        """Section executed for each block."""
        return PlannedSection.of_parts(self.graph, self.cells, self.grid, backward=False)

    def position_independent_key(self, number: int) -> tuple[int, ...]:
        """Return a key that is equal for all blocks that differ only in position."""
        return tuple(kinds[at] for kinds, at in zip(self._block_kinds, self.coords(number), strict=True))

    @cached_property
    def max_block_memory(self) -> int:
        """Elements that the largest block needs: arrays of the network, the image and the output."""
        return max(self._block_memory_elements(number) for number in self.possibly_largest_blocks)

    @cached_property
    def max_network_array_elements(self) -> int:
        """Elements that the network's arrays of the largest block need."""
        return max(self.section.memory_plan(number).num_elements for number in self.possibly_largest_blocks)

    def largest_block_index(self, axis: int) -> int:
        """Return the index along an axis of the block that needs the most cells along that axis."""
        extents = ([hi - lo for lo, hi in cells.ranges_along(axis)] for cells in self.cells)
        totals = [sum(of_part) for of_part in zip(*extents, strict=True)]
        return totals.index(max(totals))

    def layer_with_largest_arrays(self) -> str:
        """Return the name of the layer whose arrays are the largest."""
        steps = [step for step in self.graph.steps if step.layer is not None]
        largest_step = max(
            steps, key=lambda s: sum(self._num_elements_in_block(value, 0) for value in (*s.inputs, s.output_value))
        )
        return str(largest_step.layer.name) if largest_step.layer is not None else ""

    def _block_memory_elements(self, number: int) -> int:
        halo_elements = [
            (cells.need.size + cells.buffer.size) * channels
            for cells, channels in self.section.output_halo_plans(number)
            if not cells.trivial
        ]
        # arrays of all cached kinds, and scratch of the kernels for the largest array
        extra = MAX_CACHED_BLOCK_KINDS * sum(halo_elements) + max(halo_elements, default=0)
        extra += 2 * max(self.section.saved_bytes(number, 8), default=0) // 8  # arrays that a layer saves, and scratch
        ends = IMAGE_COPIES * sum(self._num_elements_in_block(value, number) for value in (0, self.graph.output_value))
        return self.section.memory_plan(number).num_elements + extra + ends

    def _num_elements_in_block(self, value: int, number: int) -> int:
        return self.cells[value].box(number).size * self.graph.shapes[value][-1]

    @cached_property
    def _block_kinds(self) -> list[list[int]]:
        """The kind of each block along each axis."""
        kinds = []
        position_dependent = any(step.layer and _may_depend_on_position(step.layer) for step in self.graph.steps)
        for axis, ratios in enumerate(scale_factors(self.graph)):
            kind_by_key: dict[tuple[object, ...], int] = {}
            periodic = not position_dependent and None not in ratios and self.size[axis] % _common_period(ratios) == 0
            parts = range(self.cells[0].parts[axis])
            ranges = [self._position_independent_ranges(axis, part, ratios) if periodic else (part,) for part in parts]
            kinds.append([kind_by_key.setdefault(key, len(kind_by_key)) for key in ranges])
        return kinds

    def _position_independent_ranges(self, axis: int, part: int, ratios: Sequence[Ratio | None]) -> tuple[object, ...]:
        """Return the start, relative to the block, and the number of the cells of every value."""
        output_start, _ = self.cells[self.graph.output_value].range(axis, part)
        ranges = []
        for cells, ratio in zip(self.cells, ratios, strict=True):
            lo, hi = cells.range(axis, part)
            a, b = ratio or (0, 1)
            ranges.append((lo - output_start * a // b, hi - lo))
        return tuple(ranges)


def _may_depend_on_position(layer: Layer) -> bool:
    """Return whether outputs may depend on the position; true for custom layers that do not declare the contrary."""
    is_builtin = method_class(layer, "forward").__module__.partition(".")[0] == "neondist"
    return layer.position_dependent or (
        not is_builtin and declared_with(layer, "position_dependent", "forward") is None
    )


def block_partition(extent: Extent, size: Extent, overlap: int = 0) -> OverlappingPartition:
    """Return blocks of a size, overlapping by `overlap` cells; blocks at the end of an axis may be smaller."""
    block_ranges = tuple(
        tuple((lo, min(lo + own + overlap, n)) for lo in range(0, n, own)) for n, own in zip(extent, size, strict=True)
    )
    blocks_per_axis = tuple(len(axis) for axis in block_ranges)
    return OverlappingPartition(extent, blocks_per_axis, prod(blocks_per_axis), block_ranges)


def scale_factors(graph: Graph) -> list[list[Ratio | None]]:
    """Return (a, b) for every axis and value: a shift by b output cells shifts the needed cells by a.

    None where two paths from a value to the output have different factors.
    """
    factors: list[list[Ratio | None]] = []
    for axis in range(len(graph.shapes[graph.output_value]) - 1):
        ratios: dict[int, Ratio | None] = {graph.output_value: (1, 1)}
        for step in reversed(graph.steps):
            for value in step.inputs:
                ratio = _compose_scale_factor(step, graph.shapes[value], axis, ratios[step.output_value])
                ratios[value] = ratio if ratios.get(value, ratio) == ratio else None
        factors.append([ratios[value] for value in range(len(graph.shapes))])
    return factors


def _compose_scale_factor(step: Step, shape: Extent, axis: int, ratio: Ratio | None) -> Ratio | None:
    receptive_window = None if step.layer is None else step.layer.receptive_window_for(shape)
    if receptive_window is None or ratio is None:
        return ratio
    a, b = (own * rest for own, rest in zip(receptive_window.scale_factor(axis), ratio, strict=True))
    return a // gcd(a, b), b // gcd(a, b)


def _common_period(ratios: Sequence[Ratio | None]) -> int:
    return lcm(*(ratio[1] for ratio in ratios if ratio is not None))


def find_blockwise_obstacles(graph: Graph) -> Iterator[tuple[str, str]]:
    """Yield the name of each layer that cannot be computed block-wise, and the reason."""
    for step in graph.steps:
        layer, shape = step.layer, graph.shapes[step.inputs[0]]
        if layer is None:
            continue
        window = layer.window_for(shape) if len(shape) > 1 else None
        if len(graph.shapes[step.output_value]) < 2:
            yield str(layer.name), "needs the whole image to compute a vector"
        elif any(not reduction.spans_batch for reduction in layer.reductions_for(shape)):
            yield str(layer.name), "sums over the whole image"
        elif layer.receptive_window_for(shape) is None:
            yield str(layer.name), layer.recompute_blocker_for(shape)
        elif window is not None and window.wraps:
            yield str(layer.name), "its image wraps around"


def fit_blocks(graph: Graph, size: Sequence[int], max_elements: int, itemsize: int, overlap: int = 0) -> BlockPlan:
    """Return blocks of at most `size`, smaller if a block would need more than `max_elements` elements.

    Parameters
    ----------
    size : (*spatial,)
    max_elements : int
        Elements available, of `itemsize` bytes each.
    overlap : int
        As in `OutputBlocks`.

    Raises
    ------
    ConfigError
        Not even the smallest blocks fit; the message names the layer with the largest arrays.
    """
    periods = [_common_period(ratios) for ratios in scale_factors(graph)]
    extent = graph.shapes[graph.output_value][:-1]
    return shrink_blocks_to_fit(
        lambda size: BlockPlan(graph, size, overlap), extent, size, max_elements, itemsize, periods
    )


def shrink_blocks_to_fit(
    make_plan: Callable[[Sequence[int]], Any],
    extent: Extent,
    size: Sequence[int],
    max_elements: int,
    itemsize: int = 1,
    periods: Sequence[int] | None = None,
) -> Any:
    """Return `make_plan(size)`, halving extents until a block needs at most `max_elements`, or raise ConfigError."""
    periods = periods or [1] * len(extent)
    size = [_round_down(*axis) for axis in zip(size, extent, periods, strict=True)]
    while True:
        plan = make_plan(size)
        if plan.max_block_memory <= max_elements:
            return plan
        halves = [_round_down((n + 1) // 2, *bounds) for n, *bounds in zip(size, extent, periods, strict=True)]
        axis = max(range(len(size)), key=lambda axis: (size[axis] - halves[axis], -axis))
        if halves[axis] == size[axis]:
            raise ConfigError(
                f"memory: even a block of {' x '.join(map(str, size))} takes"
                f" {format_bytes(plan.max_block_memory * itemsize)}, but only"
                f" {format_bytes(max(0, max_elements) * itemsize)} is available; layer"
                f" '{plan.layer_with_largest_arrays()}' takes the most; give more memory, or use fewer ranks"
            )
        size = [halves[at] if at == axis else n for at, n in enumerate(size)]


def _round_down(size: int, extent: int, period: int) -> int:
    """Return `size` rounded down to a multiple of `period` and, if large, of a file's chunks; in [period, extent]."""
    if size >= extent:
        return extent
    multiples = (lcm(period, chunk) for chunk in (_FILE_CHUNK_EXTENT, 1))
    return next((size // step * step for step in multiples if step <= size), min(period, extent))
