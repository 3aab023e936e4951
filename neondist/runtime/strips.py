"""A segment at work: to a task it is a layer, whose passes go through several layers a strip at a time."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, TypeAlias

from ..halo import GlobalArray
from ..layers import Context, Layer, StepContext
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

    saves_input, keeps_output, activation, splits_outputs = True, False, None, False
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
        for at, planned in segment.strips(context.grid.tile):
            placed = [planned.placed[id(layer)] for layer in self.leaves]
            inside = replace(context, grid=context.grid.of_strip(planned.grid, at))
            made = {id(layer): on_strip(layer, one, at, inside) for layer, one in zip(self.leaves, placed, strict=True)}
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


def on_strip(layer: Layer, placed: Any, strip: int, context: Context) -> Layer:
    """Return a layer of the same arrays, whose tile is that of a strip; of weights by cell, those of its cells.

    Parameters
    ----------
    placed : LayerPlan
    """
    made = copy.copy(layer)
    made.context, made.regions, made.gathers = context, placed.regions, None
    shape = context.batch_size, *layer.input_shape
    made.input = GlobalArray(
        context.grid, shape, layer.window, dtype=str(context.dtype), backend=context.backend, reuse=True
    )
    made.input.take(placed.view(strip))
    if layer.scatters is not None:
        made.scatters = GlobalArray(
            context.grid,
            (context.batch_size, *layer.output_shape),
            layer.scatters.window,
            dtype=str(context.dtype),
            backend=context.backend,
            reuse=True,
        )
        made.scatters.reverse = True
        made.scatters.take(placed.added_to(strip))
    made.ifmshape, made.ofmshape = made.input.local_shape[1:], (*made.tile.shape, made.output_shape[-1])
    cuts = {}
    for name, parameter in layer.parameters_for(layer.input_shape).items():
        if parameter.layout.cut:
            of, grid = (parameter.layout, parameter.shape), layer.context.grid
            whole = of[0].box(of[1], grid.shape, grid.tile)
            cells = of[0].box(of[1], context.grid.shape, strip).relative_to(whole).slices
            cuts[name] = whole.shape, cells, of[0].shape_on(of[1], context.grid.shape, strip)
    if cuts:
        parts = {name: _part(layer.params[name], cut) for name, cut in cuts.items()}
        made.params, made.grads = dict(layer.params) | parts, _StripGradients(layer.grads, cuts)
    made.adjust_for_tile()
    return made


class _StripGradients(dict[str, Any]):
    """Gradients by name: what is assigned is added to those of the layer, of weights by cell to those of a strip."""

    def __init__(self, whole: Any, cuts: dict[str, _Cut]) -> None:
        super().__init__(whole)
        self.whole, self.cuts = whole, cuts

    def __getitem__(self, name: str) -> Any:
        return 0.0  # for those who add to it: what is assigned is added already

    def __setitem__(self, name: str, values: Any) -> None:
        if name not in self.cuts:
            self.whole[name] = values
            return
        part = _part(self.whole[name], self.cuts[name])
        part += values


_Cut: TypeAlias = tuple[tuple[int, ...], Slices, tuple[int, ...]]
"""Of a rank's array: its shape with the axes of cells, where those of a strip are, and the shape of that part."""


def _part(array: Any, cut: _Cut) -> Any:
    """Return a strip's part of a rank's array: not a copy, because it has all cells along the other axes."""
    whole, cells, shape = cut
    return array.reshape(whole)[cells].reshape(shape)
