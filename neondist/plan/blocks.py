"""A network without a way back, block after block of its output: so go images that fit into no memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import product
from math import gcd, lcm, prod
from typing import Any

from ..errors import ConfigError
from ..geometry import Box, GridShape, Overlapping
from ..system.memory import words
from .graph import Graph, Step
from .section import PlannedSection
from .traced import needed_by, section_of, trace

Extent = tuple[int, ...]
Ratio = tuple[int, int]
COPIES = 4
"""of an image and an output: as they are computed, read ahead, and on their way to the disk"""
_CHUNK = 256
"""cells along an axis of which a large block is a multiple, so that each chunk of a file is in one block"""

KINDS = 4
"""kinds of blocks that stay ready: inside of the image all are of one, and its borders come in turn"""


class BlockPlan:
    """The blocks of a network's output, each computed from all of the image that it depends on.

    What is padded is the image of each layer, at its true borders: the numbers are those of the whole image.

    Parameters
    ----------
    graph : Graph
        All of whose layers can go so: `not_in_blocks` names nothing.
    size : (*spatial,)
        Of a block; those at the end of an axis may be smaller.
    beyond : int
        Cells after its own, along each axis, that a block also has, which others have too.

    Attributes
    ----------
    grid : GridShape
        Blocks are numbered as if they were tiles.
    cells : list of Partition
        Which cells of every value each block needs.
    """

    def __init__(self, graph: Graph, size: Sequence[int], beyond: int = 0) -> None:
        self.graph, self.size = graph, tuple(size)
        blocks = cut_into(graph.shapes[graph.output][:-1], self.size, beyond)
        planes, rows, cols = [*[1] * (3 - len(blocks.parts)), *blocks.parts]
        self.grid = GridShape(1, rows, cols, planes)
        shapes = graph.shapes
        self.cells = trace(graph, blocks, lambda layer, outputs, value: needed_by(layer, outputs, shapes[value]))

    def __len__(self) -> int:
        return self.grid.tiles

    def coords(self, number: int) -> tuple[int, ...]:
        """Return a block's place among the others."""
        return self.cells[0].coords(number)

    def output(self, number: int) -> Box:
        """Return the cells of the output that a block is."""
        return self.cells[self.graph.output].box(number)

    def image(self, number: int) -> Box:
        """Return the cells of the image that it depends on."""
        return self.cells[0].box(number)

    @cached_property
    def section(self) -> PlannedSection:
        """Section executed for each block."""
        return section_of(self.graph, self.cells, self.grid, backward=False)

    def kind(self, number: int) -> tuple[int, ...]:
        """Return what is the same for blocks that differ in nothing but their place."""
        return tuple(kinds[at] for kinds, at in zip(self._kinds, self.coords(number), strict=True))

    @cached_property
    def largest(self) -> int:
        """The numbers that a block needs at most: arrays of the network, the image and the output."""
        return max(self._length(number) for number in self._longest)

    @property
    def largest_image(self) -> Box:
        """The most cells of the image that a block depends on."""
        return max((self.image(number) for number in self._longest), key=lambda box: box.size)

    @cached_property
    def longest(self) -> int:
        """Those of the network's arrays alone."""
        return max(self.section.live_ranges(number).length for number in self._longest)

    @cached_property
    def _longest(self) -> list[int]:
        """The blocks among which is the one that needs most."""
        parts = self.cells[0].parts
        longest = [max(range(count), key=lambda part: self._extent(axis, part)) for axis, count in enumerate(parts)]
        ends = (sorted({0, at, count - 1}) for at, count in zip(longest, parts, strict=True))
        return [number_of(place, parts) for place in product(*ends)]

    def _extent(self, axis: int, part: int) -> int:
        ranges = (cells.range(axis, part) for cells in self.cells)
        return sum(hi - lo for lo, hi in ranges)

    def heaviest(self) -> str:
        """Return the name of the layer whose arrays are the largest."""
        steps = [step for step in self.graph.steps if step.layer is not None]
        step = max(steps, key=lambda step: sum(self._numbers(value, 0) for value in (*step.inputs, step.output)))
        return str(step.layer.name) if step.layer is not None else ""

    def _length(self, number: int) -> int:
        added = [
            (cells.need.size + cells.buffer.size) * channels
            for cells, channels in self.section.added_to(number)
            if not cells.trivial
        ]
        beside = KINDS * sum(added) + max(added, default=0)  # kept; and what the kernels take for the largest
        beside += 2 * max(self.section.saved(number, 8), default=0) // 8  # what a layer saves, and takes for a moment
        ends = COPIES * sum(self._numbers(value, number) for value in (0, self.graph.output))
        return self.section.live_ranges(number).length + beside + ends

    def _numbers(self, value: int, number: int) -> int:
        return self.cells[value].box(number).size * self.graph.shapes[value][-1]

    @cached_property
    def _scale_factors(self) -> list[list[Ratio | None]]:
        return paces(self.graph)

    @cached_property
    def _kinds(self) -> list[list[int]]:
        """The kind of each block along each axis."""
        found = []
        position_dependent = any(step.layer is not None and step.layer.position_dependent for step in self.graph.steps)
        for axis, ratios in enumerate(self._scale_factors):
            known: dict[tuple[object, ...], int] = {}
            alike = not position_dependent and None not in ratios and self.size[axis] % _period(ratios) == 0
            parts = range(self.cells[0].parts[axis])
            ranges = [self._ranges(axis, part, ratios) if alike else (part,) for part in parts]
            found.append([known.setdefault(each, len(known)) for each in ranges])
        return found

    def _ranges(self, axis: int, part: int, ratios: Sequence[Ratio | None]) -> tuple[object, ...]:
        """Return where the cells of every value begin, as seen from the block, and how many they are."""
        first, _ = self.cells[self.graph.output].range(axis, part)
        found = []
        for cells, ratio in zip(self.cells, ratios, strict=True):
            lo, hi = cells.range(axis, part)
            a, b = ratio or (0, 1)
            found.append((lo - first * a // b, hi - lo))
        return tuple(found)


def cut_into(extent: Extent, size: Extent, beyond: int = 0) -> Overlapping:
    """Return blocks of a size, and so many cells after it; those at the end of an axis may be smaller."""
    cuts = tuple(
        tuple((lo, min(lo + own + beyond, n)) for lo in range(0, n, own)) for n, own in zip(extent, size, strict=True)
    )
    counts = tuple(len(axis) for axis in cuts)
    return Overlapping(extent, counts, prod(counts), cuts)


def paces(graph: Graph) -> list[list[Ratio | None]]:
    """Return, for every axis and value, a and b: blocks that lie b outputs further need cells a further.

    None where two ways lead from a value to the output, and say different things.
    """
    found: list[list[Ratio | None]] = []
    for axis in range(len(graph.shapes[graph.output]) - 1):
        ratios: dict[int, Ratio | None] = {graph.output: (1, 1)}
        for step in reversed(graph.steps):
            for value in step.inputs:
                ratio = _behind(step, graph.shapes[value], axis, ratios[step.output])
                ratios[value] = ratio if ratios.get(value, ratio) == ratio else None
        found.append([ratios[value] for value in range(len(graph.shapes))])
    return found


def _behind(step: Step, shape: Extent, axis: int, ratio: Ratio | None) -> Ratio | None:
    reach = None if step.layer is None else step.layer.reach_for(shape)
    if reach is None or ratio is None:
        return ratio
    a, b = (one * other for one, other in zip(reach.pace(axis), ratio, strict=True))
    return a // gcd(a, b), b // gcd(a, b)


def _period(ratios: Sequence[Ratio | None]) -> int:
    return lcm(*(ratio[1] for ratio in ratios if ratio is not None))


def number_of(place: Sequence[int], parts: Sequence[int]) -> int:
    """Return the number of the block at a place."""
    found = 0
    for at, count in zip(place, parts, strict=True):
        found = found * count + at
    return found


def not_in_blocks(graph: Graph) -> Iterator[tuple[str, str]]:
    """Yield the name of each layer that sees more than a bounded neighbourhood, and what it does."""
    for step in graph.steps:
        layer, shape = step.layer, graph.shapes[step.inputs[0]]
        if layer is None:
            continue
        window = layer.window_for(shape) if len(shape) > 1 else None
        if len(graph.shapes[step.output]) < 2:
            yield str(layer.name), "needs the whole image to compute a vector"
        elif any(not one.over_batch for one in layer.reductions_for(shape)):
            yield str(layer.name), "sums over the whole image"
        elif layer.reach_for(shape) is None:
            yield str(layer.name), layer.recompute_blocker
        elif window is not None and window.wraps:
            yield str(layer.name), "its image wraps around"


def fitted_blocks(graph: Graph, size: Sequence[int], numbers: int, itemsize: int, beyond: int = 0) -> BlockPlan:
    """Return blocks of at most this size, smaller if one would take more than so many numbers.

    Parameters
    ----------
    size : (*spatial,)
    numbers : int
        Of the network's dtype, which has `itemsize` bytes.
    beyond : int
        As for `BlockPlan`.

    Raises
    ------
    ConfigError
        Not even the smallest blocks fit: it names the layer that needs most, and how much it takes.
    """
    periods = [_period(ratios) for ratios in paces(graph)]
    extent = graph.shapes[graph.output][:-1]
    return fitted(lambda size: BlockPlan(graph, size, beyond), extent, size, numbers, itemsize, periods)


def fitted(
    blocks: Callable[[Sequence[int]], Any],
    extent: Extent,
    size: Sequence[int],
    numbers: int,
    itemsize: int = 1,
    periods: Sequence[int] | None = None,
) -> Any:
    """Return `blocks` of at most this size, those of which the largest takes no more than so many numbers."""
    periods = periods or [1] * len(extent)
    size = [_rounded(*each) for each in zip(size, extent, periods, strict=True)]
    while True:
        plan = blocks(size)
        if plan.largest <= numbers:
            return plan
        halves = [_rounded((each + 1) // 2, *more) for each, *more in zip(size, extent, periods, strict=True)]
        axis = max(range(len(size)), key=lambda axis: (size[axis] - halves[axis], -axis))
        if halves[axis] == size[axis]:
            raise ConfigError(
                f"memory: even a block of {' x '.join(map(str, size))} takes {words(plan.largest * itemsize)}, and"
                f" {words(max(0, numbers) * itemsize)} are available; layer '{plan.heaviest()}' needs most of it; give"
                " more memory, or use fewer ranks"
            )
        size = [halves[at] if at == axis else each for at, each in enumerate(size)]


def _rounded(size: int, extent: int, period: int) -> int:
    """Return a size near this one that suits the network and, if it is large, a file's chunks."""
    if size >= extent:
        return extent
    fits = (lcm(period, chunk) for chunk in (_CHUNK, 1))
    return next((size // each * each for each in fits if each <= size), min(period, extent))
