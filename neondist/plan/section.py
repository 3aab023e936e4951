"""Units of execution: sections, whose arrays are in memory together, and in them segments, in strips.

Some rows, or slabs, of a tile go through the layers of a segment before the next ones do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Literal

from ..geometry import Box, GridShape, HaloPlan, Kinds, Level, Overlapping, Partition, Window, looked_at, sources
from ..layers import Activation, Shard, declared_with
from .graph import Graph, Step
from .layer import LayerPlan
from .memory import MemoryPlan, plan_memory

Shape = tuple[int, ...]
Rows = int | Literal["auto"]
_WORTH = 0.95
"""of the memory: with more left, values are not made again"""
CACHE = 1 << 20
"""bytes of one sample that a strip of 'auto' has at most, all its layers together"""


@dataclass
class PlannedSection:
    """Plan for executing a range of nodes.

    Attributes
    ----------
    first, last : int
        The number of the first node, and that of the first one behind.
    graph : Graph
        Their steps.
    placed : dict of id to LayerPlan or Segment
        By what a step executes.
    grid : GridShape
    regions : dict of value to Partition
        The tiles of values that no layer of it gives, where they are not the balanced ones.
    gradient : bool
        Whether the gradient of the first value is needed in training.
    segments : dict of id to Segment
        What of it is executed in strips.
    backward : bool
        False: no pass goes back, so that nothing is kept for it.
    restores : bool
        Whether what a normalisation gives may be made again on the way back, instead of being kept.
    """

    first: int
    last: int
    graph: Graph
    placed: Mapping[int, LayerPlan | Segment]
    grid: GridShape
    regions: Mapping[int, Partition]
    gradient: bool
    segments: Mapping[int, Segment] = field(default_factory=dict)
    backward: bool = True
    restores: bool = False

    def live_ranges(self, tile: int) -> MemoryPlan:
        """Return what lives when on a tile's rank."""
        steps = [self.placed.get(id(step.layer)) for step in self.graph.steps]
        views = [None if plan is None else plan.view(tile) for plan in steps]
        held = [
            0 if view is None or plan is None else view.buffer.size * plan.input_shape[-1]
            for view, plan in zip(views, steps, strict=True)
        ]
        windowed = [view is not None and not view.trivial for view in views]
        in_place = [
            view is not None
            and step.layer is not None
            and step.layer.in_place
            and declared_with(step.layer, "in_place", "backward")
            and view.need == view.buffer
            for view, step in zip(views, self.graph.steps, strict=True)
        ]
        numbers = [prod(shape) for shape in self.tile_shapes(tile)]
        how = self.graph, held, windowed, in_place, numbers, self.gradient, self.backward
        kept = plan_memory(*how)
        if not (self.restores and self.backward and self.graph.restored):
            return kept
        restored = plan_memory(*how, restores=True)
        return restored if restored.length < _WORTH * kept.length else kept

    def saved(self, tile: int, itemsize: int) -> list[int]:
        """Return the bytes of a sample that each layer saves on a tile's rank beside its view and outputs."""
        found = []
        for step in self.graph.steps:
            if step.layer is not None:
                few, numbers = step.layer.saves_beside or (0, 0)
                cells = self.placed[id(step.layer)].tile(tile).size
                found.append(cells * self.graph.shapes[step.output][-1] * (few + numbers * itemsize))
        return found

    def added_to(self, tile: int) -> list[tuple[HaloPlan, int]]:
        """Return for each layer whose halo adds which outputs it adds to, and their channels."""
        steps = [step for step in self.graph.steps if step.layer is not None]
        found = [(self.placed[id(step.layer)].added_to(tile), self.graph.shapes[step.output][-1]) for step in steps]
        return [(cells, channels) for cells, channels in found if cells is not None]

    def boxes(self, tile: int) -> list[Box]:
        """Return the cells of a tile of every value of the graph."""
        boxes = [self.grid.partition(shape[:-1]).box(tile) for shape in self.graph.shapes]
        for value, cells in self.regions.items():
            boxes[value] = cells.box(tile)
        for step in self.graph.steps:
            if step.layer is not None:
                boxes[step.output] = self.placed[id(step.layer)].tile(tile)
        return boxes

    def tile_shapes(self, tile: int) -> list[Shape]:
        """Return the shape of a tile of every value of the graph, without the batch."""
        shapes = self.graph.shapes
        whole = [(*box.shape, shape[-1]) for box, shape in zip(self.boxes(tile), shapes, strict=True)]
        cut = {value: Shard(shapes[value]).inputs(self.grid, tile).shape for value in self.graph.shards}
        return [cut.get(value, shape) for value, shape in enumerate(whole)]


class Segment:
    """Layers one after the other that are executed together, strip by strip; to a graph it is one layer.

    Cells that two strips need are computed twice. On the way back each strip goes forward again, so that of all that is
    between the layers nothing is kept.

    Parameters
    ----------
    plans : list of LayerPlan
        Only the first one's input is exchanged.
    rows : int or 'auto'
        Of the output, in a strip; along the first axis.
    """

    saves_input, saves_output, keeps_output, gives_shards, layout = True, True, False, False, None
    splits_outputs = False
    only_activates, saves_activated, clears, in_place, activation, saves_beside = False, True, False, False, None, None
    restores = False

    def __init__(self, plans: Sequence[LayerPlan], rows: Rows, itemsize: int) -> None:
        self.plans, self.rows, self.itemsize = list(plans), rows, itemsize
        self.input_shape = plans[0].input_shape
        self.name = plans[0].name if len(plans) == 1 else f"{plans[0].name} to {plans[-1].name}"

    def view(self, tile: int) -> HaloPlan:
        """Return which cells of its input a tile's rank has, and sees."""
        return self.plans[0].view(tile)

    def tile(self, tile: int) -> Box:
        """Return a tile's cells of the output."""
        return self.plans[-1].tile(tile)

    def kinds(self, level: Level) -> list[Kinds]:
        """Return what tells tiles apart."""
        return [kind for plan in self.plans for kind in plan.kinds(level)]

    def added_to(self, tile: int) -> None:
        """Return None: in strips no halo adds to what others have."""

    def strips(self, tile: int) -> Iterator[tuple[int, PlannedSection]]:
        """Yield the strips of a tile, and what is executed for each: to it they are what tiles are to a network."""
        whole = self.tile(tile)
        if whole.empty:
            return
        ((lo, hi), *others), rows = whole.axes(), self._rows(whole)
        cut = tuple((start, min(start + rows, hi)) for start in range(lo, hi, rows))
        shapes = [self.input_shape, *(plan.output_shape for plan in self.plans)]
        ones = (1,) * len(others)
        strips = outputs = Overlapping(shapes[-1][:-1], (len(cut), *ones), 1, (cut, *((cells,) for cells in others)))
        placed: dict[int, LayerPlan] = {}
        for plan in reversed(self.plans):
            window = plan.window or Window.of_one(len(whole.shape))
            extent = plan.input_shape[:-1]
            if plan is self.plans[0]:
                inputs = looked_at(outputs, window, extent)  # its view is there, outside of the image too
            else:  # of no cell where none is looked at: the tile may have none
                none = Overlapping(extent, outputs.parts, 1, tuple(((0, 0),) * parts for parts in outputs.parts))
                inputs = sources(outputs, window, extent, none)
            shape = plan.output_shape
            placed[id(plan.layer)] = LayerPlan(plan.layer, plan.input_shape, shape, GridShape(), (inputs, outputs))
            outputs = inputs
        steps = [Step(plan.layer, None, (at,), at + 1) for at, plan in enumerate(self.plans)]
        graph = Graph(steps, shapes, [(at, at) for at in range(len(shapes))])
        section = PlannedSection(0, len(steps), graph, placed, GridShape(), {0: outputs}, True)
        for at in range(strips.tiles):
            yield at, section

    def can_absorb(self, activation: Activation) -> bool:
        """Return no: it ends with what its last layer gives."""
        return False

    def length(self, tile: int) -> int:
        """Return the numbers of a sample that the largest strip needs."""
        return max((section.live_ranges(at).length for at, section in self.strips(tile)), default=0)

    def _rows(self, whole: Box) -> int:
        if self.rows != "auto":
            return self.rows
        per_row = sum(prod(plan.output_shape[1:]) for plan in self.plans) * self.itemsize
        return max(1, min(whole.shape[0], CACHE // max(1, per_row)))


def in_segments(
    graph: Graph, layers: dict[int, LayerPlan], grid: GridShape, rows: Rows, itemsize: int
) -> tuple[Graph, dict[int, Segment]]:
    """Return a graph in which the layers that can go in strips are segments, and these by their id."""
    groups: list[list[int]] = []
    for at, step in enumerate(graph.steps):
        plan = layers.get(id(step.layer))
        if plan is None or not _can_go(plan):
            continue
        before = groups[-1][-1] if groups else None
        follows = before is not None and before == at - 1 and graph.readers[graph.steps[at - 1].output] == [at]
        exchanges = plan.window is not None and grid.tiles > 1 and plan.regions[0] is None
        wraps = plan.window is not None and plan.window.wraps
        if follows and step.inputs == (graph.steps[at - 1].output,) and not exchanges and not wraps:
            groups[-1].append(at)
        else:
            groups.append([at])
    found: dict[int, Segment] = {}
    starts, inside = {}, set()
    for group in groups:
        segment = Segment([layers[id(graph.steps[at].layer)] for at in group], rows, itemsize)
        found[id(segment)] = starts[group[0]] = segment
        inside.update(group[1:])
    return _merged(graph, starts, inside), found


def _merged(graph: Graph, starts: dict[int, Segment], inside: set[int]) -> Graph:
    steps: list[Step] = []
    shapes, number = [graph.shapes[0]], {0: 0}
    count = {0: 0}
    for at, step in enumerate(graph.steps):
        if at not in inside:
            layer = starts.get(at, step.layer)
            steps.append(Step(layer, step.join, tuple(number[v] for v in step.inputs), len(steps) + 1))  # type: ignore[arg-type]
            shapes.append(())
        shapes[len(steps)] = graph.shapes[step.output]
        number[step.output] = len(steps)
        count[at + 1] = len(steps)
    ends = [NOWHERE if done in inside else (count[done], number[value]) for done, value in graph.ends]
    return Graph(steps, shapes, ends)


NOWHERE = (-1, -1)
"""The end of a node in the middle of a segment."""


def _can_go(plan: LayerPlan) -> bool:
    """Return whether a layer is one window, or none, over an image: no reduction, no other halo, no weights by cell."""
    layer, shape = plan.layer, plan.input_shape
    halos = [] if plan.window is None else [(shape, plan.window)]
    return (
        len(plan.output_shape) > 1
        and not layer.recompute_blocker
        and not layer.reductions_for(shape)
        and not layer.state_for(shape)
        and not plan.reverse
        and layer.gathers_for(shape, plan.grid) is None
        and layer.view_window_for(shape, plan.grid) == plan.window
        and layer.halos_for(shape, plan.grid) == halos
        and not any(parameter.layout.cut for parameter in plan.trained.values())
    )
