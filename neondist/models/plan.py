"""What every layer of a model will look like on a grid: shapes, tiles and halos, from arithmetic alone."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from ..errors import UserError
from ..geometry import Box, GridShape, HaloPlan, Window
from ..layers import Layer

Shape = tuple[int, ...]


@dataclass(frozen=True)
class LayerPlan:
    """One layer on all tiles of a replica; shapes without the batch."""

    name: str
    cls: str
    input_shape: Shape
    output_shape: Shape
    window: Window | None
    parameters: int
    tiles: list[Box]
    """every tile's cells of the output"""
    views: list[Box]
    """every tile's view of the input"""
    sent_cells: list[int]
    """cells that each tile sends in fprop, for each sample and channel of the input"""
    received_cells: list[int]
    """cells that each tile receives in fprop, which are those it sends in bprop"""


def plan_layers(layers: list[Layer], input_shape: Shape, grid: GridShape) -> list[LayerPlan]:
    """Return the plan of each layer; an error names the layer and carries it as `subject`."""
    plans = []
    for index, layer in enumerate(layers):
        try:
            plans.append(_plan(layer, input_shape, grid))
        except UserError as error:
            raise of_layer(error, index, layer) from error
        input_shape = plans[-1].output_shape
    return plans


def of_layer(error: UserError, index: int, layer: Layer) -> UserError:
    """Return the error with the layer's place in front and the layer as `subject`."""
    named = type(error)(f"layer {index} '{layer.name}' ({type(layer).__name__}): {error}")
    named.subject = layer
    return named


def _plan(layer: Layer, input_shape: Shape, grid: GridShape) -> LayerPlan:
    window, output_shape = layer.window_for(input_shape), layer.output_shape_for(input_shape)
    source = grid.partition(input_shape[:-1])
    everywhere = Window(1, padding=0, ndim=len(source.extent))
    halos = [HaloPlan.of(source, window or everywhere, tile) for tile in range(grid.tiles)]
    return LayerPlan(
        name=str(layer.name),
        cls=type(layer).__name__,
        input_shape=input_shape,
        output_shape=output_shape,
        window=window,
        parameters=sum(prod(p.shape) for p in layer.parameters_for(input_shape).values()),
        tiles=grid.partition(output_shape[:-1]).boxes(),
        views=[halo.need for halo in halos],
        sent_cells=[halo.sent_cells for halo in halos],
        received_cells=[halo.received_cells for halo in halos],
    )
