"""Strip-wise execution of the first nodes of a network, for images that do not fit in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from math import prod
from operator import ge, lt

import numpy as np

from ..geometry import Box, GridShape, OverlappingPartition, PartClassKeys, Partition, TileStripGrid, hull_partition
from ..layers import Layer, declared_with
from ..terminal.console import counted
from .classes import part_class_keys, tile_keys_from_strips
from .graph import Graph, Step, needed_cells, trace_needed_cells
from .planner import TRAINING_COST_FACTOR, forward_operations_per_cell
from .section import PlannedSection
from .segments import LayerRegions

Shape = tuple[int, ...]
ACCESS_COST_IN_OPERATIONS = 100  # floating-point operations in the time of reading or writing one number
CALL_COST_IN_OPERATIONS = 15 * 10**6
"""floating-point operations in the time of calling a step for a strip, in addition to the step's own operations"""


@dataclass(frozen=True)
class StripwisePlan:
    """Nodes from the image to one value, executed for one strip of a tile at a time.

    Strips divide a tile as tiles divide an image under `overlap_tile`: each is computed from all image cells that it
    depends on, without halo exchange. Before a layer with a reduction, all strips are run up to its `reduce`, whose
    results are combined over strips and ranks; in the backward pass, up to its `reduce_backward`. Gradients of
    intermediate values can be kept (a cut), so that later steps (above the cut) need not be run again.

    Attributes
    ----------
    graph : Graph
        Steps of these nodes alone.
    num_nodes : int
    grid : TileStripGrid
    checkpointed_strips : int
        Number of strips, at the end of a tile, whose saved state avoids part of their second forward pass.
    cuts : tuple of int
        Numbers of nodes after which gradients are kept; ascending.
    num_strips_with_kept_gradients : int, optional
        Number of strips, at the end of a tile, whose gradients are kept; default: all.
    extended_output : Partition or None
        Cells of the last value on each tile, if more than the tile's: at a cut, all cells that later steps read.
    precomputed_strip_partitions : list of Partition, optional
        Precomputed `strip_partitions` of the same strips.
    """

    graph: Graph
    num_nodes: int
    grid: TileStripGrid
    checkpointed_strips: int = 0
    cuts: tuple[int, ...] = ()
    extended_output: Partition | None = None
    num_strips_with_kept_gradients: int | None = None
    precomputed_strip_partitions: list[Partition] | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(
        cls, graph: Graph, num_nodes: int, grid: GridShape, strips: int, checkpointed_strips: int = 0
    ) -> StripwisePlan:
        """Return the stream of the first nodes of a network, with `strips` strips per tile."""
        grid_of_strips = TileStripGrid(grid.replicas, grid.rows, grid.cols, grid.planes, strips)
        return cls(graph.subgraph(0, num_nodes), num_nodes, grid_of_strips, min(strips, checkpointed_strips))

    def with_checkpoints(
        self, checkpointed_strips: int, cuts: tuple[int, ...] = (), num_strips_with_kept_gradients: int | None = None
    ) -> StripwisePlan:
        """Return the same strips with other checkpoints and cuts."""
        return replace(
            self,
            checkpointed_strips=checkpointed_strips,
            cuts=cuts,
            num_strips_with_kept_gradients=num_strips_with_kept_gradients,
            precomputed_strip_partitions=self.strip_partitions,
        )

    def with_strips(self, strips: int) -> StripwisePlan:
        """Return the same nodes with another number of strips per tile, without checkpoints."""
        return StripwisePlan(self.graph, self.num_nodes, replace(self.grid, strips=strips))

    def __str__(self) -> str:
        layers = [step.layer.name for step in self.graph.steps if step.layer is not None]
        sweeps = len(self.reduction_steps("forward")) + len(self._backward_sweep_ends_without_cuts)
        is_image = len(self.graph.shapes[self.graph.output_value]) > 1
        strip_count, pass_count = counted(self.grid.strips, "strip"), counted(sweeps + is_image, "time")
        return f"streamed: {layers[0]} to {layers[-1]} in {strip_count} per tile, each processed {pass_count} per step"

    def with_replicated_output(self, graph: Graph) -> Graph:
        """Return the network's graph in which the output of the stream is replicated."""
        return Graph(graph.steps, graph.shapes, graph.node_ends, replicated_value=self.graph.output_value)

    @property
    def rows(self) -> int:
        """Number of rows, or slabs, of the largest tile of the last feature map."""
        shapes = [shape for shape in self.graph.shapes if len(shape) > 1]
        last_tiles = self.grid.without_strips.partition(shapes[-1][:-1])
        return max(hi - lo for lo, hi in last_tiles.ranges_along(0))

    @property
    def training_operations(self) -> float:
        """Cost per sample and training step, in operations, on all tiles, including the overlap of strips."""
        sweep_ends = [*self.reduction_steps("forward"), *([] if self.output_is_vector else [len(self.graph.steps)])]
        operations = self._operations_for_counts(
            [sum(end >= at for end in sweep_ends) for at in range(len(self.graph.steps))]
        )
        for part in self.parts:
            kept_share = (
                0.0
                if part.stream_below_cut is None
                else part._num_kept_strips / (part.grid.num_last_strips or part.grid.strips)
            )
            with_cut = part._backward_operations(part.backward_sweep_stops)
            without_cut = part._backward_operations(part._backward_sweep_ends_without_cuts)
            operations += kept_share * with_cut + (1 - kept_share) * without_cut
        return operations

    def _backward_operations(self, sweeps: Sequence[int]) -> float:
        """Return the cost per sample, in operations, of a backward pass of all strips with these sweeps."""
        saved_share = self.checkpointed_strips / self.grid.strips
        return self._operations_for_counts(
            [
                (1 if at in self.recomputed_steps else 1 - saved_share) * len(sweeps)
                + sum(end < at for end in sweeps)
                + (at > sweeps[-1])  # the gradients of weights
                for at in range(len(self.graph.steps))
            ]
        )

    def _operations_for_counts(self, run_counts: Sequence[float]) -> float:
        """Return the cost per sample, in operations, if the strips of step i are computed run_counts[i] times."""
        graph, total, strip_share = self.graph, 0.0, (self.grid.num_last_strips or self.grid.strips) / self.grid.strips
        for at, (count, step) in enumerate(zip(run_counts, graph.steps, strict=True)):
            if len(graph.shapes[step.output_value]) < 2:
                continue
            partition = self.strip_partitions[step.output_value]
            axes, num_strips = range(len(partition.parts)), prod(partition.parts)
            computed = prod(sum(max(0, hi - lo) for lo, hi in partition.ranges_along(axis)) for axis in axes)
            total += count * (
                computed * forward_cost_per_cell(graph, at) + strip_share * num_strips * CALL_COST_IN_OPERATIONS
            )
        return total

    @property
    def output_is_vector(self) -> bool:
        """Whether the output is a vector."""
        return len(self.graph.shapes[self.graph.output_value]) < 2

    @cached_property
    def stream_below_cut(self) -> StripwisePlan | None:
        """Stream of the nodes below the last cut."""
        if not self.cuts:
            return None
        *cuts, nodes = self.cuts
        value = self.graph.node_ends[nodes][1]
        cell_parts = self.strip_partitions[value], self.grid.partition(self.graph.shapes[value][:-1])
        extended_output = hull_partition(*(self._union_over_strips(part, self._num_kept_strips) for part in cell_parts))
        grid = replace(self.grid, num_last_strips=self._num_kept_strips)
        return StripwisePlan(
            self.graph.subgraph(0, nodes), nodes, grid, cuts=tuple(cuts), extended_output=extended_output
        )

    @property
    def _num_kept_strips(self) -> int:
        """Number of strips of a tile whose gradients are kept at cuts."""
        return self.num_strips_with_kept_gradients or self.grid.num_last_strips or self.grid.strips

    def strips_with_kept_gradients(self, tile: int) -> list[int]:
        """Return the strips of a tile whose gradients are kept."""
        return [] if self.stream_below_cut is None else list(self._first_axis_parts(tile))[-self._num_kept_strips :]

    @property
    def parts(self) -> list[StripwisePlan]:
        """This stream and the streams below each cut, in backward order."""
        return [self, *([] if self.stream_below_cut is None else self.stream_below_cut.parts)]

    @property
    def backward_sweep_stops(self) -> list[int]:
        """Step at which each backward sweep stops; -1: the image.

        The last sweep crosses the next cut, if any, and continues to the nearest layer with a reduction below that cut.
        """
        stops, lower = self._backward_sweep_ends_without_cuts, self.stream_below_cut
        return stops if lower is None else [at for at in stops if at >= lower.reduction_steps("backward")[-1]]

    @property
    def _backward_sweep_ends_without_cuts(self) -> list[int]:
        stops = self.reduction_steps("backward")[::-1]
        return [*stops[self.extended_output is not None :], -1]  # the sweep across a cut includes the first step below

    def possible_cuts(self) -> dict[int, int]:
        """Return the possible cuts: numbers of nodes, and the elements per sample kept at each."""
        graph, elements_by_cut = self.graph, dict[int, int]()
        bound = {*graph.fused_activations, *graph.deferred_relu_gradients.values()}
        for at in self.reduction_steps("backward"):
            node_ends = ((n, *graph.node_ends[n]) for n in range(1, self.num_nodes))
            nodes, value = next(((n, value) for n, end, value in node_ends if end > at and end not in bound), (0, 0))
            if nodes and len(graph.shapes[value]) > 1:
                elements_by_cut[nodes] = prod(graph.shapes[value])
        return elements_by_cut

    @cached_property
    def output_cells(self) -> Partition:
        """Cells of the output in each strip."""
        extent = self.graph.shapes[self.graph.output_value][:-1]
        own = self.grid.partition(extent)
        if self.extended_output is None:
            return own
        ranges = [self.extended_output.ranges_along(axis) for axis in range(len(self.extended_output.parts))]
        num_strips, rows = self.grid.strips, list[tuple[int, int]]()
        first = num_strips - (self.grid.num_last_strips or num_strips)
        for tile, (lo, hi) in enumerate(ranges[0]):
            inner = [min(max(own.range(0, tile * num_strips + at)[0], lo), hi) for at in range(first + 1, num_strips)]
            rows += [(lo, lo)] * first + list(pairwise((lo, *inner, hi)))
        return OverlappingPartition(extent, own.parts, own.num_copies_of_vector, (tuple(rows), *map(tuple, ranges[1:])))

    def output_box(self, tile: int) -> Box | None:
        """Return a tile's cells of the output; None for a vector."""
        extent = self.graph.shapes[self.graph.output_value][:-1]
        return (self.extended_output or self.grid.without_strips.partition(extent)).box(tile) if extent else None

    def reduction_steps(self, direction: str) -> list[int]:
        """Return the steps with a reduction over all strips."""
        steps, shapes = enumerate(self.graph.steps), self.graph.shapes
        layers = [(at, step.layer, shapes[step.inputs[0]]) for at, step in steps if step.layer is not None]
        reductions = [(at, sums) for at, layer, shape in layers for sums in layer.reductions_for(shape)]
        return sorted({at for at, sums in reductions if sums.direction == direction})

    @cached_property
    def recomputed_steps(self) -> frozenset[int]:
        """Steps that a checkpointed strip recomputes, because the backward pass needs their values."""
        graph, steps = self.graph, self.graph.steps
        pending_values = [
            value
            for value in range(1, len(graph.shapes))
            if value in graph.producers
            and (graph.producer_reads_output(value) or any(steps[at].saves_input for at in graph.readers[value]))
        ]
        needed = {at for at, step in enumerate(steps) if not _declares_saved_bytes(step)}
        head = steps[-1].layer if len(graph.shapes[graph.output_value]) < 2 else None
        if head is not None:
            needed.add(len(steps) - 1)
            if head.saves_input or not declared_with(head, "forward_reads_only_reduced", "forward"):
                pending_values += steps[-1].inputs
        pending_values += [value for at in needed if at < len(steps) - 1 or head is None for value in steps[at].inputs]
        producers = {step.output_value: at for at, step in enumerate(steps)}
        while pending_values:
            at = producers.get(pending_values.pop(), -1)
            if at >= 0 and at not in needed:
                needed.add(at)
                pending_values += steps[at].inputs
        return frozenset(needed)

    def saved_bytes(self, tile: int, itemsize: int) -> int:
        """Return the bytes per sample kept by the checkpoints of a tile's strips."""
        if not self.checkpointed_strips:
            return 0
        saved_arrays = [
            (self.strip_partitions[value], self.graph.shapes[value][-1], layer.saved_bytes_and_elements)
            for at, (layer, _, _, value) in enumerate(self.graph.steps)
            if layer is not None and layer.saved_bytes_and_elements is not None and at not in self.recomputed_steps
        ]
        return sum(
            partition.box(at).size * channels * (fixed + count * itemsize)
            for at in self.strips(tile)[-self.checkpointed_strips :]
            for partition, channels, (fixed, count) in saved_arrays
        )

    @cached_property
    def strip_partitions(self) -> list[Partition]:
        """Partition of every value into the cells of each strip; for a vector, each strip has all cells."""
        if self.precomputed_strip_partitions is not None:
            return self.precomputed_strip_partitions
        graph, outputs = self.graph, self.output_cells
        own_cells = [self.grid.partition(shape[:-1]) for shape in graph.shapes]
        own_cells[graph.output_value] = outputs
        counts = {
            at
            for at, step in enumerate(graph.steps)
            if step.layer is not None and step.layer.reduces_over_image(graph.shapes[step.inputs[0]])
        }
        # a reduction over the image includes all own cells of a strip, even those that no other step reads
        reduced = {s.output_value for at, s in enumerate(graph.steps) if {at, graph.fused_activations.get(at)} & counts}
        traced = trace_needed_cells(graph, outputs, self._needed_cells, {value: own_cells[value] for value in reduced})
        return [hull_partition(traced[0], own_cells[0]), *traced[1:]]  # cells outside all windows have an owner, too

    def _needed_cells(self, layer: Layer, outputs: Partition, value: int) -> Partition:
        shape = self.graph.shapes[value]
        if not outputs.extent:  # a vector: sums over the cells of the strip
            return self.grid.partition(shape[:-1])
        return needed_cells(layer, outputs, shape)

    @cached_property
    def section(self) -> PlannedSection:
        """Section executed for each strip, whose tiles are the strips."""
        return PlannedSection.of_parts(self.graph, self.strip_partitions, self.grid)

    @cached_property
    def regions(self) -> LayerRegions:
        """Cells of each layer's input and output on a tile, by the layer's id."""
        tiles = [cells if cells.extent else None for cells in self.tile_cells]
        return {
            id(step.layer): (tiles[step.inputs[0]], tiles[step.output_value])
            for step in self.graph.steps
            if step.layer is not None
        }

    @cached_property
    def tile_cells(self) -> list[Partition]:
        """Union of the cells of every value over the strips of a tile; for the image, including strips below a cut."""
        image_cells, *others = (self._union_over_strips(p) if p.extent else p for p in self.strip_partitions)
        lower = self.stream_below_cut
        return [image_cells if lower is None else hull_partition(image_cells, lower.tile_cells[0]), *others]

    def _union_over_strips(self, cells: Partition, num_last_strips: int | None = None) -> OverlappingPartition:
        """Return the union of the cells of each tile's strips, or of the last `num_last_strips` of them."""
        ranges = [cells.ranges_along(axis) for axis in range(len(cells.parts))]
        count = self.grid.strips
        ranges_by_tile = [
            ranges[0][at + count - (num_last_strips or count) : at + count] for at in range(0, len(ranges[0]), count)
        ]
        non_empty_ranges = [[(lo, hi) for lo, hi in strips if lo < hi] or strips[:1] for strips in ranges_by_tile]
        ranges[0] = [(min(lo for lo, _ in strips), max(hi for _, hi in strips)) for strips in non_empty_ranges]
        grid = self.grid.without_strips
        return OverlappingPartition(cells.extent, grid.parts(len(cells.extent)), grid.tiles, tuple(map(tuple, ranges)))

    def strips(self, tile: int) -> list[int]:
        """Return a tile's strips with cells of the output or of a reduction's input; at least one."""
        shapes, graph = self.graph.shapes, self.graph
        reduced_values = {graph.steps[at].inputs[0] for at in self.reduction_steps("forward")}
        partitions = [self.grid.partition(shapes[value][:-1]) for value in reduced_values if len(shapes[value]) > 1]
        partitions += [] if self.output_is_vector else [self.output_cells]
        part_by_strip = self._first_axis_parts(tile)
        strips = [at for at, part in part_by_strip.items() if any(lt(*cells.range(0, part)) for cells in partitions)]
        return strips or list(part_by_strip)[:1]

    def _first_axis_parts(self, tile: int) -> dict[int, int]:
        """Return a tile's strips and the part of the first axis of each."""
        ndim, count = len(self.graph.shapes[0]) - 1, self.grid.strips
        first_part = self.grid.without_strips.partition(self.graph.shapes[0][:-1]).coords(tile)[0] * count
        return dict(zip(self.grid.strip_numbers_of(tile, ndim), range(first_part, first_part + count), strict=True))

    def max_strip_buffer_elements(self, tile: int) -> int:
        """Return the elements per sample of the arrays of the largest strip."""
        return max(self.section.memory_plan(at).num_elements for at in self._distinct_strips(tile))

    def _distinct_strips(self, tile: int, only_largest: bool = False) -> list[int]:
        """Return one strip per geometry; `only_largest`: omit strips with no more rows of any value than another."""
        part_by_strip, strips = self._first_axis_parts(tile), self.strips(tile)
        own = [part_by_strip[at] for at in strips]
        cells_by_value = {value: cells for value, cells in enumerate(self.strip_partitions) if cells.extent}
        ranges = {value: np.array([cells.range(0, part) for part in own]).T for value, cells in cells_by_value.items()}
        at_border = {value: (lo == 0, hi == cells_by_value[value].extent[0]) for value, (lo, hi) in ranges.items()}
        keys = [end for ends in at_border.values() for end in ends]
        for step in self.graph.steps:
            output_value = step.output_value
            for value in {*step.inputs} & {*ranges} if output_value in ranges else ():  # extent of the padding
                (first, stop), num_rows = ranges[output_value], cells_by_value[output_value].extent[0]
                ends = zip(at_border[value], (first, num_rows - stop), strict=True)
                keys += [np.where(end, n, -1) for end, n in ends]
        range_lengths = [hi - lo for lo, hi in ranges.values()]
        _, first_indices = np.unique(np.stack([*keys, *range_lengths], 1), axis=0, return_index=True)
        strip_by_key = {
            (tuple(int(key[i]) for key in keys), tuple(int(length[i]) for length in range_lengths)): strips[i]
            for i in sorted(first_indices.tolist())
        }
        if not only_largest:
            return list(strip_by_key.values())
        maximal_keys: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        for edge, extents in sorted(strip_by_key, key=lambda pair: -sum(pair[1])):
            if not any(e == edge and all(map(ge, larger, extents)) for e, larger in maximal_keys):
                maximal_keys.append((edge, extents))
        return [strip_by_key[pair] for pair in maximal_keys]

    def strip_bytes(self, tile: int, itemsize: int) -> int:
        """Return the bytes per sample of the largest strip, including its image as read and normalised."""
        bytes_by_strip, channels = [], self.graph.shapes[0][-1]
        for at in self._distinct_strips(tile, only_largest=True):
            halos = self.section.output_halo_plans(at)
            halo_elements = sum(cells.buffer.size * width for cells, width in halos)  # doubled below, for the gradient
            image_elements = self.strip_partitions[0].box(at).size * channels
            elements = self.section.memory_plan(at).num_elements + 2 * (image_elements + halo_elements)
            saved = self.section.saved_bytes(at, itemsize)
            bytes_by_strip.append(elements * itemsize + sum(saved) + max(saved))  # max: scratch of the largest step
        return max(bytes_by_strip)

    def bytes(self, tile: int, itemsize: int) -> int:
        """Return the bytes per sample of the largest strip, and of all checkpoints and kept gradients."""
        max_strip_bytes = max(part.strip_bytes(tile, itemsize) for part in self.parts)
        return max_strip_bytes + self.saved_bytes(tile, itemsize) + self.kept_gradient_elements(tile) * itemsize

    @property
    def tile_class_keys(self) -> list[PartClassKeys]:
        """Keys that distinguish tiles: their strips, and their parts of partitioned values."""
        parts = self.parts
        plans = [plan for part in parts for plan in part.section.placed.values()]
        strips = [key for plan in plans for key in plan.tile_class_keys("all")]
        strips += [part_class_keys(partition) for part in parts for partition in part.strip_partitions]
        extended_output = [part_class_keys(part.extended_output) for part in parts if part.extended_output is not None]
        return [*(tile_keys_from_strips(key, self.grid.strips) for key in strips if key.by_axis), *extended_output]

    def kept_gradient_elements(self, tile: int) -> int:
        """Return the elements per sample of kept gradients: those of two consecutive cuts are kept at the same time."""
        cut = [part for part in self.parts if part.extended_output is not None]
        sizes = [part.extended_output.box(tile).size * part.graph.shapes[part.graph.output_value][-1] for part in cut]  # type: ignore[union-attr]
        return max(above + below for above, below in pairwise([0, *sizes, 0]))


def forward_cost_per_cell(graph: Graph, step_index: int) -> float:
    """Return the cost, in operations, of a step's forward pass per output cell; 0 for a fused activation."""
    step = graph.steps[step_index]
    if step_index in graph.fused_activations:
        return 0.0
    computed = 0.0 if step.layer is None else forward_operations_per_cell(step.layer, graph.shapes[step.inputs[0]])
    return computed + ACCESS_COST_IN_OPERATIONS * graph.shapes[step.output_value][-1]


def operations_per_sample(graph: Graph, stream: StripwisePlan | None) -> float:
    """Return the cost per sample of a training step, in operations, including memory accesses and calls."""
    first_step = 0 if stream is None else len(stream.graph.steps)
    remaining_operations = sum(
        prod(graph.shapes[graph.steps[at].output_value][:-1]) * forward_cost_per_cell(graph, at)
        for at in range(first_step, len(graph.steps))
    )
    return TRAINING_COST_FACTOR * remaining_operations + (0 if stream is None else stream.training_operations)


def _declares_saved_bytes(step: Step) -> bool:
    """Return whether the arrays that a step saves are declared."""
    return step.layer is None or declared_with(step.layer, "saved_bytes_and_elements", "forward") is not None
