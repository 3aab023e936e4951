"""Parameters, and the layouts of parameters and vectors over the ranks of a replica."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from ..errors import ConfigError
from ..geometry import Box, GridShape
from ..initializers import Constant, Initializer
from ..registry.arguments import check_fields

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Replicate:
    """Layout of an array replicated on every rank, with gradients summed over all ranks."""

    #: whether the parts of tiles differ; gradients are then summed over the replicas only
    is_partitioned = False

    @property
    def gradient_reduction_group(self) -> str:
        """The ranks over which gradients are summed, one of `comm.GROUP_NAMES`."""
        return "replicas" if self.is_partitioned else "world"

    def unflattened_shape(self, shape: Shape) -> Shape:
        """Return the shape to which an array is reshaped so that its parts are boxes."""
        return shape

    def box(self, shape: Shape, grid: GridShape, tile: int) -> Box:
        """Return the box of an unflattened array that the rank of a tile stores."""
        return Box.of(shape)

    def partitioned_extent(self, shape: Shape) -> Shape:
        """Return the extent of the image or vector along which an array is divided; () if it is not divided."""
        return ()

    def shape_on(self, shape: Shape, grid: GridShape, tile: int) -> Shape:
        """Return the shape of a tile's part of an array of this shape."""
        return self.box(shape, grid, tile).shape


@dataclass(frozen=True)
class Tiled(Replicate):
    """Layout of an array whose first `ndim` axes are the output's spatial axes: each rank stores its tile's part."""

    ndim: int
    is_partitioned = True

    def partitioned_extent(self, shape: Shape) -> Shape:
        """Return the output's extent."""
        return shape[: self.ndim]

    def box(self, shape: Shape, grid: GridShape, tile: int) -> Box:
        """Return the tile, with all of the other axes."""
        cells_box = grid.partition(self.partitioned_extent(shape)).box(tile)
        return Box((*cells_box.lo, *(0 for _ in shape[self.ndim :])), (*cells_box.hi, *shape[self.ndim :]))


@dataclass(frozen=True)
class Shard(Replicate):
    """Layout of an array whose first axis is the flattened input (*spatial, C): each rank stores the rows of its part.

    A rank's part of the input is its tile, or its range of a vector's features.
    """

    input_shape: Shape
    is_partitioned = True

    def partitioned_extent(self, shape: Shape) -> Shape:
        """Return the input's extent; for a vector, its features."""
        return self.input_shape[:-1] or self.input_shape

    def input_box(self, grid: GridShape, tile: int) -> Box:
        """Return a tile's own part of the input."""
        *extent, channels = self.input_shape
        cells = grid.partition(self.partitioned_extent(self.input_shape)).box(tile)
        return Box((*cells.lo, 0), (*cells.hi, channels)) if extent else cells

    def unflattened_shape(self, shape: Shape) -> Shape:
        """Return the shape with the input's axes instead of the flattened axis."""
        return *self.input_shape, *shape[1:]

    def box(self, shape: Shape, grid: GridShape, tile: int) -> Box:
        """Return the tile's inputs, with all of the other axes."""
        rows_box = self.input_box(grid, tile)
        return Box((*rows_box.lo, *(0 for _ in shape[1:])), (*rows_box.hi, *shape[1:]))

    def shape_on(self, shape: Shape, grid: GridShape, tile: int) -> Shape:
        """Return the shape of a tile's rows."""
        return self.input_box(grid, tile).size, *shape[1:]


@dataclass(frozen=True)
class OutputShard(Replicate):
    """Layout of an array whose last axis is the layer's outputs: each rank of a replica stores a range of outputs."""

    is_partitioned = True

    def partitioned_extent(self, shape: Shape) -> Shape:
        """Return the number of outputs."""
        return shape[-1:]

    def box(self, shape: Shape, grid: GridShape, tile: int) -> Box:
        """Return the range of outputs, with all of the other axes."""
        outputs_box = grid.partition(self.partitioned_extent(shape)).box(tile)
        return Box((*(0 for _ in shape[:-1]), *outputs_box.lo), (*shape[:-1], *outputs_box.hi))


@dataclass(frozen=True)
class Parameter:
    """Shape, initial values and layout of an array of a layer.

    `layout` determines the part that each rank stores: Replicate, the whole array; Tiled, the part of its output tile;
    Shard, the part that multiplies its input tile; OutputShard, the part for its range of outputs. Shapes, names and
    initial values of whole arrays do not depend on the layout. `decays` is whether weight decay applies without
    `decay_all`; None: if there are several axes, since biases and scales have one. `max_rows_per_sample` is the largest
    number of rows (first axis) that a sample changes; only nonzero rows of gradients are then sent. 0: dense gradients.
    """

    shape: Shape
    initializer: Initializer = field(default_factory=Constant)
    fan_in: int = 1
    fan_out: int = 1
    layout: Replicate = field(default_factory=Replicate)
    decays: bool | None = None
    max_rows_per_sample: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.shape, Sequence):
            object.__setattr__(self, "shape", tuple(self.shape))
        check_fields(self)

    def elements_on(self, grid: GridShape, tile: int) -> int:
        """Return the number of elements of the array that the rank of a tile stores."""
        return prod(self.layout.shape_on(self.shape, grid, tile))


def check_storable(field: str, name: str) -> None:
    """Raise ConfigError unless a name can be a part of a path in a checkpoint."""
    if "\0" in name or {"", "."} & set(name.split("/")):
        fault = "a null character, '.' or an empty part between slashes"
        raise ConfigError(f"{field}: {name!r} contains {fault}, which files cannot store; rename it")


def declared_with(instance: Any, attribute: str, method: str) -> Any:
    """Return a class attribute that is set in the class that defines a method; None if that class only inherits it."""
    cls = method_class(instance, method)
    return vars(cls).get(attribute)


def method_class(instance: Any, method: str) -> type:
    """Return the class that defines an instance's method."""
    return next(cls for cls in type(instance).__mro__ if method in vars(cls))
