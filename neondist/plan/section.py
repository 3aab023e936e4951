"""Units of execution: sections, whose arrays are in memory at the same time, and their segments, run in strips.

A strip (some rows, or slabs, of a tile) passes through all layers of a segment before the next strip does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Literal

from ..geometry import (
    Box,
    GridShape,
    HaloPlan,
    KeyDetail,
    OverlappingPartition,
    PartClassKeys,
    Partition,
    Window,
    needed_image_cells,
    view_cells,
)
from ..layers import Activation, Layer, Shard, declared_with
from .graph import Graph, Step, trace_needed_cells
from .layer import LayerPlan
from .memory import MemoryPlan, MemoryPlanner

Shape = tuple[int, ...]
Rows = int | Literal["auto"]
_MAX_MEMORY_FRACTION = 0.95  # values are kept if recomputation would need more than this fraction of the memory
MAX_STRIP_BYTES_PER_SAMPLE = 1 << 20  # maximum bytes per sample of a strip with rows='auto', over all layers


@dataclass
class PlannedSection:
    """Plan for executing a range of nodes.

    Attributes
    ----------
    first_node, stop_node : int
        Half-open range of nodes.
    graph : Graph
        Steps of these nodes.
    placed : dict of id to LayerPlan or Segment
        Plans by the id of the executed layer.
    grid : GridShape
    regions : dict of value to Partition
        Tiles of values that no layer of the section computes; default: those of `grid.partition`.
    needs_input_gradient : bool
        Whether the gradient of the first value is needed in training.
    segments : dict of id to Segment
        Segments executed in strips.
    backward : bool
        False: forward only, so nothing is kept for a backward pass.
    may_recompute : bool
        Whether outputs of normalisations may be recomputed in the backward pass instead of being kept.
    """

    first_node: int
    stop_node: int
    graph: Graph
    placed: Mapping[int, LayerPlan | Segment]
    grid: GridShape
    regions: Mapping[int, Partition]
    needs_input_gradient: bool
    segments: Mapping[int, Segment] = field(default_factory=dict)
    backward: bool = True
    may_recompute: bool = False

    @classmethod
    def of_parts(
        cls, graph: Graph, cells: Sequence[Partition], grid: GridShape, backward: bool = True
    ) -> PlannedSection:
        """Return a section whose tiles are the parts of a graph's output; it is executed once for each part.

        Parameters
        ----------
        cells : sequence of Partition
            Cells of every value that each part needs.
        """
        regions, placed = {0: cells[0]}, dict[int, LayerPlan | Segment]()
        for step in graph.steps:
            input_cells, output_cells = cells[step.inputs[0]], cells[step.output_value]
            if step.layer is None:
                regions[step.output_value] = output_cells
                continue
            shapes = graph.shapes[step.inputs[0]], graph.shapes[step.output_value]
            output_tiles = output_cells if output_cells.extent else None
            placed[id(step.layer)] = LayerPlan(step.layer, *shapes, grid, (input_cells, output_tiles))
        return cls(0, len(graph.node_ends) - 1, graph, placed, grid, regions, True, backward=backward)

    def memory_plan(self, tile: int) -> MemoryPlan:
        """Return the lifetimes of the arrays on a tile's rank."""
        layer_plans = [self.placed.get(id(step.layer)) for step in self.graph.steps]
        views = [None if plan is None else plan.view(tile) for plan in layer_plans]
        view_elements = [
            0 if view is None or plan is None else view.buffer.size * plan.input_shape[-1]
            for view, plan in zip(views, layer_plans, strict=True)
        ]
        has_window = [view is not None and not view.trivial for view in views]
        in_place = [
            view is not None
            and step.layer is not None
            and step.layer.in_place
            and declared_with(step.layer, "in_place", "backward")
            and view.need == view.buffer
            for view, step in zip(views, self.graph.steps, strict=True)
        ]
        value_elements = [prod(shape) for shape in self.tile_shapes(tile)]
        planner = MemoryPlanner(
            self.graph, view_elements, has_window, in_place, value_elements, self.needs_input_gradient, self.backward
        )
        keeping_plan = planner.plan()
        if not (self.may_recompute and self.backward and self.graph.input_recomputation_steps):
            return keeping_plan
        restored = replace(planner, may_recompute=True).plan()
        return restored if restored.num_elements < _MAX_MEMORY_FRACTION * keeping_plan.num_elements else keeping_plan

    def saved_bytes(self, tile: int, itemsize: int) -> list[int]:
        """Return the bytes per sample that each layer saves on a tile's rank in addition to its view and outputs."""
        nbytes = []
        for step in self.graph.steps:
            if step.layer is not None:
                saved_bytes, elements = step.layer.saved_bytes_and_elements or (0, 0)
                cells = self.placed[id(step.layer)].tile(tile).size
                nbytes.append(cells * self.graph.shapes[step.output_value][-1] * (saved_bytes + elements * itemsize))
        return nbytes

    def output_halo_plans(self, tile: int) -> list[tuple[HaloPlan, int]]:
        """Return the plan of the outputs and their channels for each layer whose halo is added in the forward pass."""
        steps = [(step.layer, self.graph.shapes[step.output_value][-1]) for step in self.graph.steps]
        plans = [
            (self.placed[id(layer)].output_halo_plan(tile), channels) for layer, channels in steps if layer is not None
        ]
        return [(cells, channels) for cells, channels in plans if cells is not None]

    def value_boxes(self, tile: int) -> list[Box]:
        """Return, for every value of the graph, the cells of a tile."""
        boxes = [self.grid.partition(shape[:-1]).box(tile) for shape in self.graph.shapes]
        for value, cells in self.regions.items():
            boxes[value] = cells.box(tile)
        for step in self.graph.steps:
            if step.layer is not None:
                boxes[step.output_value] = self.placed[id(step.layer)].tile(tile)
        return boxes

    def tile_shapes(self, tile: int) -> list[Shape]:
        """Return the shape of a tile of every value of the graph, without the batch."""
        shapes = self.graph.shapes
        tile_shapes = [(*box.shape, shape[-1]) for box, shape in zip(self.value_boxes(tile), shapes, strict=True)]
        cut = {value: Shard(shapes[value]).input_box(self.grid, tile).shape for value in self.graph.sharded_vectors}
        return [cut.get(value, shape) for value, shape in enumerate(tile_shapes)]


class Segment:
    """Consecutive layers executed together, strip by strip; the graph contains them as a single layer.

    Cells that two strips need are computed twice. The backward pass reruns each strip forward, so nothing between the
    layers is kept.

    Parameters
    ----------
    plans : list of LayerPlan
        Only the first layer's input is exchanged.
    rows : int or 'auto'
        Rows of the output per strip, along the first axis.
    """

    saves_input, saves_output, must_keep_output, output_may_stay_sharded, layout = True, True, False, False, None
    splits_outputs = False
    is_activation_only = can_apply_input_relu_gradient = in_place = can_recompute_output = False
    saves_activated, activation, saved_bytes_and_elements = True, None, None

    def __init__(self, plans: Sequence[LayerPlan], rows: Rows, itemsize: int) -> None:
        self.plans, self.rows, self.itemsize = list(plans), rows, itemsize
        self.input_shape = plans[0].input_shape
        self.name = plans[0].name if len(plans) == 1 else f"{plans[0].name} to {plans[-1].name}"

    def view(self, tile: int) -> HaloPlan:
        """Return the plan of the input: the cells that a tile's rank owns and sees."""
        return self.plans[0].view(tile)

    def tile(self, tile: int) -> Box:
        """Return a tile's cells of the output."""
        return self.plans[-1].tile(tile)

    def tile_class_keys(self, level: KeyDetail) -> list[PartClassKeys]:
        """Return the keys that distinguish tiles."""
        return [key for plan in self.plans for key in plan.tile_class_keys(level)]

    def output_halo_plan(self, tile: int) -> None:
        """Return None: strips add nothing to cells of other strips."""

    def strips(self, tile: int) -> Iterator[tuple[int, PlannedSection]]:
        """Yield the number of each strip of a tile, and the section to execute; its tiles are the strips."""
        tile_cells = self.tile(tile)
        if tile_cells.empty:
            return
        ((lo, hi), *other_axes), rows_per_strip = tile_cells.axes(), self._rows_per_strip(tile_cells)
        cut = tuple((start, min(start + rows_per_strip, hi)) for start in range(lo, hi, rows_per_strip))
        shapes = [self.input_shape, *(plan.output_shape for plan in self.plans)]
        ones = (1,) * len(other_axes)
        strips = OverlappingPartition(shapes[-1][:-1], (len(cut), *ones), 1, (cut, *((cells,) for cells in other_axes)))
        steps = [Step(plan.layer, None, (at,), at + 1) for at, plan in enumerate(self.plans)]
        graph = Graph(steps, shapes, [(at, at) for at in range(len(shapes))])
        section = PlannedSection.of_parts(graph, trace_needed_cells(graph, strips, self._needed_cells), GridShape())
        for at in range(strips.tiles):
            yield at, section

    def _needed_cells(self, layer: Layer, outputs: Partition, value: int) -> Partition:
        """Return the cells of a layer's input, the value numbered `value`, that strips of the layer's output need."""
        plan = self.plans[value]
        extent, window = plan.input_shape[:-1], plan.window or Window.for_pointwise(len(plan.input_shape) - 1)
        if value == 0:
            return view_cells(outputs, window, extent)  # the segment's view includes cells outside the image
        no_cells = OverlappingPartition(extent, outputs.parts, 1, tuple(((0, 0),) * parts for parts in outputs.parts))
        return needed_image_cells(outputs, window, extent, no_cells)  # empty for strips that read no cell

    def can_fuse_activation(self, activation: Activation) -> bool:
        """Return False: a segment ends with its last layer."""
        return False

    def max_strip_buffer_elements(self, tile: int) -> int:
        """Return the elements per sample of the largest strip."""
        return max((section.memory_plan(at).num_elements for at, section in self.strips(tile)), default=0)

    def _rows_per_strip(self, tile_cells: Box) -> int:
        if self.rows != "auto":
            return self.rows
        bytes_per_row = sum(prod(plan.output_shape[1:]) for plan in self.plans) * self.itemsize
        return max(1, min(tile_cells.shape[0], MAX_STRIP_BYTES_PER_SAMPLE // max(1, bytes_per_row)))


def group_into_segments(
    graph: Graph, layers: dict[int, LayerPlan], grid: GridShape, rows: Rows, itemsize: int
) -> tuple[Graph, dict[int, Segment]]:
    """Return a graph in which layers that can run in strips form segments, and the segments by id."""
    groups: list[list[int]] = []
    for at, step in enumerate(graph.steps):
        plan = layers.get(id(step.layer))
        if plan is None or not _can_run_in_strips(plan):
            continue
        previous_step = groups[-1][-1] if groups else None
        is_consecutive = previous_step == at - 1 and graph.readers[graph.steps[at - 1].output_value] == [at]
        needs_exchange = plan.window is not None and grid.tiles > 1 and plan.regions[0] is None
        wraps = plan.window is not None and plan.window.wraps
        if is_consecutive and step.inputs == (graph.steps[at - 1].output_value,) and not needs_exchange and not wraps:
            groups[-1].append(at)
        else:
            groups.append([at])
    segments: dict[int, Segment] = {}
    segment_by_first_step, inner_steps = {}, set()
    for group in groups:
        segment = Segment([layers[id(graph.steps[at].layer)] for at in group], rows, itemsize)
        segments[id(segment)] = segment_by_first_step[group[0]] = segment
        inner_steps.update(group[1:])
    return _merge_steps(graph, segment_by_first_step, inner_steps), segments


def _merge_steps(graph: Graph, segment_by_first_step: dict[int, Segment], inner_steps: set[int]) -> Graph:
    steps: list[Step] = []
    shapes, new_values = [graph.shapes[0]], {0: 0}
    step_counts = {0: 0}
    for at, step in enumerate(graph.steps):
        if at not in inner_steps:
            layer = segment_by_first_step.get(at, step.layer)
            steps.append(Step(layer, step.join, tuple(new_values[v] for v in step.inputs), len(steps) + 1))  # type: ignore[arg-type]
            shapes.append(())
        shapes[len(steps)] = graph.shapes[step.output_value]
        new_values[step.output_value] = len(steps)
        step_counts[at + 1] = len(steps)
    node_ends = [INSIDE_SEGMENT if n in inner_steps else (step_counts[n], new_values[v]) for n, v in graph.node_ends]
    return Graph(steps, shapes, node_ends)


INSIDE_SEGMENT = (-1, -1)  # end of a node in the middle of a segment


def _can_run_in_strips(plan: LayerPlan) -> bool:
    """Return whether a layer can run in strips: it has no reduction or state, and no halo except its window's."""
    layer, shape = plan.layer, plan.input_shape
    halos = [] if plan.window is None else [(shape, plan.window)]
    return (
        len(plan.output_shape) > 1
        and not layer.recompute_blocker_for(shape)
        and not layer.reductions_for(shape)
        and not layer.state_for(shape)
        and not plan.adds_output_halo
        and layer.gathered_gradient_shape_and_window(shape, plan.grid) is None
        and layer.view_window_for(shape, plan.grid) == plan.window
        and layer.halos_for(shape, plan.grid) == halos
    )
