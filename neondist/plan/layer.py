"""Plan of a layer on a grid: shapes, tiles and halos, from arithmetic only."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

from ..comm.facts import text_of
from ..errors import PlanError, ShapeError
from ..geometry import Box, GridShape, HaloPlan, Kinds, Level, Partition, Piece, Window
from ..halo import GlobalArray, Halo
from ..layers import Layer
from .classes import TileClasses, cells_kinds, classes_of
from .graph import Cut

Shape = tuple[int, ...]
_MOST = 1 << 48  # far beyond any machine; from there on products leave what an index can count


@dataclass(frozen=True)
class LayerCosts:
    """One layer (or several) in one training step.

    Attributes
    ----------
    sent_most, sent_all : bytes of halos, forward and backward, of the rank that sends most and of all ranks
    parameters : number of trained values
    memory : bytes that the fullest rank holds, kernels' scratch space not counted
    """

    sent_most: int = 0
    sent_all: int = 0
    parameters: int = 0
    memory: int = 0

    def __add__(self, other: LayerCosts) -> LayerCosts:
        """Add layer by layer; the ranks that send or hold most need not be the same, so the sum is an upper bound."""
        return LayerCosts(
            self.sent_most + other.sent_most,
            self.sent_all + other.sent_all,
            self.parameters + other.parameters,
            self.memory + other.memory,
        )


class Exchange(NamedTuple):
    """Cells that windows see of an array, whose other cells travel.

    Attributes
    ----------
    cells : Partition
    window : Window
    outputs : Partition or None
        Which outputs each tile computes; None: those of a cut like the input's.
    channels : int
    """

    cells: Partition
    window: Window
    outputs: Partition | None
    channels: int

    def plan(self, tile: int) -> HaloPlan:
        """Return the plan of a tile."""
        return HaloPlan.of(self.cells, self.window, tile, self.outputs)

    def kinds(self, level: Level = "all") -> Kinds:
        """Return what tells plans apart."""
        return HaloPlan.kinds(self.cells, self.window, self.outputs, level)


class LayerPlan:
    """One layer on all tiles of a replica; shapes without the batch.

    Facts about each tile are computed on demand.

    Parameters
    ----------
    layer : Layer
    input_shape, output_shape : tuple of int
        Global.
    grid : GridShape
    regions : pair of Partition or None
        Which cells of the input and of the output each tile has, where these are not the balanced ones.
    gradient : bool
        Whether the gradient of its input is needed in training: not that of the images.
    redistributions : list of Cut
        How vectors are redistributed for it; sums that become partitioned are not reduced as well.

    Attributes
    ----------
    name, cls : str
    window : Window or None
    scheme : Scheme
    reverse : bool
        Whether the halo adds in the forward pass and is fetched in the backward pass.
    trained : dict of name to Parameter
    parameters : int
        Trained numbers, on all tiles together.
    reductions : list of Reduction
        Those that other ranks have a part in.
    """

    def __init__(
        self,
        layer: Layer,
        input_shape: Shape,
        output_shape: Shape,
        grid: GridShape,
        regions: tuple[Partition | None, Partition | None] = (None, None),
        gradient: bool = True,
        redistributions: Sequence[Cut] = (),
    ) -> None:
        self.layer, self.name, self.cls = layer, str(layer.name), type(layer).__name__
        self.input_shape, self.output_shape, self.grid, self.regions = input_shape, output_shape, grid, regions
        self.gradient, self.redistributions = gradient, redistributions
        self.window, self.scheme = layer.window_for(input_shape), layer.scheme or Halo()
        self.reverse = layer.reverse_halos
        self.trained = layer.parameters_for(input_shape)
        self.parameters = sum(prod(p.shape) for p in self.trained.values())
        cut = {one.direction for one in redistributions if one.adds}
        self.reductions = [one for one in layer.reductions_for(input_shape) if one.group and one.direction not in cut]
        self._halos = layer.halos_for(input_shape, grid)
        gathers = layer.gathers_for(input_shape, grid)
        wide = layer.sees_reach and regions[1] is not None
        seen = layer.reach_for(input_shape) if wide else layer.view_window_for(input_shape, grid)
        self._view = self._over(input_shape, seen or Window.of_one(len(input_shape) - 1))
        inputs, outputs = regions
        adds = self.reverse and inputs is not None and outputs is not None
        self._added = Exchange(outputs, self._halos[0][1], inputs, 0) if adds and outputs is not None else None
        # strips and blocks keep what they add
        self._exchanges = [] if adds else [self._over(shape, window) for shape, window in self._halos]
        self._gathers = gathers and Exchange(grid.partition(gathers[0][:-1]), gathers[1], None, gathers[0][-1])
        largest = max(self.parameters, prod(output_shape), self.view(0).need.size * input_shape[-1])
        if largest > _MOST:
            raise ShapeError(f"would have {largest} elements, more than any machine can hold; make the layer smaller")

    def view(self, tile: int) -> HaloPlan:
        """Return which cells of the input a tile's rank has, and sees."""
        return self._view.plan(tile)

    def added_to(self, tile: int) -> HaloPlan | None:
        """Return which cells of the output a tile's rank adds to, and its own, where the halo adds; else None."""
        return None if self._added is None else self._added.plan(tile)

    def tile(self, tile: int) -> Box:
        """Return a tile's cells of the output."""
        return self.outputs.box(tile)

    def outline(self) -> str:
        """Return what all ranks must agree on."""
        cells = "\n".join(map(repr, (self.tiles, self.views, self.halo_cells)))
        cut = hashlib.sha256(cells.encode()).hexdigest()[:8]
        shapes = f"{self.input_shape} -> {self.output_shape}, {self.window}, tiles {cut}"
        return f"'{self.name}': {self.cls} {shapes}, {text_of(self.layer.arguments())}"

    def check_arrays(self, arrays: Sequence[GlobalArray], tile: int) -> None:
        """Raise PlanError if the arrays of the built layer would send other cells than the plan says."""
        declared = [
            (shape, self.added_to(tile) or HaloPlan.of(self._inputs(shape), window, tile, self.regions[1]))
            for shape, window in self._halos
        ]
        if self._gathers is not None:
            declared.append(((self._gathers.channels,), self._gathers.plan(tile)))
        planned = sorted(piece.source.size * shape[-1] for shape, plan in declared for piece in plan.sends)
        made = sorted(piece.source.size * array.channels for array in arrays for piece in array.plan.sends)
        if made != planned:
            raise PlanError(
                f"layer '{self.name}' ({self.cls}): its arrays send messages of {made} elements per sample, but"
                f" halos_for and gathers_for declare {planned}; declare every array that make_array returns"
            )

    def products(self, tile: int) -> int:
        """Return the multiplications of a sample's forward pass that a tile takes: of its own cells, or weights."""
        weights = self.trained.get("weights")
        if weights is None:
            return 0
        if weights.layout.cut:
            return weights.size_on(self.grid, tile)
        box = self.view(tile).own if self.reverse else self.tile(tile)
        return box.size * prod(weights.shape)

    def held_by(self, tile: int) -> int:
        """Return the trained numbers that a tile's rank keeps: all of them, or those of its tile."""
        return sum(p.size_on(self.grid, tile) for p in self.trained.values())

    def kinds(self, level: Level) -> list[Kinds]:
        """Return what tells tiles apart: their messages and parameters; or the extents of arrays; or all but places."""
        arrays = [self._view, *filter(None, [self._added])] if level != "messages" else []
        arrays += [*self._exchanges, *filter(None, [self._gathers])] if level != "extents" else []
        extents = [extent for one in self.trained.values() if (extent := one.layout.cut_extent(one.shape))]
        cells = [self.outputs, *map(self.grid.partition, extents)]
        return [*(one.kinds(level) for one in arrays), *map(cells_kinds, cells)]

    @cached_property
    def classes(self) -> TileClasses:
        """The tiles that differ in their messages, or in what they keep of parameters."""
        return classes_of(self.grid.tiles, self.kinds("messages"))

    @cached_property
    def held(self) -> list[int]:
        """Results of `held_by` for every tile."""
        return self.classes.each(self.held_by)

    @property
    def outputs(self) -> Partition:
        """The cut of the output."""
        return self.regions[1] or self.grid.partition(self.output_shape[:-1])

    @cached_property
    def tiles(self) -> list[Box]:
        """Every tile's cells of the output."""
        return self.outputs.boxes()

    @cached_property
    def views(self) -> list[Box]:
        """Every tile's view of the input."""
        return [self.view(tile).need for tile in range(self.grid.tiles)]

    @property
    def unlike(self) -> list[int]:
        """Tiles in which there are all extents of views along each axis, and of outputs."""
        return sorted({*self._view.kinds("extents").cross, *cells_kinds(self.outputs).cross})

    @cached_property
    def largest_view(self) -> int:
        """The most cells of an array that holds both a tile's view and the tile itself."""
        return prod(map(max, zip(*(self.view(tile).buffer.shape for tile in self.unlike), strict=True)))

    @cached_property
    def halo_cells(self) -> list[int]:
        """Cells that each tile receives in a forward pass, channels not counted."""
        return self.classes.each(lambda tile: sum(one.plan(tile).halo_volume for one in self._exchanges))

    def messages(self, tile: int) -> tuple[list[int], list[int]]:
        """Return the numbers of a sample in each message that a tile sends in an exact forward and backward pass."""
        there, back = self._there_of(tile), self._back_of(tile)
        return (back, there) if self.reverse else (there, back)

    @property
    def forward(self) -> list[list[int]]:
        """For each tile, how many numbers of a sample each message holds that it sends in an exact forward pass."""
        return self._back if self.reverse else self._there

    @property
    def backward(self) -> list[list[int]]:
        """The same for the backward pass."""
        return self._there if self.reverse else self._back

    @property
    def sent_words(self) -> list[int]:
        """Numbers of a sample that each tile sends in an exact forward pass."""
        return [sum(messages) for messages in self.forward]

    @property
    def received_words(self) -> list[int]:
        """Numbers of a sample that each tile receives in it, which are those that it sends in the backward pass."""
        return [sum(messages) for messages in self.backward]

    def sent_bytes(self, samples: int, itemsize: int, gradient: bool = True, forwards: int = 1) -> list[float]:
        """Return the bytes of halos that each tile sends in a training step; the arguments are those of `sent_by`."""
        return self.classes.each(lambda tile: self.sent_by(tile, samples, itemsize, gradient, forwards))

    def sent_by(self, tile: int, samples: int, itemsize: int, gradient: bool = True, forwards: int = 1) -> float:
        """Return the bytes of halos that a tile sends in a training step, by its scheme's formula.

        Parameters
        ----------
        samples : int
            Of one replica.
        gradient : bool
            Whether that of the layer's input is needed.
        forwards : int
            How often the layer goes forward.
        """
        there, back = ([n * samples for n in messages] for messages in self.messages(tile))
        needed = gradient or self.reverse  # a transposed convolution's weights need its neighbours' gradients
        returns = self.scheme.mean_bytes(back, itemsize, "backward") if needed else 0
        return forwards * self.scheme.mean_bytes(there, itemsize, "forward") + returns

    def reduced_bytes(self, samples: int, itemsize: int, ranks: dict[str, int], calls: int = 1) -> int:
        """Return the bytes of the arrays that a rank gives into the layer's reductions in a training step.

        Parameters
        ----------
        ranks : dict of group to int
            How many ranks are in each.
        calls : int
            In how many micro-batches the samples come.
        """
        return sum(
            (one.each * samples + one.once * (1 if one.over_batch else calls)) * itemsize
            for one in self.reductions
            if one.group and ranks[one.group] > 1 and (one.direction == "forward" or self.gradient)
        )

    @cached_property
    def _there(self) -> list[list[int]]:
        return self.classes.each(self._there_of)

    @cached_property
    def _back(self) -> list[list[int]]:
        return self.classes.each(self._back_of)

    def _there_of(self, tile: int) -> list[int]:
        """Return what a tile sends to those that see its cells."""
        return _numbers((one.plan(tile).sends, one.channels) for one in self._exchanges)

    def _back_of(self, tile: int) -> list[int]:
        """Return what a tile sends the other way: gradients of the cells that it sees, or those of its outputs."""
        if self._gathers is not None:
            return _numbers([(self._gathers.plan(tile).sends, self._gathers.channels)])
        return _numbers((one.plan(tile).receives, one.channels) for one in self._exchanges)

    def _inputs(self, shape: Shape) -> Partition:
        return self.regions[0] or self.grid.partition(shape[:-1])

    def _over(self, shape: Shape, window: Window) -> Exchange:
        outputs = None if self.reverse else self.regions[1]  # in reverse it sees its tile alone
        return Exchange(self._inputs(shape), window, outputs, shape[-1])


def _numbers(halos: Iterable[tuple[Iterable[Piece], int]]) -> list[int]:
    """Return the numbers of each message, given pieces and their channels."""
    return [piece.source.size * channels for pieces, channels in halos for piece in pieces]
