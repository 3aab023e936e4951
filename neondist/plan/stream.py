"""The first nodes of a network, strip after strip from the image on: so go images that fit into no memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from math import prod
from operator import ge

from ..geometry import Box, GridShape, Kinds, Overlapping, Partition, StripGrid, hulls
from ..layers import Layer, declared_with
from .classes import cells_kinds, of_strips
from .graph import Graph, Step
from .planner import PASSES, operations
from .section import PlannedSection
from .segments import Found
from .traced import needed_by, section_of, trace

Shape = tuple[int, ...]
MOVED = 100
"""multiplications in the time of a number that goes through memory"""
START = 15 * 10**6
"""multiplications in the time of calling a step for a strip, whatever it computes"""


@dataclass(frozen=True)
class Stream:
    """Nodes from the image up to one value, of which a rank has one strip at a time in memory.

    Strips are to a tile what tiles are to an image, with `overlap_tile`: each is computed from all of the image that it
    depends on, and no halo travels. Before a layer that reduces is computed, all strips go up to its `reduce`, which
    adds up over strips and ranks; and on the way back to its `reduce_backward`. Gradients of values on that way can be
    kept: what is above them is done then.

    Attributes
    ----------
    graph : Graph
        Of these nodes alone.
    nodes : int
    grid : StripGrid
    checkpointed_strips : int
        Of how many strips of a tile, the last ones, something is kept that spares a part of their second way forward.
    cuts : tuple of int
        After how many nodes gradients are kept; ascending.
    cutting : int, optional
        Of how many strips of a tile, the last ones, they are kept; default: of all.
    wide : Partition or None
        Which cells of the last value each tile has, if not its own: below a cut, all that what is above needs.
    known : list of Partition, optional
        The `cells`, where the same strips have them already.
    """

    graph: Graph
    nodes: int
    grid: StripGrid
    checkpointed_strips: int = 0
    cuts: tuple[int, ...] = ()
    wide: Partition | None = None
    cutting: int | None = None
    known: list[Partition] | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(cls, graph: Graph, nodes: int, grid: GridShape, strips: int, checkpointed_strips: int = 0) -> Stream:
        """Return that of so many nodes of a network, in so many strips of each tile."""
        cut = StripGrid(grid.replicas, grid.rows, grid.cols, grid.planes, strips)
        return cls(graph.part(0, nodes), nodes, cut, min(strips, checkpointed_strips))

    def keeping(self, checkpointed_strips: int, cuts: tuple[int, ...] = (), cutting: int | None = None) -> Stream:
        """Return the same strips, of so many of which something is kept."""
        return replace(self, checkpointed_strips=checkpointed_strips, cuts=cuts, cutting=cutting, known=self.cells)

    def in_strips(self, strips: int) -> Stream:
        """Return the same in so many strips of each tile, of which nothing is kept."""
        return Stream(self.graph, self.nodes, replace(self.grid, strips=strips))

    def __str__(self) -> str:
        layers = [step.layer.name for step in self.graph.steps if step.layer is not None]
        sweeps = len(self.reducing("forward")) + len(self._sweeps_uncut)
        tiled = len(self.graph.shapes[self.graph.output]) > 1
        strips = f"{self.grid.strips} strip{'s'[: self.grid.strips > 1]} of each tile"
        return f"streamed: {layers[0]} to {layers[-1]} in {strips}, processed {sweeps + tiled} times a step"

    def rest_of(self, graph: Graph) -> Graph:
        """Return the network's graph, in which the value that the stream gives is whole."""
        return Graph(graph.steps, graph.shapes, graph.ends, whole=self.graph.output)

    @property
    def rows(self) -> int:
        """Rows, or slabs, of the largest tile of the last map."""
        shapes = [shape for shape in self.graph.shapes if len(shape) > 1]
        last = self.grid.whole.partition(shapes[-1][:-1])
        return max(hi - lo for lo, hi in (last.range(0, part) for part in range(last.parts[0])))

    @property
    def work(self) -> float:
        """Multiplications of a sample in a training step, on all tiles, what strips compute twice included."""
        forward = [*self.reducing("forward"), *([] if self.vector else [len(self.graph.steps)])]
        total = self._times([sum(end >= at for end in forward) for at in range(len(self.graph.steps))])
        for part in self.parts:
            cut = 0.0 if part.below is None else part._cutting / (part.grid.last or part.grid.strips)
            total += cut * part._work_back(part.sweeps) + (1 - cut) * part._work_back(part._sweeps_uncut)
        return total

    def _work_back(self, sweeps: Sequence[int]) -> float:
        """Return the multiplications of a sample, where all strips go back so."""
        spared = self.checkpointed_strips / self.grid.strips
        return self._times(
            [
                (1 if at in self.recomputed else 1 - spared) * len(sweeps)
                + sum(end < at for end in sweeps)
                + (at > sweeps[-1])  # the gradients of weights
                for at in range(len(self.graph.steps))
            ]
        )

    def _times(self, counts: Sequence[float]) -> float:
        """Return what a sample takes, where each step's strips are computed so many times, in multiplications."""
        graph, total, share = self.graph, 0.0, (self.grid.last or self.grid.strips) / self.grid.strips
        for at, (count, step) in enumerate(zip(counts, graph.steps, strict=True)):
            if len(graph.shapes[step.output]) < 2:
                continue
            cells = self.cells[step.output]
            lengths = ([cells.range(axis, part) for part in range(parts)] for axis, parts in enumerate(cells.parts))
            computed = prod(sum(max(0, hi - lo) for lo, hi in axis) for axis in lengths)
            total += count * (computed * effort(graph, at) + share * prod(cells.parts) * START)
        return total

    @property
    def vector(self) -> bool:
        """Whether it ends with one."""
        return len(self.graph.shapes[self.graph.output]) < 2

    @cached_property
    def below(self) -> Stream | None:
        """Backward steps from the last cut on."""
        if not self.cuts:
            return None
        *cuts, nodes = self.cuts
        value = self.graph.ends[nodes][1]
        cells = self.cells[value], self.grid.partition(self.graph.shapes[value][:-1])
        wide = hulls(*(self._of_tiles(each, self._cutting) for each in cells))
        grid = replace(self.grid, last=self._cutting)
        return Stream(self.graph.part(0, nodes), nodes, grid, cuts=tuple(cuts), wide=wide)

    @property
    def _cutting(self) -> int:
        """Of how many strips of a tile gradients are kept, where there are cuts."""
        return self.cutting or self.grid.last or self.grid.strips

    def cut_strips(self, tile: int) -> list[int]:
        """Return the numbers of the strips of a tile of which gradients are kept."""
        return [] if self.below is None else list(self._numbers(tile))[-self._cutting :]

    @property
    def parts(self) -> list[Stream]:
        """This, and what is below each cut, in the order of the way back."""
        return [self, *([] if self.below is None else self.below.parts)]

    @property
    def sweeps(self) -> list[int]:
        """To before which step each sweep goes back; the last one down to the next cut, or to the image: -1.

        The sweep that comes to a cut goes on to the next layer that reduces.
        """
        found = self._sweeps_uncut
        return found if self.below is None else [at for at in found if at >= self.below.reducing("backward")[-1]]

    @property
    def _sweeps_uncut(self) -> list[int]:
        found = self.reducing("backward")[::-1]
        return [*found[self.wide is not None :], -1]  # below a cut: the first one has come from above

    def possible_cuts(self) -> dict[int, int]:
        """Return after how many nodes something can be kept that spares work, and how many numbers of a sample."""
        graph, found = self.graph, dict[int, int]()
        bound = {*graph.absorbed, *graph.cleared.values()}
        for at in self.reducing("backward"):
            ends = ((n, *graph.ends[n]) for n in range(1, self.nodes))
            nodes, value = next(((n, value) for n, end, value in ends if end > at and end not in bound), (0, 0))
            if nodes and len(graph.shapes[value]) > 1:
                found[nodes] = prod(graph.shapes[value])
        return found

    @cached_property
    def outputs(self) -> Partition:
        """Cells of the last value in each strip."""
        extent = self.graph.shapes[self.graph.output][:-1]
        own = self.grid.partition(extent)
        if self.wide is None:
            return own
        ranges = [[self.wide.range(axis, part) for part in range(parts)] for axis, parts in enumerate(self.wide.parts)]
        count, rows = self.grid.strips, list[tuple[int, int]]()
        first = count - (self.grid.last or count)
        for tile, (lo, hi) in enumerate(ranges[0]):
            inner = [min(max(own.range(0, tile * count + at)[0], lo), hi) for at in range(first + 1, count)]
            rows += [(lo, lo)] * first + list(pairwise((lo, *inner, hi)))
        return Overlapping(extent, own.parts, own.copies, (tuple(rows), *(tuple(axis) for axis in ranges[1:])))

    def output(self, tile: int) -> Box | None:
        """Return the cells of the last value that a tile has; None: it is a vector."""
        extent = self.graph.shapes[self.graph.output][:-1]
        return (self.wide or self.grid.whole.partition(extent)).box(tile) if extent else None

    def reducing(self, direction: str) -> list[int]:
        """Return the steps before which all strips are reduced."""
        return [
            at
            for at, step in enumerate(self.graph.steps)
            if step.layer is not None
            and any(one.direction == direction for one in step.layer.reductions_for(self.graph.shapes[step.inputs[0]]))
        ]

    @cached_property
    def recomputed(self) -> frozenset[int]:
        """The steps that a strip of which something is kept takes again: their values are needed on the way back."""
        graph, steps = self.graph, self.graph.steps
        wanted = [
            value
            for value in range(1, len(graph.shapes))
            if value in graph.made
            and (graph.looked_at(value) or any(steps[at].saves_input for at in graph.readers[value]))
        ]
        found = {at for at, step in enumerate(steps) if not _leaves(step)}
        ends = steps[-1].layer if len(graph.shapes[graph.output]) < 2 else None
        if ends is not None:
            found.add(len(steps) - 1)
            if ends.saves_input or not declared_with(ends, "sums_alone", "forward"):
                wanted += steps[-1].inputs
        wanted += [value for at in found if at < len(steps) - 1 or ends is None for value in steps[at].inputs]
        made = {step.output: at for at, step in enumerate(steps)}
        while wanted:
            at = made.get(wanted.pop(), -1)
            if at >= 0 and at not in found:
                found.add(at)
                wanted += steps[at].inputs
        return frozenset(found)

    def saved(self, tile: int, itemsize: int) -> int:
        """Return the bytes of a sample that are kept of a tile's strips."""
        beside = [
            (self.cells[step.output], self.graph.shapes[step.output][-1], step.layer.saves_beside)
            for at, step in enumerate(self.graph.steps)
            if step.layer is not None and step.layer.saves_beside is not None and at not in self.recomputed
        ]
        each = [
            sum(
                cells.box(at).size * channels * (few + numbers * itemsize) for cells, channels, (few, numbers) in beside
            )
            for at in self.strips(tile)[-self.checkpointed_strips :]
        ]
        return sum(each) if self.checkpointed_strips else 0

    @cached_property
    def cells(self) -> list[Partition]:
        """Cells of every value in each strip; of a vector, all."""
        if self.known is not None:
            return self.known
        graph, outputs = self.graph, self.outputs
        own = [self.grid.partition(shape[:-1]) for shape in graph.shapes]
        own[graph.output] = outputs
        counts = {at for at, step in enumerate(graph.steps) if step.layer is not None and step.layer.sums_image}
        # it counts own cells, whether anybody reads them
        counted = {step.output for at, step in enumerate(graph.steps) if {at, graph.absorbed.get(at)} & counts}
        found = trace(graph, outputs, self._needed, {value: own[value] for value in counted})
        return [hulls(found[0], own[0]), *found[1:]]  # cells outside of all windows have an owner, too

    def _needed(self, layer: Layer, outputs: Partition, value: int) -> Partition:
        shape = self.graph.shapes[value]
        if not outputs.extent:  # a vector: sums over what is there
            return self.grid.partition(shape[:-1])
        return needed_by(layer, outputs, shape)

    @cached_property
    def section(self) -> PlannedSection:
        """Section executed for each strip: strips are to it what tiles are to a network."""
        return section_of(self.graph, self.cells, self.grid)

    @cached_property
    def regions(self) -> Found:
        """Cells of each layer's input and output on a tile, by the layer's id."""
        tiles = [cells if cells.extent else None for cells in self.tiles]
        return {
            id(step.layer): (tiles[step.inputs[0]], tiles[step.output])
            for step in self.graph.steps
            if step.layer is not None
        }

    @cached_property
    def tiles(self) -> list[Partition]:
        """The cells of every value that all strips of a tile have together; of the image, those below a cut too."""
        image, *others = (self._of_tiles(cells) if cells.extent else cells for cells in self.cells)
        return [image if self.below is None else hulls(image, self.below.tiles[0]), *others]

    def _of_tiles(self, cells: Partition, last: int | None = None) -> Overlapping:
        """Return what all strips of each tile have together, or so many, the last ones."""
        ranges = [[cells.range(axis, part) for part in range(parts)] for axis, parts in enumerate(cells.parts)]
        count = self.grid.strips
        parts = [ranges[0][at + count - (last or count) : at + count] for at in range(0, len(ranges[0]), count)]
        filled = [[(lo, hi) for lo, hi in strips if lo < hi] or strips[:1] for strips in parts]
        ranges[0] = [(min(lo for lo, _ in strips), max(hi for _, hi in strips)) for strips in filled]
        whole = self.grid.whole
        return Overlapping(
            cells.extent, whole.parts(len(cells.extent)), whole.tiles, tuple(tuple(axis) for axis in ranges)
        )

    def strips(self, tile: int) -> list[int]:
        """Return the numbers of a tile's strips that have cells of the output, or that a layer counts."""
        shapes, graph = self.graph.shapes, self.graph
        counted = {graph.steps[at].inputs[0] for at in self.reducing("forward")}
        ends = [self.grid.partition(shapes[value][:-1]) for value in counted if len(shapes[value]) > 1]
        ends += [] if self.vector else [self.outputs]
        numbers = self._numbers(tile)
        found = [
            at for at, part in numbers.items() if any(lo < hi for lo, hi in (cells.range(0, part) for cells in ends))
        ]
        return found or list(numbers)[:1]

    def _numbers(self, tile: int) -> dict[int, int]:
        """Return the numbers of a tile's strips, and the part of the first axis that each has."""
        ndim, count = len(self.graph.shapes[0]) - 1, self.grid.strips
        first = self.grid.whole.partition(self.graph.shapes[0][:-1]).coords(tile)[0] * count
        return dict(zip(self.grid.of_tile(tile, ndim), range(first, first + count), strict=True))

    def length(self, tile: int) -> int:
        """Return the numbers of a sample that the arrays of the largest strip need."""
        return max(self.section.live_ranges(at).length for at in self._unlike(tile))

    def _unlike(self, tile: int, largest: bool = False) -> list[int]:
        """Return the numbers of strips that differ in more than their place; or of those that none has all cells of."""
        maps = {value: (cells, cells.extent[0]) for value, cells in enumerate(self.cells) if cells.extent}
        edges = [(value, step.output) for step in self.graph.steps for value in step.inputs]
        edges = [(value, output) for value, output in edges if value in maps and output in maps]
        numbers, alike = self._numbers(tile), dict[tuple[tuple[int, ...], tuple[int, ...]], int]()
        for at in self.strips(tile):
            ranges = {value: (*cells.range(0, numbers[at]), n) for value, (cells, n) in maps.items()}
            ends = [int(end) for lo, hi, n in ranges.values() for end in (lo == 0, hi == n)]
            for value, output in edges:  # how much is padding there
                (lo, hi, n), (first, stop, outputs) = ranges[value], ranges[output]
                ends += [first if lo == 0 else -1, outputs - stop if hi == n else -1]
            alike.setdefault((tuple(ends), tuple(hi - lo for lo, hi, _ in ranges.values())), at)
        if not largest:
            return list(alike.values())
        found: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        for edge, sizes in sorted(alike, key=lambda pair: -sum(pair[1])):
            if not any(e == edge and all(map(ge, most, sizes)) for e, most in found):
                found.append((edge, sizes))
        return [alike[pair] for pair in found]

    def held(self, tile: int, itemsize: int) -> int:
        """Return the bytes of a sample that the largest strip needs, its image as it is read and normalised, too."""
        found, channels = [], self.graph.shapes[0][-1]
        for at in self._unlike(tile, largest=True):
            added = sum(cells.buffer.size * each for cells, each in self.section.added_to(at))  # and its gradient
            numbers = self.section.live_ranges(at).length + 2 * (self.cells[0].box(at).size * channels + added)
            saved = self.section.saved(at, itemsize)
            found.append(numbers * itemsize + sum(saved) + max(saved))  # the largest takes as much for a moment
        return max(found)

    def bytes(self, tile: int, itemsize: int) -> int:
        """Return the bytes of a sample of one strip at a time, and of all that is kept of strips."""
        most = max(part.held(tile, itemsize) for part in self.parts)
        return most + self.saved(tile, itemsize) + self.kept(tile) * itemsize

    @property
    def kinds(self) -> list[Kinds]:
        """Keys that distinguish tiles: their strips, and their parts of partitioned values."""
        strips = [kind for part in self.parts for plan in part.section.placed.values() for kind in plan.kinds("all")]
        strips += [cells_kinds(cells) for part in self.parts for cells in part.cells]
        wide = [cells_kinds(part.wide) for part in self.parts if part.wide is not None]
        return [*(of_strips(kind, self.grid.strips) for kind in strips if kind.axes), *wide]

    def kept(self, tile: int) -> int:
        """Return the numbers of a sample that are kept of gradients: of the cut above and of the one below."""
        cut = [part for part in self.parts if part.wide is not None]
        sizes = [part.wide.box(tile).size * part.graph.shapes[part.graph.output][-1] for part in cut]  # type: ignore[union-attr]
        return max(one + other for one, other in pairwise([0, *sizes, 0]))


def effort(graph: Graph, at: int) -> float:
    """Return what a step takes forward for a cell of its output, in multiplications; absorbed, nothing."""
    step = graph.steps[at]
    if at in graph.absorbed:
        return 0.0
    computed = 0.0 if step.layer is None else operations(step.layer, graph.shapes[step.inputs[0]])
    return computed + MOVED * graph.shapes[step.output][-1]


def work_of(graph: Graph, stream: Stream | None) -> float:
    """Return what a training step of a sample takes, in multiplications."""
    first = 0 if stream is None else len(stream.graph.steps)
    beside = sum(
        prod(graph.shapes[graph.steps[at].output][:-1]) * effort(graph, at) for at in range(first, len(graph.steps))
    )
    return PASSES * beside + (0 if stream is None else stream.work)


def _leaves(step: Step) -> bool:
    """Return whether it is known what a step saves."""
    return step.layer is None or declared_with(step.layer, "saves_beside", "forward") is not None
