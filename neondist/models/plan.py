"""What every layer of a model will look like on a grid: shapes, tiles and halos, from arithmetic alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from ..errors import ShapeError, UserError
from ..geometry import Box, GridShape, HaloPlan, Partition, Window, split
from ..halo import ExchangePolicy, Halo
from ..layers import Layer, Node, Reduction, Sequential
from .runs import Found, find_regions

Shape = tuple[int, ...]
_MOST = 1 << 48  # far beyond any machine; from there on products leave what an index can count


@dataclass(frozen=True)
class LayerPlan:
    """One layer on all tiles of a replica; shapes without the batch."""

    name: str
    cls: str
    input_shape: Shape
    output_shape: Shape
    window: Window | None
    parameters: int
    held: list[int]
    """trained numbers that each tile's rank keeps: all of them, or those of its tile"""
    tiles: list[Box]
    """every tile's cells of the output"""
    views: list[Box]
    """every tile's view of the input"""
    kept: list[Box]
    """the box of the array that holds both a tile's view and the tile itself"""
    windows: list[bool]
    """whether a tile's view is more than the tile itself"""
    halo_cells: list[int]
    """cells that each tile receives in fprop, channels not counted"""
    forward: list[list[int]]
    """for each tile, how many numbers of a sample each of its messages holds in an exact fprop"""
    backward: list[list[int]]
    """the same for bprop"""
    scheme: ExchangePolicy
    reverse: bool
    """whether the halo adds in fprop and is fetched in bprop"""
    sums: list[Reduction]

    @property
    def sent_words(self) -> list[int]:
        """Numbers that each tile sends in an exact fprop for each sample, channels counted."""
        return [sum(messages) for messages in self.forward]

    @property
    def received_words(self) -> list[int]:
        """Numbers that each tile receives in an exact fprop, which are those it sends in bprop."""
        return [sum(messages) for messages in self.backward]


class ModelPlan(list[LayerPlan]):
    """The plans of all single layers, in order.

    Attributes
    ----------
    input_shape, output_shape : tuple of int
        Those of the model, without the batch; its first or last node may be a container.
    """

    input_shape: Shape
    output_shape: Shape


def plan_layers(nodes: Sequence[Node], input_shape: Shape, grid: GridShape, batch_size: int | None = None) -> ModelPlan:
    """Return the plan of each single layer; an error names the layer and carries it as `subject`."""
    plans = ModelPlan()
    plans.input_shape = input_shape
    _refuse_vectors(nodes, input_shape)
    regions = _regions(nodes, input_shape, grid, share(batch_size, grid))
    for index, node in enumerate(nodes):
        about: Node = node
        try:
            for layer, shape in node.walk(input_shape):
                about = layer
                plans.append(_plan(layer, shape, grid, *regions.get(id(layer), (None, None))))
                about = node
            input_shape = node.output_shape_for(input_shape)
        except UserError as error:
            raise of_layer(error, index, about) from error
    plans.output_shape = input_shape
    return plans


def _refuse_vectors(nodes: Sequence[Node], input_shape: Shape) -> None:
    """Raise ShapeError where a layer that looks at neighbours is to see a vector."""
    for index, node in enumerate(nodes):
        try:
            for layer, shape in node.walk(input_shape):
                if len(shape) < 2 and (layer.needs_image or layer.window is not None):
                    what = f"needs an image, but its input is a vector, of shape {shape}"
                    remedy = "put it before the layer that makes vectors: fully connected, or global pooling"
                    raise of_layer(ShapeError(f"{what}; {remedy}"), index, layer)
            input_shape = node.output_shape_for(input_shape)
        except UserError as error:
            if getattr(error, "subject", None) is None:
                return  # of another mistake, which the plan tells
            raise


def of_layer(error: UserError, index: int, layer: Node) -> UserError:
    """Return the error with the layer's place in front and the layer as `subject`."""
    named = type(error)(f"layer {index} '{layer.name}' ({type(layer).__name__}): {error}")
    named.subject = layer
    return named


def share(batch_size: int | None, grid: GridShape) -> int | None:
    """Return the samples of the fullest replica, if those of the batch are known."""
    return None if batch_size is None else max(1, split(batch_size, grid.replicas, 0)[1])


def _regions(nodes: Sequence[Node], input_shape: Shape, grid: GridShape, samples: int | None) -> Found:
    try:
        return find_regions(Sequential(nodes), input_shape, grid, samples)
    except UserError as error:
        layer = getattr(error, "subject", None)
        if layer is None:  # a layer that does not fit, which the plan finds too, and names
            return {}
        raise of_layer(error, next(i for i, node in enumerate(nodes) if layer in node.leaves), layer) from error


def _plan(
    layer: Layer, input_shape: Shape, grid: GridShape, inputs: Partition | None, outputs: Partition | None
) -> LayerPlan:
    window, output_shape = layer.window_for(input_shape), layer.output_shape_for(input_shape)
    tiles = range(grid.tiles)
    parameters = layer.parameters_for(input_shape).values()
    everywhere = Window(1, padding=0, ndim=len(input_shape) - 1)
    gathers = layer.gathers_for(input_shape, grid)
    halos = [
        (_halos(shape, seen, grid, inputs, outputs), shape[-1]) for shape, seen in layer.halos_for(input_shape, grid)
    ]
    out, home = (
        [[piece.source.size * channels for plans, channels in halos for piece in pieces(plans[t])] for t in tiles]
        for pieces in (lambda plan: plan.sends, lambda plan: plan.receives)
    )
    count = sum(prod(p.shape) for p in parameters)
    around = _halos(input_shape, layer.view_window_for(input_shape, grid) or everywhere, grid, inputs, outputs)
    views = [halo.need for halo in around]
    largest = max(count, prod(output_shape), *(view.size * input_shape[-1] for view in views))
    if largest > _MOST:
        raise ShapeError(f"would have {largest} numbers, more than any machine can hold; make the layer smaller")
    if gathers is not None:
        shape, seen = gathers
        home = [[piece.source.size * shape[-1] for piece in plan.sends] for plan in _halos(shape, seen, grid)]
    return LayerPlan(
        name=str(layer.name),
        cls=type(layer).__name__,
        input_shape=input_shape,
        output_shape=output_shape,
        window=window,
        parameters=count,
        held=[sum(p.size_on(grid, tile) for p in parameters) for tile in tiles],
        tiles=(outputs or grid.partition(output_shape[:-1])).boxes(),
        views=views,
        kept=[halo.buffer for halo in around],
        windows=[not halo.trivial for halo in around],
        halo_cells=[sum(plans[tile].received_cells for plans, _ in halos) for tile in tiles],
        forward=out if not layer.reverse_halos else home,
        backward=home if not layer.reverse_halos else out,
        scheme=layer.scheme or Halo(),
        reverse=layer.reverse_halos,
        sums=[one for one in layer.reductions_for(input_shape) if one.group],
    )


def _halos(
    shape: Shape, window: Window, grid: GridShape, inputs: Partition | None = None, outputs: Partition | None = None
) -> list[HaloPlan]:
    return _plans(inputs or grid.partition(shape[:-1]), window, grid.tiles, outputs)


@lru_cache(maxsize=64)  # virtual ranks, and every look at the same model, ask for the same
def _plans(tiles: Partition, window: Window, count: int, outputs: Partition | None) -> list[HaloPlan]:
    return [HaloPlan.of(tiles, window, tile, outputs) for tile in range(count)]
