"""Compiled plan of a model on a grid: its steps, messages and memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from itertools import pairwise
from math import isqrt, prod
from typing import Any, overload

import numpy as np

from ..comm import group_of
from ..costs import Cost
from ..costs.mean import parts_of
from ..geometry import GridShape, Level, Partition, split
from ..optim import Optimizer
from ..registry import serial_class
from ..strategies import Strategy, StrategyBuilder
from . import report
from .classes import TileClasses, cells_kinds, classes_of
from .graph import Graph
from .layer import LayerCosts, LayerPlan
from .model_plan import Workload
from .parameters import ParameterPlan
from .section import PlannedSection, Rows, Segment, in_segments
from .stream import Stream, work_of

Shape = tuple[int, ...]
LOSS, GRADIENTS = "loss", "gradients"
"""Under these names, instead of a layer's, reductions of the whole model are told."""


@dataclass(frozen=True)
class Training:
    """Facts about a training step that a plan needs in addition to the layers."""

    cost: Cost
    optimizer: Optimizer
    dtype: np.dtype
    accumulate: int = 1
    recompute: bool = False
    strips: Rows | None = None
    memory: int | None = None
    """bytes that a rank may use; None: as many as it takes"""
    backward: bool = True
    """False: there is only a forward pass"""
    spares: bool = False
    """whether half of the memory is worth some more work, where there is no limit"""
    strategy: StrategyBuilder | Strategy | None = None
    """None: all ranks add up all gradients, and update all parameters"""


@dataclass
class Plan(Sequence[LayerPlan]):
    """The steps of a model on every rank of a grid; as a sequence, the plans of all its layers, in order.

    It is made from arithmetic alone, without MPI. `model.compiled` is the one that runs; what is executed is compared
    with it.

    Attributes
    ----------
    graph : Graph
    layers : list of LayerPlan
    grid : GridShape
    batch_size : int
        Global.
    training : Training
    pretraining : dict of name to list
        For each stage that is trained before, the numbers that each tile sends for a sample in a step.
    stream : Stream or None
        What goes in strips from the image on, so that the step fits into memory.
    idle : int
        How many first nodes a step of training does not go back through, since they have nothing to train.
    """

    graph: Graph
    layers: list[LayerPlan]
    grid: GridShape
    batch_size: int
    training: Training
    pretraining: dict[str, list[int]] = field(default_factory=dict)
    stream: Stream | None = None
    idle: int = 0
    _per_sample: dict[int, int] = field(default_factory=dict, init=False, repr=False, compare=False)

    @overload
    def __getitem__(self, at: int) -> LayerPlan: ...
    @overload
    def __getitem__(self, at: slice) -> list[LayerPlan]: ...
    def __getitem__(self, at: int | slice) -> LayerPlan | list[LayerPlan]:
        return self.layers[at]

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def streams(self) -> bool:
        """Whether images are read strip by strip; without a limit they are in memory, whatever goes in strips."""
        return self.stream is not None and self.training.memory is not None

    @property
    def input_shape(self) -> Shape:
        """Input shape of the model, global and without the batch."""
        return self.graph.shapes[0]

    @property
    def output_shape(self) -> Shape:
        """Output shape of the model, global and without the batch."""
        return self.graph.shapes[self.graph.output]

    @property
    def wide_tiles(self) -> Partition | None:
        """The tiles of the image that the model reads, if they overlap."""
        if self.stream is not None:
            return self.stream.tiles[0]
        return self.layers[0].regions[0] if self.layers else None

    @property
    def first_window(self) -> LayerPlan | None:
        """The first layer whose window is larger than one cell, if it sees the image at its full extent."""
        for plan in self.layers:
            if plan.window is not None and any(k > 1 for k in plan.window.kernel):
                return plan if plan.input_shape[:-1] == self.layers[0].input_shape[:-1] else None
        return None

    @property
    def min_extent(self) -> int:
        """The fewest cells along an axis, of the last two, of what a layer is given; 1 if that is not an image."""
        images = [plan.input_shape for plan in self]
        found = min((n for shape in images if len(shape) > 2 for n in shape[-3:-1]), default=1)
        return found if len(images[0]) > 2 else 1

    @property
    def label_cells(self) -> Shape:
        """The extent of the maps of labels that the model wants; () if an image has one."""
        return self.output_shape[:-1]

    @cached_property
    def units(self) -> dict[str, list[LayerPlan]]:
        """Units executed one after the other, by name: layers, and segments of layers."""
        segments = {id(inside.layer): one for one in self.segments for inside in one.plans}
        found: dict[str, list[LayerPlan]] = {}
        for one in self:
            segment = segments.get(id(one.layer))
            found.setdefault(one.name if segment is None else segment.name, []).append(one)
        return found

    @property
    def rows(self) -> dict[str, str]:
        """The rows of a benchmark's table, and the class of each; or of how many layers it is a segment."""
        kinds = ((name, plans, serial_class(type(plans[0].layer)).__name__) for name, plans in self.units.items())
        return {name: kind if len(plans) == 1 else f"segment of {len(plans)}" for name, plans, kind in kinds}

    def outline(self) -> list[str]:
        """Return what all ranks must agree on, beside the strategy, a fact a line."""
        arrays = (
            f"'{plan.name}/{name}': {parameter.shape}, {parameter.layout}"
            for plan in self
            for name, parameter in {**plan.trained, **plan.layer.state_for(plan.input_shape)}.items()
        )
        return [*(plan.outline() for plan in self), *arrays]

    def row_of(self, name: str) -> str:
        """Return the table row of a layer; other names have their own rows."""
        return next((row for row, plans in self.units.items() if name in [plan.name for plan in plans]), name)

    # What is sent, in bytes of a training step.

    def bytes(self, rank: int, batch_size: int | None = None) -> int:
        """Return the bytes of halos that a rank sends in a training step; where steps differ, in the mean.

        Parameters
        ----------
        batch_size : int, optional
            Of a step with fewer samples than the plan's.
        """
        replica, tile = divmod(rank, self.grid.tiles)
        samples = self.samples(replica, batch_size)
        return round(sum(plan.sent_by(tile, samples, *self._how(plan)) for plan in self))

    def reduced(self, rank: int, batch_size: int | None = None) -> dict[str, int]:
        """Return the bytes of the arrays that a rank gives into sums over ranks in a training step.

        By layer, and under 'gradients' and 'loss', as the ledger records them; what gives nothing is left out.
        """
        size, samples = self.itemsize, self.samples(rank // self.grid.tiles, batch_size)
        ranks = {"world": self.grid.size, "tiles": self.grid.tiles, "replicas": self.grid.replicas}
        calls = len(micro_batches(samples, self.training.accumulate))
        found = {plan.name: plan.reduced_bytes(samples, size, ranks, calls) for plan in self}
        norms = self.training.optimizer.norms_for(self.parameters.parts)
        found[GRADIENTS] = self.parameters.reduced(rank, norms)
        tiled = len(self.output_shape) > 1
        whole, inside = group_of(tiled, replicas=True), group_of(tiled, replicas=False)
        once, each = ranks[whole or "tiles"] > 1, inside is not None and ranks[inside] > 1
        parts = [part for _, part in parts_of(self.training.cost)]
        sums = sum(part.sums_for(self.output_shape) for part in parts)
        found[LOSS] = 8 * (once * (1 + sum(part.weighted for part in parts)) + each * samples * sums)
        return {name: count for name, count in found.items() if count}

    def redistributed(self, rank: int, batch_size: int | None = None) -> dict[str, int]:
        """Return the bytes that a rank sends in a training step to redistribute vectors, by layer.

        Under 'gradients': gradients that it sends to their owners, and values that it owns and sends to all.
        """
        replica, tile = divmod(rank, self.grid.tiles)
        samples = self.samples(replica, batch_size)
        sent = {plan.name: sum(one.sent(self.grid.tiles, tile) for one in plan.redistributions) for plan in self}
        found = {name: numbers * samples * self.itemsize for name, numbers in sent.items()}
        found[GRADIENTS] = self.parameters.redistributed(rank, samples)
        return {name: nbytes for name, nbytes in found.items() if nbytes}

    @cached_property
    def parameters(self) -> ParameterPlan:
        """The trained parameters of all layers."""
        named = {f"{plan.name}/{name}": parameter for plan in self for name, parameter in plan.trained.items()}
        training = self.training
        return ParameterPlan(named, self.grid, training.dtype, len(training.optimizer.kept), training.strategy)

    @cached_property
    def workload(self) -> Workload:
        """Workload of the busiest rank in a step: it has most cells, and sends most, in each layer."""
        samples = self.samples(0)
        flops = sum(2 * samples * (3 if plan.gradient else 2) * plan.products(0) for plan in self)
        again = 1.0 if self.stream is None else work_of(self.graph, self.stream) / work_of(self.graph, None)
        moved = self.moved(0) - self.parameters.moved(0)
        sent = sum(max(plan.sent_by(t, samples, *self._how(plan)) for t in plan.classes.tiles) for plan in self)
        messages = sum(max(sum(map(len, plan.messages(t))) for t in plan.classes.tiles) for plan in self)
        several = {"world": self.grid.size, "tiles": self.grid.tiles, "replicas": self.grid.replicas}
        sums = sum(several[one.group] > 1 for plan in self for one in plan.reductions if one.group)
        summed = sum(count for name, count in self.reduced(0).items() if name not in (GRADIENTS, LOSS))
        return Workload(flops * again, moved * again, messages, sent, sums, summed, self.parameters)

    def pretraining_bytes(self) -> list[tuple[str, int, int]]:
        """Return each stage's name, and what the busiest rank and all ranks send in a step of its pretraining."""
        most, size = self.samples(0), self.itemsize
        found = self.pretraining.items()
        return [(name, max(words) * most * size, sum(words) * self.batch_size * size) for name, words in found]

    # What is held.

    def memory(self, rank: int) -> int:
        """Return the bytes that a rank holds: views, gradients of them, parameters, and the optimiser's arrays.

        Kernels' scratch space is not counted.
        """
        replica, tile = divmod(rank, self.grid.tiles)
        return self.arena(replica, tile) + self.parameters.memory(rank)

    def moved(self, rank: int) -> int:
        """Return the bytes that a rank reads and writes in a training step, at least.

        Those of views, outputs and their gradients, each read or written once, and of the update; what is between the
        layers of a segment stays in the cache.
        """
        replica, tile = divmod(rank, self.grid.tiles)
        numbers = 0
        for at, plans in enumerate(self.units.values()):
            view = plans[0].view(tile).buffer.size * plans[0].input_shape[-1]
            output = plans[-1].tile(tile).size * plans[-1].output_shape[-1]
            numbers += self.samples(replica) * ((2 + (at > 0)) * view + 2 * output)
        return self.itemsize * numbers + self.parameters.moved(rank)

    def arena(self, replica: int, tile: int) -> int:
        """Return the bytes of one block for all views and gradients, and of what is saved or recomputed from.

        Arrays that never live at the same moment of a step share memory in the block.
        """
        stream = 0 if self.stream is None else self.stream.bytes(tile, self.itemsize)
        return self._whole(replica, tile) + stream * self.held_samples(replica)

    def needed_by(self, stream: Stream | None) -> int:
        """Return what the rank that needs most would need, if these strips went in such a way; None: without them."""

        def bytes_of(tile: int) -> int:
            strips = 0 if stream is None else stream.bytes(tile, self.itemsize) * self.held_samples(0)
            return self._whole(0, tile) + self.parameters.most_memory(tile) + strips

        return max(map(bytes_of, self.classes(stream).tiles))

    def classes(self, stream: Stream | None) -> TileClasses:
        """Return the tiles that differ in more than their place, where these strips go in such a way."""
        values = {self.grid.partition(shape[:-1]) for shape in self.graph.shapes}
        values |= {self.grid.partition(self.graph.shapes[value]) for value in self.graph.shards}
        values |= {cells for section in self.sections for cells in section.regions.values()}
        level: Level = "extents" if stream is None and not self.segments else "all"
        kinds = [kind for plan in self for kind in plan.kinds(level)]
        kinds += map(cells_kinds, values)
        kinds += [] if stream is None else stream.kinds
        tiles = range(self.grid.tiles if self.parameters.shares else 0)
        owned = [self.parameters.most_memory(tile) for tile in tiles]
        return classes_of(self.grid.tiles, kinds, [np.array(owned)] if owned else [])

    def _whole(self, replica: int, tile: int) -> int:
        """Return the bytes of what does not go in strips from the image on, without parameters."""
        if tile not in self._per_sample:
            inputs = self.sections[self.stream is None :]
            kept = sum(prod(section.tile_shapes(tile)[0]) for section in inputs)
            numbers = self.length(tile) + self.strip_length(tile) + kept
            beside = max((sum(section.saved(tile, self.itemsize)) for section in self.sections), default=0)
            self._per_sample[tile] = numbers * self.itemsize + beside
        return self._per_sample[tile] * self.held_samples(replica)

    @property
    def needed(self) -> int:
        """Result of `memory` for the rank that needs most."""
        return self.needed_by(self.stream)

    trained_in = needed

    @property
    def peak(self) -> int:
        """The same on the rank that needs most."""
        return max(self.arena(0, tile) for tile in self.classes(self.stream).tiles)

    def length(self, tile: int) -> int:
        """Return the numbers of a sample in such a block; sections take turns in it."""
        return max((section.live_ranges(tile).length for section in self.sections), default=0)

    def strip_length(self, tile: int) -> int:
        """Return the numbers of a sample that segments need beside it, one at a time."""
        return max((segment.length(tile) for segment in self.segments), default=0)

    @property
    def segments(self) -> list[Segment]:
        """Segments executed in strips."""
        return [one for section in self.sections for one in section.segments.values()]

    @cached_property
    def sections(self) -> list[PlannedSection]:
        """All nodes behind the stream; or, where arrays are recomputed, about as many as each of them has nodes."""
        start = 0 if self.stream is None else self.stream.nodes
        nodes = len(self.graph.ends) - 1 - start
        count = max(1, isqrt(nodes)) if self.training.recompute else 1
        cuts = [start + split(nodes, count, at)[0] for at in range(1, count)]
        ends = self.graph.ends  # nodes without steps are no section of their own, of which a gradient would be asked
        cuts = [at for at in cuts if ends[at][1] not in self.graph.shards and ends[at] != ends[start]]
        cuts = [start, *cuts, start + nodes]
        layers = {id(plan.layer): plan for plan in self}
        found = []
        for first, last in pairwise(cuts) if nodes else ():
            graph, segments = self.graph.part(first, last), dict[int, Segment]()
            if self.training.strips is not None:
                graph, segments = in_segments(graph, layers, self.grid, self.training.strips, self.itemsize)
            begin, _ = self.graph.ends[first]
            reader = next((layers.get(id(step.layer)) for step in self.graph.steps[begin:]), None)
            wide = None if reader is None else reader.regions[0]
            regions = {} if wide is None else {0: wide}
            found.append(
                PlannedSection(
                    first,
                    last,
                    graph,
                    {**layers, **segments},
                    self.grid,
                    regions,
                    first > 0,
                    segments,
                    self.training.backward,
                    restores=True,
                )
            )
        return found

    def costs(self, batch_size: int | None = None) -> list[LayerCosts]:
        """Return the costs of every layer in one step of a whole batch."""
        size, found = self.itemsize, []
        shares = Counter(self.samples(replica, batch_size) for replica in range(self.grid.replicas))
        for index, plan in enumerate(self):
            view = plan.largest_view * plan.input_shape[-1] * size
            sent = {samples: plan.sent_bytes(samples, *self._how(plan)) for samples in shares}
            found.append(
                LayerCosts(
                    sent_most=round(max(sent[self.samples(0, batch_size)])),
                    sent_all=round(sum(count * sum(sent[samples]) for samples, count in shares.items())),
                    parameters=plan.parameters,
                    memory=(1 + (index > 0)) * view * self.held_samples(0) + max(plan.held) * self._per_parameter,
                )
            )
        return found

    def each_needs(self) -> Iterator[tuple[str, int]]:
        """Yield each layer's name, and the bytes that it needs by itself on the fullest rank."""
        for plan, costs in zip(self, self.costs(), strict=True):
            yield plan.name, costs.memory

    def samples(self, replica: int, batch_size: int | None = None) -> int:
        """Return how many samples of a batch a replica has."""
        lo, hi = split(self.batch_size if batch_size is None else batch_size, self.grid.replicas, replica)
        return hi - lo

    def table(self) -> Any:
        """Return the plan for a rich console to print: a table of the layers, what they do together, and a legend."""
        sums = {
            "sums over ranks: a rank gives": self.reduced(0),
            "redistributions: a rank sends": self.redistributed(0),
        }
        streamed = "" if self.stream is None else str(self.stream)
        return report.table(self, self.costs(), self.peak, sums, self.pretraining_bytes(), streamed)

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self.describe())}</pre>"

    def describe(self) -> str:
        """Return the same as plain text, with the grid above: what `neondist check` prints."""
        head = report.headline(self.training.dtype, self.grid, self.input_shape, self.batch_size)
        return report.as_text(head, self.table())

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""
        return self.training.dtype.itemsize

    def _how(self, plan: LayerPlan) -> tuple[int, bool, int]:
        """Return the bytes of a layer's numbers, whether it goes all the way back, and how often forward."""
        return self.itemsize, plan.gradient, 1 + (id(plan.layer) in self._recomputed)

    @cached_property
    def _recomputed(self) -> set[int]:
        """The layers that go forward twice and exchange halos again: all that are kept from sections alone."""
        steps, _ = self.graph.ends[self.sections[-1].first if self.sections else 0]
        return {id(step.layer) for step in self.graph.steps[:steps]}

    @property
    def _per_parameter(self) -> int:
        """Bytes of a trained number, its gradient, and what the optimiser keeps of it."""
        return self.itemsize * (2 + len(self.training.optimizer.kept))

    def held_samples(self, replica: int) -> int:
        """Return how many of a rank's samples are in memory at once: a micro-batch, if none waits for another."""
        samples = self.samples(replica)
        over_batch = any(one.over_batch for plan in self for one in plan.reductions)
        return samples if over_batch else largest_of(micro_batches(samples, self.training.accumulate))


def micro_batches(samples: int, accumulate: int) -> list[tuple[int, int]]:
    """Return the ranges of a rank's samples that go through a training step one after the other."""
    count = max(1, min(accumulate, samples))
    return [split(samples, count, at) for at in range(count)]


def largest_of(batches: Sequence[tuple[int, int]]) -> int:
    """Return the samples of the largest micro-batch."""
    return max(hi - lo for lo, hi in batches)
