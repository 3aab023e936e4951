"""Execution of a segment as one layer that runs several layers strip by strip."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

from ..halo import GlobalArray
from ..layers import Layer, ModelContext, StepContext
from ..plan import Graph, PlannedSection
from ..plan.section import Segment
from .arena import BlockPool
from .layer_task import LayerTask
from .section import Section

Slices = tuple[slice, ...]


class SegmentExecutor:
    """Executor of the layers of a segment on this rank.

    Parameters
    ----------
    blocks : BlockPool
        Memory of a strip.
    """

    saves_input, must_keep_output, activation, splits_outputs = True, False, None, False
    gathered_gradient_array, scattered_output_array = None, None
    regions = (None, None)

    def __init__(self, segment: Segment, context: ModelContext, blocks: BlockPool) -> None:
        first_layer, last_layer = segment.plans[0].layer, segment.plans[-1].layer
        self.leaves, self.context, self.name = [plan.layer for plan in segment.plans], context, segment.name
        self.input, self.input_shape, self.kernels = first_layer.input, first_layer.input_shape, context.backend.kernels
        self.output_tile, self.output_shape = last_layer.output_tile, last_layer.output_shape
        self.params: dict[str, Any] = {}
        self.grads, self.state = self.params, self.params
        self.strips: list[tuple[Slices, Slices, Section]] = []
        for at, planned in segment.strips(context.grid.tile):
            view_cells = planned.placed[id(first_layer)].view(at).need.relative_to(self.input.need)
            tile_cells = planned.placed[id(last_layer)].tile(at).relative_to(self.output_tile)
            view_slices, tile_slices = (slice(None), *view_cells.slices), (slice(None), *tile_cells.slices)
            self.strips.append((view_slices, tile_slices, section_of_strip_or_block(planned, context, at, blocks)))

    def reductions_for(self, input_shape: tuple[int, ...]) -> list[Any]:
        """Return an empty list: no layer of a segment has reductions."""
        return []

    def forward(self, ctx: StepContext, view: Any) -> Any:
        """Return the outputs, computed strip by strip."""
        y = ctx.out
        for view_slices, tile_slices, section in self.strips:
            (strip_pass,) = section.forward([view[view_slices]], [ctx.phase])
            self.kernels.copy(strip_pass.output, y[tile_slices])
            strip_pass.close()
        ctx.save(view=view)
        return y

    def backward(self, ctx: StepContext, dy: Any) -> Any:
        """Run each strip forward again, then backward, and sum the gradients of cells that several strips share."""
        needs_dx = ctx.needs_input_gradient
        dview = ctx.out if needs_dx else None
        if dview is not None:
            dview[...] = 0
        for view_slices, tile_slices, section in self.strips:
            passes = section.forward([ctx.view[view_slices]], [ctx.phase], reduced=[[None] * len(section.tasks)])
            (view_gradient,) = section.backward(passes, [dy[tile_slices].copy()], need_dx=needs_dx)
            if dview is not None:
                dview[view_slices] += view_gradient
            passes[0].close()
        return dview


def section_of_strip_or_block(
    planned: PlannedSection,
    context: ModelContext,
    part_number: int,
    blocks: BlockPool,
    layer_task: Callable[[int, Graph, Layer], LayerTask] = LayerTask,
) -> Section:
    """Return the section of a strip or block; its layers share the arrays of the built layers."""
    context = replace(context, grid=context.grid.single_tile_grid(planned.grid, part_number))
    layers = [step.layer for step in planned.graph.steps if step.layer is not None]
    copies = {id(layer): layer_on_strip(layer, planned.placed[id(layer)], part_number, context) for layer in layers}
    return Section(planned, context, part_number, blocks, copies, layer_task)


def layer_on_strip(layer: Layer, layer_plan: Any, strip: int, context: ModelContext) -> Layer:
    """Return a copy of a layer for a strip, which shares the layer's arrays, or parts of partitioned arrays."""
    clone = copy.copy(layer)
    clone.context, clone.regions, clone.gathered_gradient_array = context, layer_plan.regions, None
    create_array = partial(GlobalArray, context.grid, dtype=str(context.dtype), backend=context.backend, reuse=True)
    clone.input = create_array((context.batch_size, *layer.input_shape), layer.window)
    clone.input.set_halo_plan(layer_plan.view(strip))
    if layer.scattered_output_array is not None:
        shape, window = (context.batch_size, *layer.output_shape), layer.scattered_output_array.window
        clone.scattered_output_array = create_array(shape, window)
        clone.scattered_output_array.swaps_directions = True
        clone.scattered_output_array.set_halo_plan(layer_plan.output_halo_plan(strip))
    clone.ifmshape, clone.ofmshape = clone.input.local_shape[1:], (*clone.output_tile.shape, clone.output_shape[-1])
    strip_parts = {}
    for name, parameter in layer.parameters_for(layer.input_shape).items():
        if parameter.layout.is_partitioned:
            layout, shape, grid = parameter.layout, parameter.shape, layer.context.grid
            tile_box = layout.box(shape, grid.shape, grid.tile)
            strip_slices = layout.box(shape, context.grid.shape, strip).relative_to(tile_box).slices
            strip_parts[name] = tile_box.shape, strip_slices, layout.shape_on(shape, context.grid.shape, strip)
    if strip_parts:
        strip_arrays = {name: _strip_part(layer.params[name], part) for name, part in strip_parts.items()}
        clone.params, clone.grads = dict(layer.params) | strip_arrays, _StripGradients(layer.grads, strip_parts)
    clone.prepare_for_tile()
    return clone


class _StripGradients(dict[str, Any]):
    """Gradients by name; assigned values are added to the layer's gradients (partitioned: to the strip's part)."""

    def __init__(self, whole: Any, strip_parts: dict[str, _StripPart]) -> None:
        super().__init__(whole)
        self.whole, self.strip_parts = whole, strip_parts

    @property
    def names_to_zero(self) -> set[str]:
        names: set[str] = self.whole.names_to_zero
        return names

    def __getitem__(self, name: str) -> Any:
        return 0.0  # __setitem__ adds

    def __setitem__(self, name: str, values: Any) -> None:
        if name not in self.strip_parts:
            self.whole[name] = values
            return
        part = _strip_part(self.whole[name], self.strip_parts[name])
        part += values


_StripPart: TypeAlias = tuple[tuple[int, ...], Slices, tuple[int, ...]]
"""Shape of a rank's array with the axes of cells, index of a strip's cells, and shape of the strip's part."""


def _strip_part(array: Any, part: _StripPart) -> Any:
    """Return a strip's part of a rank's array, as a view."""
    array_shape, part_slices, part_shape = part
    return array.reshape(array_shape)[part_slices].reshape(part_shape)
