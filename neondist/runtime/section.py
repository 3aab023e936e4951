"""A section of a network: its steps in their order, and the memory of its passes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ..comm import ProcessGrid
from ..errors import PassError
from ..geometry import Overlapping
from ..halo import GlobalArray, Phase
from ..layers import Context, Layer, StepContext
from ..plan import Graph, PlannedSection, Step
from ..plan.strips import NOWHERE, Segment, StripOfLayer
from .arena import Arena, Blocks
from .tasks import JoinTask, LayerTask, Task
from .workspace import SectionPass, Workspace


class Section:
    """Some nodes of a network, one after the other, on this rank: their steps, and the memory and state of passes.

    Parameters
    ----------
    planned : PlannedSection
        Of built layers.
    context : Context
    blocks : Blocks
        The memory that it shares with other sections.
    strips : Blocks
        The memory that all strips share: one is executed at a time.
    layer_task : type
        What runs a layer's step.
    """

    def __init__(
        self,
        planned: PlannedSection,
        context: Context,
        blocks: Blocks,
        strips: Blocks,
        layer_task: Callable[[int, Step, Layer, Graph], Task] = LayerTask,
    ) -> None:
        self.graph, self.context, self.blocks = planned.graph, context, blocks
        self.first, self.last = planned.first, planned.last
        self.tasks: list[Task] = []
        self.layers: list[list[Layer]] = []
        self._inputs: list[GlobalArray | None] = []
        for at, step in enumerate(self.graph.steps):
            if step.join is not None:
                channels = [self.graph.shapes[value][-1] for value in step.inputs]
                self.tasks.append(JoinTask(at, step, step.join, channels, context.backend.kernels))
                self.layers.append([])
                self._inputs.append(None)
                continue
            segment = planned.segments.get(id(step.layer))
            layer: Any = step.layer if segment is None else Strips(segment, context, strips)
            self.tasks.append(layer_task(at, step, layer, self.graph))
            self.layers.append(layer.leaves)
            self._inputs.append(layer.input)
        tile = context.grid.tile
        self.shapes, self.plan = planned.tile_shapes(tile), planned.live_ranges(tile)
        blocks.provide(self.plan.length)
        self.workspaces: dict[int, Workspace] = {}
        self._last_reader = [max(readers, default=-1) for readers in self.graph.readers]

    def workspace(self) -> Workspace:
        """Return memory for a pass that nobody uses."""
        number = self.blocks.take()
        if number not in self.workspaces:
            arena = Arena(self.plan, self.blocks, number)
            self.workspaces[number] = Workspace(arena, self.shapes, self._inputs)
        return self.workspaces[number]

    def forward(
        self, xs: Sequence[Any], phases: Sequence[Phase], nodes: int | None = None, given: Sequence[Any] | None = None
    ) -> list[SectionPass]:
        """Return passes that take each step together, through the first so many nodes (default: all)."""
        nodes = self.last - self.first if nodes is None else nodes
        again = [None] * len(xs) if given is None else given
        end = steps, last = self.graph.ends[nodes]
        if end == NOWHERE:
            raise PassError("a pass cannot end between layers that are executed in strips; leave out strips")
        runs = [
            SectionPass(self.workspace(), phase, len(x), end, g) for x, phase, g in zip(xs, phases, again, strict=True)
        ]
        values: list[dict[int, Any]] = [{0: x} for x in xs]
        for task in self.tasks[:steps]:
            found = task.forward(runs, [[held[value] for value in task.inputs] for held in values])
            for held, y in zip(values, found, strict=True):
                for value in task.inputs:
                    if self._last_reader[value] == task.at and value != last:
                        held.pop(value, None)
                held[task.output] = y
        for run, held in zip(runs, values, strict=True):
            run.output = self.tasks[steps - 1].whole(held[last]) if steps else held[last]
        return runs

    def backward(
        self,
        runs: Sequence[SectionPass],
        dys: Sequence[Any],
        first: int = 0,
        wanted: bool = True,
        done: Callable[[Layer], None] | None = None,
    ) -> list[Any]:
        """Return the gradient of the input of each pass, given that of its output; fill in the layers' grads.

        Parameters
        ----------
        first : int
            Go back no further than to the node of this number, whose input then stands for the section's.
        wanted : bool
            False: nobody needs the gradient of the input.
        done : callable, optional
            Is called for each layer when its gradients are complete.
        """
        stop, value = self.graph.ends[first]
        end = runs[0].steps
        gradients = [
            {run.value: self.tasks[end - 1].part(dy) if end else dy} for run, dy in zip(runs, dys, strict=True)
        ]
        for task in reversed(self.tasks[stop:end]):
            needed = [wanted or v != value for v in task.inputs]
            found = task.backward(runs, [held.pop(task.output) for held in gradients], needed)
            for run, held, dxs in zip(runs, gradients, found, strict=True):
                for v, dx, need in zip(task.inputs, dxs, needed, strict=True):
                    if need:
                        self._add(run, held, v, dx)
                run.contexts[task.at] = None
            if done is not None:
                for layer in self.layers[task.at]:
                    done(layer)
        return [held.get(value) if wanted else None for held in gradients]

    def _add(self, run: SectionPass, gradients: dict[int, Any], value: int, dx: Any) -> None:
        if len(self.graph.readers[value]) == 1:
            gradients[value] = dx
        elif value in gradients:
            gradients[value] += dx
        else:
            total = gradients[value] = run.workspace.sum_place(value, run.samples)
            self.context.backend.kernels.copy(dx, total)


Slices = tuple[slice, ...]


class Strips:
    """The layers of a segment on this rank.

    Parameters
    ----------
    segment : Segment
    context : Context
    blocks : Blocks
        The memory of a strip.
    """

    saves_input, keeps_output, activation = True, False, None
    gathers, scatters = None, None
    regions = (None, None)

    def __init__(self, segment: Segment, context: Context, blocks: Blocks) -> None:
        first, last = segment.plans[0].layer, segment.plans[-1].layer
        self.leaves, self.context, self.name = [plan.layer for plan in segment.plans], context, segment.name
        self.input, self.input_shape, self.kernels = first.input, first.input_shape, context.backend.kernels
        self.tile, self.output_shape = last.tile, last.output_shape
        self.params: dict[str, Any] = {}
        self.grads, self.state = self.params, self.params
        inside = replace(context, grid=ProcessGrid.serial())
        self.strips = [
            (self._where(strip), Section(self._on_layers(strip, inside), inside, blocks, blocks))
            for strip in segment.strips(context.grid.tile)
        ]

    def reductions_for(self, input_shape: tuple[int, ...]) -> list[Any]:
        """Return nothing: no layer of a segment reduces."""
        return []

    def forward(self, ctx: StepContext, view: Any) -> Any:
        """Return the outputs, strip after strip."""
        y = ctx.out
        for (seen, cells), section in self.strips:
            (run,) = section.forward([view[seen]], [ctx.phase])
            self.kernels.copy(run.output, y[cells])
            run.close()
        ctx.save(view=view)
        return y

    def backward(self, ctx: StepContext, dy: Any) -> Any:
        """Take each strip forward again, and back; what strips share of the view is added."""
        wanted = ctx.needs_input_gradient
        dview = ctx.out if wanted else None
        if dview is not None:
            dview[...] = 0
        for (seen, cells), section in self.strips:
            runs = section.forward([ctx.view[seen]], [ctx.phase], given=[[None] * len(section.tasks)])
            (found,) = section.backward(runs, [dy[cells].copy()], wanted=wanted)
            if dview is not None:
                dview[seen] += found
            runs[0].close()
        return dview

    def _where(self, strip: PlannedSection) -> tuple[Slices, Slices]:
        """Return where a strip's view lies in that of the tile, and its outputs among those of the tile."""
        first, last = (strip.placed[id(layer)] for layer in (self.leaves[0], self.leaves[-1]))
        seen, cells = first.view(0).need.relative_to(self.input.need), last.tile(0).relative_to(self.tile)
        return (slice(None), *seen.slices), (slice(None), *cells.slices)

    def _on_layers(self, strip: PlannedSection, context: Context) -> PlannedSection:
        """Return what is planned for a strip, with layers that have its shapes."""
        made = {id(layer): _on_strip(layer, strip.placed[id(layer)], context) for layer in self.leaves}  # type: ignore[arg-type]
        steps = [step._replace(layer=made[id(step.layer)]) for step in strip.graph.steps]
        graph = copy.copy(strip.graph)
        graph.steps = steps
        placed = {id(made[key]): one for key, one in strip.placed.items()}
        return replace(strip, graph=graph, placed=placed)


def _on_strip(layer: Layer, at: StripOfLayer, context: Context) -> Layer:
    """Return a layer of the same arrays, whose tile is that of a strip."""
    made = copy.copy(layer)
    made.context = context
    made.regions = None, Overlapping.one(made.output_shape[:-1], at.box)
    shape = context.batch_size, *layer.input_shape
    made.input = GlobalArray(context.grid, shape, layer.window, str(context.dtype), context.backend, reuse=True)
    made.input.take(at.seen)
    made.ifmshape, made.ofmshape = made.input.local_shape[1:], (*at.box.shape, made.output_shape[-1])
    return made
