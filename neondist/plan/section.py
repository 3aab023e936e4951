"""Some nodes of a network, one after the other, whose arrays are in memory together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, Protocol

from ..geometry import Box, GridShape, HaloPlan, Partition
from ..layers import Shard
from .graph import Graph
from .memory import MemoryPlan, plan_memory

Shape = tuple[int, ...]


class Placed(Protocol):
    """What is known of a layer, or of several that are executed together, on all tiles."""

    @property
    def input_shape(self) -> Shape:
        """Global, without the batch."""

    def view(self, tile: int) -> HaloPlan:
        """Return which cells of the input a tile's rank has, and sees."""

    def tile(self, tile: int) -> Box:
        """Return a tile's cells of the output."""


@dataclass
class PlannedSection:
    """What is executed of some nodes.

    Attributes
    ----------
    first, last : int
        The number of the first node, and that of the first one behind.
    graph : Graph
        Their steps.
    placed : dict of id to Placed
        By what a step executes.
    grid : GridShape
    wide : Partition or None
        The tiles of the first value, where they are not the balanced ones.
    gradient : bool
        Whether the gradient of the first value is needed in training.
    segments : dict of id to Segment
        What of it is executed in strips.
    """

    first: int
    last: int
    graph: Graph
    placed: Mapping[int, Placed]
    grid: GridShape
    wide: Partition | None
    gradient: bool
    segments: Mapping[int, Any] = field(default_factory=dict)

    def live_ranges(self, tile: int) -> MemoryPlan:
        """Return what lives when on a tile's rank."""
        steps = [self.placed.get(id(step.layer)) for step in self.graph.steps]
        views = [None if plan is None else plan.view(tile) for plan in steps]
        held = [
            0 if view is None or plan is None else view.buffer.size * plan.input_shape[-1]
            for view, plan in zip(views, steps, strict=True)
        ]
        windowed = [view is not None and not view.trivial for view in views]
        return plan_memory(self.graph, held, windowed, [prod(shape) for shape in self.tile_shapes(tile)], self.gradient)

    def tile_shapes(self, tile: int) -> list[Shape]:
        """Return the shape of a tile of every value of the graph, without the batch."""
        shapes = self.graph.shapes
        boxes = [self.grid.partition(shape[:-1]).box(tile) for shape in shapes]
        if self.wide is not None:
            boxes[0] = self.wide.box(tile)
        for step in self.graph.steps:
            if step.layer is not None:
                boxes[step.output] = self.placed[id(step.layer)].tile(tile)
        whole = [(*box.shape, shape[-1]) for box, shape in zip(boxes, shapes, strict=True)]
        cut = {value: Shard(shapes[value]).inputs(self.grid, tile).shape for value in self.graph.shards}
        return [cut.get(value, shape) for value, shape in enumerate(whole)]
