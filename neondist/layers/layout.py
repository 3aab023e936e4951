"""Parameters, and which part of one, or of a vector, each rank of a replica keeps."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Any

from ..geometry import Box, GridShape
from ..initializers import Constant, Initializer

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Replicate:
    """Layout of an array replicated on every rank, with gradients summed over all ranks."""

    #: whether the tiles' parts differ; gradients are then summed over the replicas alone
    cut = False

    @property
    def group(self) -> str:
        """The ranks over which gradients are summed, one of `comm.GROUPS`."""
        return "replicas" if self.cut else "world"

    def unfolded(self, shape: Shape) -> Shape:
        """Return the shape, of as many numbers in the same order, in which parts of an array are boxes."""
        return shape

    def box(self, shape: Shape, grid: GridShape, tile: int) -> Box:
        """Return what of an unfolded array the rank of a tile keeps."""
        return Box.of(shape)

    def cut_extent(self, shape: Shape) -> Shape:
        """Return the extent of the image, or the vector, along which an array is cut; of one that is not, ()."""
        return ()

    def shape_on(self, shape: Shape, grid: GridShape, tile: int) -> Shape:
        """Return the shape of a tile's part of an array of this shape."""
        return self.box(shape, grid, tile).shape


@dataclass(frozen=True)
class Tiled(Replicate):
    """Layout of an array whose first `ndim` axes are the output's spatial axes: each rank stores its tile."""

    ndim: int
    cut = True

    def cut_extent(self, shape: Shape) -> Shape:
        """Return the output's extent."""
        return shape[: self.ndim]

    def box(self, shape: Shape, grid: GridShape, tile: int) -> Box:
        """Return the tile, with all of the other axes."""
        cells = grid.partition(self.cut_extent(shape)).box(tile)
        return Box((*cells.lo, *(0 for _ in shape[self.ndim :])), (*cells.hi, *shape[self.ndim :]))


@dataclass(frozen=True)
class Shard(Replicate):
    """Layout of an array whose first axis is the flattened input (*spatial, C): each rank stores its input's rows.

    The input of a rank is its tile, or its range of a vector's features.
    """

    input_shape: Shape
    cut = True

    def cut_extent(self, shape: Shape) -> Shape:
        """Return the input's extent; of a vector, its features."""
        return self.input_shape[:-1] or self.input_shape

    def inputs(self, grid: GridShape, tile: int) -> Box:
        """Return a tile's own part of the input."""
        *extent, channels = self.input_shape
        cells = grid.partition(self.cut_extent(self.input_shape)).box(tile)
        return Box((*cells.lo, 0), (*cells.hi, channels)) if extent else cells

    def unfolded(self, shape: Shape) -> Shape:
        """Return the shape with the input's axes as they are."""
        return *self.input_shape, *shape[1:]

    def box(self, shape: Shape, grid: GridShape, tile: int) -> Box:
        """Return the tile's inputs, with all of the other axes."""
        mine = self.inputs(grid, tile)
        return Box((*mine.lo, *(0 for _ in shape[1:])), (*mine.hi, *shape[1:]))

    def shape_on(self, shape: Shape, grid: GridShape, tile: int) -> Shape:
        """Return the shape of a tile's rows."""
        return self.inputs(grid, tile).size, *shape[1:]


@dataclass(frozen=True)
class OutputShard(Replicate):
    """The last axis is the layer's outputs, and each rank of a replica keeps its range of these."""

    cut = True

    def cut_extent(self, shape: Shape) -> Shape:
        """Return the outputs."""
        return shape[-1:]

    def box(self, shape: Shape, grid: GridShape, tile: int) -> Box:
        """Return the range of outputs, with all of the other axes."""
        mine = grid.partition(self.cut_extent(shape)).box(tile)
        return Box((*(0 for _ in shape[:-1]), *mine.lo), (*shape[:-1], *mine.hi))


@dataclass(frozen=True)
class Parameter:
    """Shape, initial values and layout of an array of a layer.

    `layout` says which part each rank keeps: Replicate, all of it; Tiled, what belongs to its own output tile; Shard,
    what multiplies its own input tile; OutputShard, what gives its own range of outputs. Shapes, names and first values
    of whole arrays are the same with any. `decays` says whether it is more than a bias, or a scale of a norm, which
    weight decay may leave alone; None: if it has several axes. `sparse` says how many of its rows (first axis) a sample
    changes at most, where these are few: rows of gradients that are not 0 travel with their ids; 0: it is dense.
    """

    shape: Shape
    initializer: Initializer = field(default_factory=Constant)
    fan_in: int = 1
    fan_out: int = 1
    layout: Replicate = field(default_factory=Replicate)
    decays: bool | None = None
    sparse: int = 0

    def size_on(self, grid: GridShape, tile: int) -> int:
        """Return how many of its numbers the rank of a tile keeps."""
        return prod(self.layout.shape_on(self.shape, grid, tile))


def declared_with(thing: Any, name: str, method: str) -> Any:
    """Return what the class says of itself that has the method; what it inherits was said of another method."""
    found = next(vars(cls) for cls in type(thing).__mro__ if method in vars(cls))
    return found.get(name)
