"""A segment at work: to a task it is a layer, whose passes go through several layers a strip at a time."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..comm import ProcessGrid
from ..geometry import Overlapping
from ..halo import GlobalArray
from ..plan.section import PlannedSection
from ..plan.strips import Segment, StripOfLayer
from .arena import Blocks

if TYPE_CHECKING:
    from ..layers import Context, Layer, StepContext
    from .section import Section

Slices = tuple[slice, ...]


class Strips:
    """The layers of a segment on this rank.

    Parameters
    ----------
    segment : Segment
    context : Context
    blocks : Blocks
        The memory of a strip.
    section : type
        What runs a strip.
    """

    saves_input, keeps_output, activation = True, False, None
    gathers, scatters = None, None
    regions = (None, None)

    def __init__(self, segment: Segment, context: Context, blocks: Blocks, section: type[Section]) -> None:
        first, last = segment.plans[0].layer, segment.plans[-1].layer
        self.layers, self.context, self.name = [plan.layer for plan in segment.plans], context, segment.name
        self.input, self.input_shape, self.kernels = first.input, first.input_shape, context.backend.kernels
        self.tile, self.output_shape = last.tile, last.output_shape
        self.params: dict[str, Any] = {}
        self.grads, self.state = self.params, self.params
        inside = replace(context, grid=ProcessGrid.serial())
        self.strips = [
            (self._where(strip), section(self._on_layers(strip, inside), inside, blocks, blocks))
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
        first, last = (strip.placed[id(layer)] for layer in (self.layers[0], self.layers[-1]))
        seen, cells = first.view(0).need.relative_to(self.input.need), last.tile(0).relative_to(self.tile)
        return (slice(None), *seen.slices), (slice(None), *cells.slices)

    def _on_layers(self, strip: PlannedSection, context: Context) -> PlannedSection:
        """Return what is planned for a strip, with layers that have its shapes."""
        made = {id(layer): _on_strip(layer, strip.placed[id(layer)], context) for layer in self.layers}  # type: ignore[arg-type]
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
