"""What a model does on a grid, compiled once: what runs, what it sends, and what it needs of memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import isqrt, prod
from typing import Any, overload

import numpy as np

from ..comm import group_of
from ..costs import Cost
from ..errors import UserError
from ..geometry import GridShape, Partition, split
from ..layers import Layer, Sequential
from ..optim import Optimizer
from ..parallel import HEADER
from . import report
from .graph import Graph, Lowering, of_layer
from .layer import LayerCosts, LayerPlan
from .section import PlannedSection, Rows, Segment, in_segments
from .segments import find_regions

Shape = tuple[int, ...]
LOSS, GRADIENTS = "loss", "gradients"
"""Under these names, instead of a layer's, reductions of the whole model are told."""


@dataclass(frozen=True)
class Training:
    """What a plan has to know of a training step beside the layers."""

    cost: Cost
    optimizer: Optimizer
    dtype: np.dtype
    accumulate: int = 1
    recompute: bool = False
    strips: Rows | None = None


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
    """

    graph: Graph
    layers: list[LayerPlan]
    grid: GridShape
    batch_size: int
    training: Training
    pretraining: dict[str, list[int]] = field(default_factory=dict)

    @overload
    def __getitem__(self, at: int) -> LayerPlan: ...
    @overload
    def __getitem__(self, at: slice) -> list[LayerPlan]: ...
    def __getitem__(self, at: int | slice) -> LayerPlan | list[LayerPlan]:
        return self.layers[at]

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def input_shape(self) -> Shape:
        """That of the model, global and without the batch."""
        return self.graph.shapes[0]

    @property
    def output_shape(self) -> Shape:
        """That of the model, global and without the batch."""
        return self.graph.shapes[self.graph.output]

    @property
    def wide_tiles(self) -> Partition | None:
        """The tiles of the image that the model reads, if they overlap."""
        return self.layers[0].regions[0] if self.layers else None

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
        replica, tile = divmod(rank, self.grid.tiles)
        size, samples = self.itemsize, self.samples(replica, batch_size)
        ranks = {"world": self.grid.size, "tiles": self.grid.tiles, "replicas": self.grid.replicas}
        calls = len(micro_batches(samples, self.training.accumulate))
        found = {plan.name: plan.reduced_bytes(samples, size, ranks, calls) for plan in self}
        parameters = [p for plan in self for p in plan.trained.values()]
        shared, own = (
            sum(p.size_on(self.grid, tile) for p in parameters if bool(p.layout.cut) is cut) for cut in (False, True)
        )
        found[GRADIENTS] = size * ((HEADER + shared) * (self.grid.size > 1) + own * (self.grid.replicas > 1))
        tiled = len(self.output_shape) > 1
        whole, inside = group_of(tiled, replicas=True), group_of(tiled, replicas=False)
        once, each = ranks[whole or "tiles"] > 1, inside is not None and ranks[inside] > 1
        found[LOSS] = 8 * (once + each * samples * self.training.cost.sums_for(self.output_shape))
        return {name: count for name, count in found.items() if count}

    def redistributed(self, rank: int, batch_size: int | None = None) -> dict[str, int]:
        """Return the bytes that a rank sends in a training step so that vectors are cut anew, by layer."""
        replica, tile = divmod(rank, self.grid.tiles)
        size = self.itemsize * self.samples(replica, batch_size)
        found = {plan.name: sum(one.sent(self.grid.tiles, tile) for one in plan.redistributions) for plan in self}
        return {name: numbers * size for name, numbers in found.items() if numbers * size}

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
        return self.arena(replica, tile) + sum(plan.held_by(tile) for plan in self) * self._per_parameter

    def arena(self, replica: int, tile: int) -> int:
        """Return the bytes of one block for all views and gradients, and of what sections are recomputed from.

        Arrays that never live at the same moment of a step share memory in the block.
        """
        kept = sum(prod(section.tile_shapes(tile)[0]) for section in self.sections[1:])
        return (self.length(tile) + self.strip_length(tile) + kept) * self._held_samples(replica) * self.itemsize

    @property
    def peak(self) -> int:
        """The same on the rank that needs most."""
        return max(self.arena(0, tile) for tile in range(self.grid.tiles))

    def length(self, tile: int) -> int:
        """Return the numbers of a sample in such a block; sections take turns in it."""
        return max(section.live_ranges(tile).length for section in self.sections)

    def strip_length(self, tile: int) -> int:
        """Return the numbers of a sample that strips need beside it, one at a time."""
        return max((segment.length(tile) for segment in self.segments), default=0)

    @property
    def segments(self) -> list[Segment]:
        """What is executed in strips."""
        return [one for section in self.sections for one in section.segments.values()]

    @cached_property
    def sections(self) -> list[PlannedSection]:
        """All nodes; or, where arrays are recomputed, about as many sections as each of them has nodes."""
        nodes = len(self.graph.ends) - 1
        count = max(1, isqrt(nodes)) if self.training.recompute else 1
        cuts = [split(nodes, count, at)[0] for at in range(1, count)]
        cuts = [0, *(at for at in cuts if self.graph.ends[at][1] not in self.graph.shards), nodes]
        layers = {id(plan.layer): plan for plan in self}
        found = []
        for first, last in pairwise(cuts):
            graph, segments = self.graph.part(first, last), dict[int, Segment]()
            if self.training.strips is not None:
                graph, segments = in_segments(graph, layers, self.grid, self.training.strips, self.itemsize)
            begin, _ = self.graph.ends[first]
            reader = next((layers.get(id(step.layer)) for step in self.graph.steps[begin:]), None)
            wide = None if reader is None else reader.regions[0]
            found.append(
                PlannedSection(first, last, graph, {**layers, **segments}, self.grid, wide, first > 0, segments)
            )
        return found

    def costs(self, batch_size: int | None = None) -> list[LayerCosts]:
        """Return the costs of every layer in one step of a whole batch."""
        size, found = self.itemsize, []
        shares = [self.samples(replica, batch_size) for replica in range(self.grid.replicas)]
        for index, plan in enumerate(self):
            view = max(box.size for box in plan.kept) * plan.input_shape[-1] * size
            found.append(
                LayerCosts(
                    sent_most=round(max(plan.sent_bytes(shares[0], *self._how(plan)))),
                    sent_all=round(sum(sum(plan.sent_bytes(samples, *self._how(plan))) for samples in shares)),
                    parameters=plan.parameters,
                    memory=(1 + (index > 0)) * view * self._held_samples(0) + max(plan.held) * self._per_parameter,
                )
            )
        return found

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
        return report.table(self, self.costs(), self.peak, sums, self.pretraining_bytes())

    def describe(self) -> str:
        """Return the same as plain text, with the grid above: what `neondist check` prints."""
        dtype, shape = self.training.dtype, report.by(self.input_shape)
        head = f"{dtype} on {report.grid_text(self.grid)}, inputs {shape}, batches of {self.batch_size}"
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
        """The layers that go forward twice."""
        steps, _ = self.graph.ends[self.sections[-1].first]
        return {id(step.layer) for step in self.graph.steps[:steps]}

    @property
    def _per_parameter(self) -> int:
        """Bytes of a trained number, its gradient, and what the optimiser keeps of it."""
        return self.itemsize * (2 + len(self.training.optimizer.slot_names))

    def _held_samples(self, replica: int) -> int:
        """Return how many of a rank's samples are in memory at once: a micro-batch, if none waits for another."""
        samples = self.samples(replica)
        over_batch = any(one.over_batch for plan in self for one in plan.reductions)
        return samples if over_batch else largest_of(micro_batches(samples, self.training.accumulate))


def compile_plan(
    chain: Sequential, input_shape: Shape, grid: GridShape, batch_size: int | None, training: Training
) -> Plan:
    """Return the plan of a chain of layers.

    Parameters
    ----------
    batch_size : int, optional
        Global; default: one sample for each replica, of which no planner of segments knows.

    Raises
    ------
    UserError
        A layer does not fit; the error names it, and carries it as `subject`.
    """
    graph = Lowering(chain.layers, input_shape).graph
    samples = None if batch_size is None else max(1, split(batch_size, grid.replicas, 0)[1])
    with _named(chain):
        regions = find_regions(chain, graph, grid, samples)
    plans = []
    for step in graph.steps:
        if (layer := step.layer) is not None:
            shapes, gradient = (graph.shapes[step.inputs[0]], graph.shapes[step.output]), 0 not in step.inputs
            tiles = regions.get(id(layer), (None, None))
            with _named(chain, layer):
                plans.append(LayerPlan(layer, *shapes, grid, tiles, gradient, graph.redistributions(step, gradient)))
    return Plan(graph, plans, grid, batch_size or grid.replicas, training)


@contextmanager
def _named(chain: Sequential, layer: Layer | None = None) -> Iterator[None]:
    """Put the layer that an error is about, by default its subject, in front of the message."""
    try:
        yield
    except UserError as error:
        about: Any = layer or error.subject
        if about is None:
            raise
        raise of_layer(error, next(i for i, node in enumerate(chain.layers) if about in node.leaves), about) from error


def micro_batches(samples: int, accumulate: int) -> list[tuple[int, int]]:
    """Return the ranges of a rank's samples that go through a training step one after the other."""
    count = max(1, min(accumulate, samples))
    return [split(samples, count, at) for at in range(count)]


def largest_of(batches: Sequence[tuple[int, int]]) -> int:
    """Return the samples of the largest micro-batch."""
    return max(hi - lo for lo, hi in batches)
