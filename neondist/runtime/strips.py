"""A segment at work: to a task it is a layer, whose passes go through several layers a strip at a time."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from ..comm import ProcessGrid
from ..geometry import Overlapping
from ..halo import GlobalArray
from ..layers import Context, Layer, StepContext
from ..plan import LayerPlan
from ..plan.section import Segment
from .arena import Blocks
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
        self.strips: list[tuple[tuple[Slices, Slices], Section]] = []
        inside = replace(context, grid=ProcessGrid.serial())
        for at, planned in segment.strips(context.grid.tile):
            placed = [planned.placed[id(layer)] for layer in self.leaves]
            made = {
                id(layer): _on_strip(layer, one, at, inside) for layer, one in zip(self.leaves, placed, strict=True)
            }
            seen = placed[0].view(at).need.relative_to(self.input.need)
            cells = placed[-1].tile(at).relative_to(self.tile)
            where = (slice(None), *seen.slices), (slice(None), *cells.slices)
            self.strips.append((where, Section(planned, inside, at, blocks, made)))

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


def _on_strip(layer: Layer, placed: LayerPlan | Segment, strip: int, context: Context) -> Layer:
    """Return a layer of the same arrays, whose tile is that of a strip."""
    made, cells = copy.copy(layer), placed.tile(strip)
    made.context = context
    made.regions = None, Overlapping.one(made.output_shape[:-1], cells)
    shape = context.batch_size, *layer.input_shape
    made.input = GlobalArray(
        context.grid, shape, layer.window, dtype=str(context.dtype), backend=context.backend, reuse=True
    )
    made.input.take(placed.view(strip))
    made.ifmshape, made.ofmshape = made.input.local_shape[1:], (*cells.shape, made.output_shape[-1])
    return made
