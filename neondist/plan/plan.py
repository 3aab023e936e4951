"""Compiled plan of a model on a grid: its steps, messages and memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from itertools import pairwise
from math import inf, prod
from typing import Any, overload

import numpy as np

from ..comm import reduction_group
from ..costs import Cost
from ..costs.mean import parts_of
from ..geometry import GridShape, KeyDetail, Partition, part_range
from ..optim import Optimizer
from ..registry import serial_class
from ..strategies import Strategy, StrategyBuilder
from . import report
from .classes import TileClasses, part_class_keys, tile_classes
from .graph import Graph
from .layer import LayerPlan, TrainingCosts
from .model_plan import Workload
from .parameters import ParameterPlan
from .planner import recompute_cuts
from .section import PlannedSection, Rows, Segment, group_into_segments
from .stream import StripwisePlan, operations_per_sample

Shape = tuple[int, ...]
LOSS, GRADIENTS = "loss", "gradients"
"""Names under which reductions of the whole model are recorded, in place of a layer's name."""


@dataclass(frozen=True)
class TrainingSettings:
    """Properties of a training step, apart from its layers, on which a plan depends."""

    cost: Cost
    optimizer: Optimizer
    dtype: np.dtype
    accumulate: int = 1
    recompute: bool = False
    strips: Rows | None = None
    memory: int | None = None
    """bytes that a rank may use; None: no limit"""
    backward: bool = True
    """False: forward pass only"""
    halve_memory_by_streaming: bool = False
    """whether to halve the memory at the cost of some more work, if there is no limit"""
    backend: str = "numpy"
    """name of the backend, whose overhead per process is part of the memory limit"""
    strategy: StrategyBuilder | Strategy | None = None
    """None: all ranks sum all gradients and update all parameters"""


@dataclass
class Plan(Sequence[LayerPlan]):
    """The steps of a model on every rank of a grid; as a sequence, it contains the plans of all layers, in order.

    It is computed without MPI. `model.compiled` is the plan that is executed; communication is checked against it.

    Attributes
    ----------
    graph : Graph
    layers : list of LayerPlan
    grid : GridShape
    batch_size : int
        Global.
    training : TrainingSettings
    pretraining_elements_sent : dict of name to list
        For each pretraining stage, the elements per sample that each tile sends in a step.
    stream : StripwisePlan or None
        Leading nodes, which read the image and are executed in strips so that the step fits in memory.
    num_nodes_without_backward : int
        Number of leading nodes that the backward pass skips, because they have no parameters.
    """

    graph: Graph
    layers: list[LayerPlan]
    grid: GridShape
    batch_size: int
    training: TrainingSettings
    pretraining_elements_sent: dict[str, list[int]] = field(default_factory=dict)
    stream: StripwisePlan | None = None
    num_nodes_without_backward: int = 0
    _bytes_per_sample_by_tile: dict[int, int] = field(default_factory=dict, init=False, repr=False, compare=False)

    @overload
    def __getitem__(self, index: int) -> LayerPlan: ...
    @overload
    def __getitem__(self, index: slice) -> list[LayerPlan]: ...
    def __getitem__(self, index: int | slice) -> LayerPlan | list[LayerPlan]:
        return self.layers[index]

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def is_streamed(self) -> bool:
        """Whether images are read strip by strip; without a memory limit, a stream reads whole images into memory."""
        return self.stream is not None and self.training.memory is not None

    @property
    def input_shape(self) -> Shape:
        """Input shape of the model, global and without the batch."""
        return self.graph.shapes[0]

    @property
    def output_shape(self) -> Shape:
        """Output shape of the model, global and without the batch."""
        return self.graph.shapes[self.graph.output_value]

    @property
    def has_vector_output(self) -> bool:
        """Whether the output has no spatial axes."""
        return len(self.output_shape) == 1

    @property
    def overlapping_tiles(self) -> Partition | None:
        """The tiles of the image that the model reads, if they overlap."""
        if self.stream is not None:
            return self.stream.tile_cells[0]
        return self.layers[0].regions[0] if self.layers else None

    @property
    def first_windowed_layer(self) -> LayerPlan | None:
        """The first layer whose window is larger than one cell, if it sees the image at its full extent."""
        for plan in self.layers:
            if plan.window is not None and any(k > 1 for k in plan.window.kernel):
                return plan if plan.input_shape[:-1] == self.layers[0].input_shape[:-1] else None
        return None

    @property
    def min_extent(self) -> int:
        """Smallest extent of any layer's image along its last two axes; 1 if the model's input has fewer than two."""
        input_shapes = [plan.input_shape for plan in self]
        min_extent = min((n for shape in input_shapes if len(shape) > 2 for n in shape[-3:-1]), default=1)
        return min_extent if len(input_shapes[0]) > 2 else 1

    @cached_property
    def execution_units(self) -> dict[str, list[LayerPlan]]:
        """Units executed in sequence, by name: layers, and segments of layers."""
        segments = {id(plan.layer): segment for segment in self.segments for plan in segment.plans}
        units: dict[str, list[LayerPlan]] = {}
        for plan in self:
            segment = segments.get(id(plan.layer))
            units.setdefault(plan.name if segment is None else segment.name, []).append(plan)
        return units

    @property
    def class_by_benchmark_row(self) -> dict[str, str]:
        """Rows of a benchmark's table, by name: the class of a layer, or the number of layers of a segment."""
        rows = (
            (name, plans, serial_class(type(plans[0].layer)).__name__) for name, plans in self.execution_units.items()
        )
        return {name: kind if len(plans) == 1 else f"segment of {len(plans)}" for name, plans, kind in rows}

    def settings_equal_on_all_ranks(self) -> list[str]:
        """Return the settings, except the strategy, that all ranks must agree on, as one string each."""
        array_settings = (
            f"'{plan.name}/{name}': {parameter.shape}, {parameter.layout}"
            for plan in self
            for name, parameter in {**plan.trained_parameters, **plan.layer.state_for(plan.input_shape)}.items()
        )
        return [*(plan.settings_equal_on_all_ranks() for plan in self), *array_settings]

    def benchmark_row_of(self, name: str) -> str:
        """Return the table row of a layer; other names have their own rows."""
        return next((row for row, plans in self.execution_units.items() if name in [plan.name for plan in plans]), name)

    # Communication, in bytes per training step.

    def bytes(self, rank: int, batch_size: int | None = None) -> int:
        """Return the bytes of halos that a rank sends in a training step, averaged if steps differ.

        Parameters
        ----------
        batch_size : int, optional
            Samples of an incomplete batch; default: the plan's.
        """
        replica, tile = divmod(rank, self.grid.tiles)
        samples = self.samples(replica, batch_size)
        return round(sum(plan.halo_bytes_of(tile, samples, *self._halo_bytes_args(plan)) for plan in self))

    def reduction_bytes(self, rank: int, batch_size: int | None = None) -> dict[str, int]:
        """Return the bytes that a rank contributes to reductions over ranks in a training step.

        The keys are the names of layers, 'gradients' and 'loss', as in the ledger; zeros are omitted.
        """
        itemsize, samples = self.itemsize, self.samples(rank // self.grid.tiles, batch_size)
        group_sizes = self._group_sizes
        num_micro_batches = len(micro_batch_ranges(samples, self.training.accumulate))
        nbytes = {p.name: p.reduction_bytes_per_rank(samples, itemsize, group_sizes, num_micro_batches) for p in self}
        num_norms = self.training.optimizer.num_reduced_norms(self.parameters.num_split_parameters)
        nbytes[GRADIENTS] = self.parameters.reduction_bytes(rank, num_norms)
        is_image = len(self.output_shape) > 1
        batch_group, sample_group = (reduction_group(is_image, over_replicas) for over_replicas in (True, False))
        sums_batch = group_sizes[batch_group or "tiles"] > 1
        per_sample = sample_group is not None and group_sizes[sample_group] > 1
        cost_parts = [part for _, part in parts_of(self.training.cost)]
        num_sums = sum(part.reduced_elements_per_sample(self.output_shape) for part in cost_parts)
        nbytes[LOSS] = 8 * (
            sums_batch * (1 + sum(part.has_weighted_mean for part in cost_parts)) + per_sample * samples * num_sums
        )
        return {name: count for name, count in nbytes.items() if count}

    def redistribution_bytes(self, rank: int, batch_size: int | None = None) -> dict[str, int]:
        """Return the bytes that a rank sends in a training step to redistribute vectors, by layer.

        The bytes of 'gradients' are those of gradients sent to their owners, and of owned values sent to all ranks.
        """
        replica, tile = divmod(rank, self.grid.tiles)
        samples = self.samples(replica, batch_size)
        elements_by_layer = {
            plan.name: sum(r.elements_sent_by(self.grid.tiles, tile) for r in plan.redistributions) for plan in self
        }
        nbytes = {name: elements * samples * self.itemsize for name, elements in elements_by_layer.items()}
        nbytes[GRADIENTS] = self.parameters.redistribution_bytes(rank, samples)
        return {name: count for name, count in nbytes.items() if count}

    @cached_property
    def parameters(self) -> ParameterPlan:
        """The trained parameters of all layers."""
        parameter_by_name = {
            f"{plan.name}/{name}": parameter for plan in self for name, parameter in plan.trained_parameters.items()
        }
        training = self.training
        return ParameterPlan(
            parameter_by_name, self.grid, training.dtype, len(training.optimizer.all_slot_names), training.strategy
        )

    @cached_property
    def workload(self) -> Workload:
        """Workload of the busiest rank in a step: the maximum of cells and messages in each layer."""
        samples = self.samples(0)
        work_factor = (
            1.0
            if self.stream is None
            else operations_per_sample(self.graph, self.stream) / operations_per_sample(self.graph, None)
        )
        flops = work_factor * sum(
            2 * samples * (3 if plan.needs_input_gradient else 2) * plan.forward_multiplications(0) for plan in self
        )
        traffic_bytes = work_factor * (self.memory_traffic(0) - self.parameters.memory_traffic(0))
        sent = sum(
            max(plan.halo_bytes_of(t, samples, *self._halo_bytes_args(plan)) for t in plan.classes.representatives)
            for plan in self
        )
        messages = sum(
            max(sum(map(len, plan.sent_message_sizes(t))) for t in plan.classes.representatives) for plan in self
        )
        num_reductions = sum(self._group_sizes[r.group] > 1 for plan in self for r in plan.reductions if r.group)
        reduction_bytes = sum(count for name, count in self.reduction_bytes(0).items() if name not in (GRADIENTS, LOSS))
        return Workload(flops, traffic_bytes, messages, sent, num_reductions, reduction_bytes, self.parameters)

    def pretraining_bytes_sent(self) -> list[tuple[str, int, int]]:
        """Return each pretraining stage with the bytes per step sent by the busiest rank and by all ranks."""
        samples, size = self.samples(0), self.itemsize
        stages = self.pretraining_elements_sent.items()
        return [(name, max(counts) * samples * size, sum(counts) * self.batch_size * size) for name, counts in stages]

    # Memory.

    def memory(self, rank: int) -> int:
        """Return the bytes that a rank holds: views, their gradients, parameters and optimiser state.

        Kernels' scratch space is not counted.
        """
        replica, tile = divmod(rank, self.grid.tiles)
        return self.arena_bytes(replica, tile) + self.parameters.memory(rank)

    def memory_traffic(self, rank: int) -> int:
        """Return a lower bound on the bytes that a rank reads and writes in a training step.

        The bound includes views, outputs and their gradients, each read or written once, and the update; intermediate
        values of a segment are assumed to stay in the cache.
        """
        replica, tile = divmod(rank, self.grid.tiles)
        elements = 0
        for at, plans in enumerate(self.execution_units.values()):
            view_elements = plans[0].view(tile).buffer.size * plans[0].input_shape[-1]
            output_elements = plans[-1].tile(tile).size * plans[-1].output_shape[-1]
            elements += self.samples(replica) * ((2 + (at > 0)) * view_elements + 2 * output_elements)
        return self.itemsize * elements + self.parameters.memory_traffic(rank)

    def arena_bytes(self, replica: int, tile: int) -> int:
        """Return the bytes of the block that holds all views and gradients, and of saved arrays and checkpoints.

        Arrays with disjoint lifetimes share memory in the block.
        """
        stream_bytes = 0 if self.stream is None else self.stream.bytes(tile, self.itemsize)
        return self._bytes_outside_stream(replica, tile) + stream_bytes * self.max_live_samples(replica)

    def needed_bytes_with(self, stream: StripwisePlan | None) -> int:
        """Return the bytes of the rank that needs the most, with a stream (None: without a stream)."""

        def bytes_of(tile: int) -> int:
            stream_bytes = 0 if stream is None else stream.bytes(tile, self.itemsize) * self.max_live_samples(0)
            return self._bytes_outside_stream(0, tile) + self.parameters.max_memory_of(tile) + stream_bytes

        return max(map(bytes_of, self.tile_classes_with(stream).representatives))

    def tile_classes_with(self, stream: StripwisePlan | None) -> TileClasses:
        """Return the classes of tiles, given a stream; tiles of one class differ only in position."""
        if self.grid.tiles == 1:
            return tile_classes(1, [])
        partitions = {self.grid.partition(shape[:-1]) for shape in self.graph.shapes}
        partitions |= {self.grid.partition(self.graph.shapes[value]) for value in self.graph.sharded_vectors}
        partitions |= {cells for section in self.sections for cells in section.regions.values()}
        level: KeyDetail = "extents" if stream is None and not self.segments else "all"
        class_keys = [key for plan in self for key in plan.tile_class_keys(level)]
        class_keys += map(part_class_keys, partitions)
        class_keys += [] if stream is None else stream.tile_class_keys
        tiles = range(self.grid.tiles if self.parameters.shares else 0)
        parameter_bytes = [self.parameters.max_memory_of(tile) for tile in tiles]
        return tile_classes(self.grid.tiles, class_keys, [np.array(parameter_bytes)] if parameter_bytes else [])

    def _bytes_outside_stream(self, replica: int, tile: int) -> int:
        """Return the bytes of the nodes outside the stream, without parameters."""
        if tile not in self._bytes_per_sample_by_tile:
            section_inputs = self.sections[self.stream is None :]
            kept_elements = sum(prod(section.tile_shapes(tile)[0]) for section in section_inputs)
            arena_elements = max((section.memory_plan(tile).num_elements for section in self.sections), default=0)
            strip_elements = max((segment.max_strip_buffer_elements(tile) for segment in self.segments), default=0)
            saved = max((sum(section.saved_bytes(tile, self.itemsize)) for section in self.sections), default=0)
            elements = arena_elements + strip_elements + kept_elements
            self._bytes_per_sample_by_tile[tile] = elements * self.itemsize + saved
        return self._bytes_per_sample_by_tile[tile] * self.max_live_samples(replica)

    @property
    def needed_bytes(self) -> int:
        """Maximum of `memory` over the ranks."""
        return self.needed_bytes_with(self.stream)

    max_training_memory = needed_bytes

    @property
    def peak_arena_bytes(self) -> int:
        """Maximum of `arena_bytes` over the ranks."""
        return max(self.arena_bytes(0, tile) for tile in self.tile_classes_with(self.stream).representatives)

    @property
    def segments(self) -> list[Segment]:
        """Segments executed in strips."""
        return [segment for section in self.sections for segment in section.segments.values()]

    @cached_property
    def sections(self) -> list[PlannedSection]:
        """Sections of the nodes after the stream: one, or about sqrt(nodes) of them with recomputation."""
        start = 0 if self.stream is None else self.stream.num_nodes
        num_nodes = len(self.graph.node_ends) - 1 - start
        # nodes without steps do not form a section on their own
        ends, sharded_vectors = self.graph.node_ends, self.graph.sharded_vectors
        nodes = range(start, start + num_nodes)
        costs = [inf if ends[at] == ends[start] or ends[at][1] in sharded_vectors else 0 for at in nodes]
        cuts = [start + at for at in (recompute_cuts(costs) if self.training.recompute else (0, num_nodes))]
        plan_by_layer_id = {id(plan.layer): plan for plan in self}
        sections = []
        for first, last in pairwise(cuts) if num_nodes else ():
            graph, segments = self.graph.subgraph(first, last), dict[int, Segment]()
            if self.training.strips is not None:
                rows = self.training.strips
                graph, segments = group_into_segments(graph, plan_by_layer_id, self.grid, rows, self.itemsize)
            begin_step, _ = self.graph.node_ends[first]
            first_plan = next((plan_by_layer_id.get(id(step.layer)) for step in self.graph.steps[begin_step:]), None)
            extended_input = None if first_plan is None else first_plan.regions[0]
            regions = {} if extended_input is None else {0: extended_input}
            sections.append(
                PlannedSection(
                    first,
                    last,
                    graph,
                    {**plan_by_layer_id, **segments},
                    self.grid,
                    regions,
                    first > 0,
                    segments,
                    self.training.backward,
                    may_recompute=True,
                )
            )
        return sections

    def costs(self, batch_size: int | None = None) -> list[TrainingCosts]:
        """Return the costs of every layer in one training step."""
        itemsize, costs = self.itemsize, []
        num_copies = 2 + len(self.training.optimizer.all_slot_names)  # the parameter, its gradient, and optimiser state
        shares = Counter(self.samples(replica, batch_size) for replica in range(self.grid.replicas))
        for index, plan in enumerate(self):
            view_bytes = plan.max_view_cells * plan.input_shape[-1] * itemsize
            sent_bytes = {samples: plan.halo_bytes_by_tile(samples, *self._halo_bytes_args(plan)) for samples in shares}
            costs.append(
                TrainingCosts(
                    max_sent_bytes=round(max(sent_bytes[self.samples(0, batch_size)])),
                    total_sent_bytes=round(sum(count * sum(sent_bytes[samples]) for samples, count in shares.items())),
                    parameters=plan.parameters,
                    memory=(1 + (index > 0)) * view_bytes * self.max_live_samples(0)
                    + max(plan.num_parameters_by_tile) * itemsize * num_copies,
                )
            )
        return costs

    def memory_by_layer(self) -> Iterator[tuple[str, int]]:
        """Yield the name of each layer and its maximum bytes on a rank."""
        for plan, costs in zip(self, self.costs(), strict=True):
            yield plan.name, costs.memory

    def samples(self, replica: int, batch_size: int | None = None) -> int:
        """Return the number of samples of a batch on a replica."""
        lo, hi = part_range(self.batch_size if batch_size is None else batch_size, self.grid.replicas, replica)
        return hi - lo

    def table(self) -> Any:
        """Return the plan for a rich console: a table of the layers, their totals, and a legend."""
        bytes_by_heading = {
            "sums over ranks": self.reduction_bytes(0),
            "sent in redistributions": self.redistribution_bytes(0),
        }
        stream_text = "" if self.stream is None else str(self.stream)
        return report.layer_table(
            self, self.costs(), self.peak_arena_bytes, bytes_by_heading, self.pretraining_bytes_sent(), stream_text
        )

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self.describe())}</pre>"

    def describe(self) -> str:
        """Return the table as plain text below a headline, as `neondist check` prints it."""
        headline = report.plan_headline(self.training.dtype, self.grid, self.input_shape, self.batch_size)
        return report.render_plain_text(headline, self.table())

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.training.dtype.itemsize

    @property
    def _group_sizes(self) -> dict[str, int]:
        return {"world": self.grid.size, "tiles": self.grid.tiles, "replicas": self.grid.replicas}

    def _halo_bytes_args(self, plan: LayerPlan) -> tuple[int, bool, int]:
        """Return the arguments of `LayerPlan.halo_bytes_of`: item size, gradient, and number of forward exchanges."""
        is_recomputed = id(plan.layer) in self._ids_of_recomputed_layers and not plan.scheme.is_stateful
        return self.itemsize, plan.needs_input_gradient, 1 + is_recomputed

    @cached_property
    def _ids_of_recomputed_layers(self) -> set[int]:
        """Ids of layers whose forward pass is run twice: all layers before the last section."""
        num_steps, _ = self.graph.node_ends[self.sections[-1].first_node if self.sections else 0]
        return {id(step.layer) for step in self.graph.steps[:num_steps]}

    def max_live_samples(self, replica: int) -> int:
        """Return the samples that are in a rank's memory at once: a micro-batch, unless a reduction spans the batch."""
        samples = self.samples(replica)
        spans_batch = any(sums.spans_batch for plan in self for sums in plan.reductions)
        return samples if spans_batch else max_micro_batch_size(micro_batch_ranges(samples, self.training.accumulate))


def micro_batch_ranges(samples: int, accumulate: int) -> list[tuple[int, int]]:
    """Return the ranges of a rank's samples in each micro-batch."""
    num_micro_batches = max(1, min(accumulate, samples))
    return [part_range(samples, num_micro_batches, at) for at in range(num_micro_batches)]


def max_micro_batch_size(sample_ranges: Sequence[tuple[int, int]]) -> int:
    """Return the samples of the largest micro-batch."""
    return max(hi - lo for lo, hi in sample_ranges)
