"""Plan of a layer on a grid: shapes, tiles and halos, computed without MPI."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

from ..comm.argument_text import format_arguments
from ..errors import PlanMismatchError, ShapeError
from ..geometry import Box, GridShape, HaloPlan, KeyDetail, PartClassKeys, Partition, Piece, Window
from ..halo import GlobalArray, Halo
from ..layers import Layer, Reduction
from .classes import TileClasses, part_class_keys, tile_classes
from .graph import VectorRedistribution

Shape = tuple[int, ...]
_MAX_ARRAY_ELEMENTS = 1 << 48  # far beyond any machine; larger products could overflow an index


@dataclass(frozen=True)
class TrainingCosts:
    """Costs of layers, or of steps of a module, in one training step.

    Attributes
    ----------
    message_kinds : tuple of str
        Kinds of messages of a module: 'halo', 'redistribution', 'ring' or 'sum'.
    max_sent_bytes, total_sent_bytes : int
        Bytes of messages (of layers: halos), forward and backward, of the busiest rank and of all ranks.
    max_summed_bytes : int
        Bytes that the busiest rank contributes to a module's reductions over ranks, excluding parameter gradients.
    flops : int
        Floating-point operations of a module's products, forward and backward, on the plan's rank.
    parameters : int
        Parameter elements; trained parameters of a module are counted in the first step that reads them.
    memory : int
        Bytes of views or outputs, parameters, gradients and optimiser state on the rank with the most.
    """

    message_kinds: tuple[str, ...] = ()
    max_sent_bytes: int = 0
    total_sent_bytes: int = 0
    max_summed_bytes: int = 0
    flops: int = 0
    parameters: int = 0
    memory: int = 0

    def __add__(self, other: TrainingCosts) -> TrainingCosts:
        """Add the costs of layers; their busiest ranks may differ, so the sum is an upper bound."""
        return TrainingCosts(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


class PlannedExchange(NamedTuple):
    """Halo exchange of an array for a window.

    Attributes
    ----------
    cells : Partition
    window : Window
    outputs : Partition or None
        Outputs that each tile computes; None: a partition like the input's.
    channels : int
    """

    cells: Partition
    window: Window
    outputs: Partition | None
    channels: int

    def plan(self, tile: int) -> HaloPlan:
        """Return the plan of a tile."""
        return HaloPlan.of(self.cells, self.window, tile, self.outputs)

    def tile_class_keys(self, level: KeyDetail = "all") -> PartClassKeys:
        """Return the keys that distinguish the plans of tiles."""
        return HaloPlan.part_class_keys(self.cells, self.window, self.outputs, level)


class LayerPlan:
    """One layer on all tiles of a replica; shapes without the batch.

    Properties of each tile are computed on demand.

    Parameters
    ----------
    layer : Layer
    input_shape, output_shape : tuple of int
        Global.
    grid : GridShape
    regions : pair of Partition or None
        Cells of the input and of the output on each tile; None: the balanced partition.
    needs_input_gradient : bool
        Whether training needs the gradient of the layer's input; False if the input is the images.
    redistributions : list of VectorRedistribution
        Redistributions of vectors for the layer; reduce-scatters replace its reductions.

    Attributes
    ----------
    name, class_name : str
    window : Window or None
    scheme : Scheme
    adds_output_halo : bool
        Whether the halo belongs to the output: added in the forward pass and gathered in the backward pass.
    trained_parameters : dict of name to Parameter
    parameters : int
        Number of parameter elements of the whole layer.
    reductions : list of Reduction
        Reductions over several ranks.
    """

    def __init__(
        self,
        layer: Layer,
        input_shape: Shape,
        output_shape: Shape,
        grid: GridShape,
        regions: tuple[Partition | None, Partition | None] = (None, None),
        needs_input_gradient: bool = True,
        redistributions: Sequence[VectorRedistribution] = (),
    ) -> None:
        self.layer, self.name, self.class_name = layer, str(layer.name), type(layer).__name__
        self.input_shape, self.output_shape, self.grid, self.regions = input_shape, output_shape, grid, regions
        self.needs_input_gradient, self.redistributions = needs_input_gradient, redistributions
        self.window, self.scheme = layer.window_for(input_shape), layer.scheme or Halo()
        self.adds_output_halo = layer.adds_output_halo
        self.trained_parameters = layer.parameters_for(input_shape)
        self.parameters = sum(prod(p.shape) for p in self.trained_parameters.values())
        scattered = {moved.direction for moved in redistributions if moved.is_reduce_scatter}
        self.reductions = [r for r in layer.reductions_for(input_shape) if r.group and r.direction not in scattered]
        self._halos = layer.halos_for(input_shape, grid)
        gather = layer.gathered_gradient_shape_and_window(input_shape, grid)
        sees_all = layer.views_receptive_window_in_strips and regions[1] is not None
        view_window = layer.receptive_window_for(input_shape) if sees_all else layer.view_window_for(input_shape, grid)
        self._view = self._planned_exchange(input_shape, view_window or Window.for_pointwise(len(input_shape) - 1))
        inputs, outputs = regions
        is_strip = self.adds_output_halo and inputs is not None and outputs is not None
        self._output_halo = (
            PlannedExchange(outputs, self._halos[0][1], inputs, 0) if is_strip and outputs is not None else None
        )
        # strips and blocks exchange no contributions to their outputs
        self._exchanges = [] if is_strip else [self._planned_exchange(shape, window) for shape, window in self._halos]
        self._gather = gather and PlannedExchange(grid.partition(gather[0][:-1]), gather[1], None, gather[0][-1])
        largest = max(self.parameters, prod(output_shape), self.view(0).need.size * input_shape[-1])
        if largest > _MAX_ARRAY_ELEMENTS:
            raise ShapeError(f"would have {largest} elements, more than any machine can hold; make the layer smaller")

    def view(self, tile: int) -> HaloPlan:
        """Return the plan of the input: the cells that a tile's rank owns and sees."""
        return self._view.plan(tile)

    def output_halo_plan(self, tile: int) -> HaloPlan | None:
        """Return the plan of the output if the halo is added in the forward pass, else None."""
        return None if self._output_halo is None else self._output_halo.plan(tile)

    def tile(self, tile: int) -> Box:
        """Return a tile's cells of the output."""
        return self.output_partition.box(tile)

    def settings_equal_on_all_ranks(self) -> str:
        """Return the settings that all ranks must agree on, as text."""
        cells = "\n".join(map(repr, (self.tiles, self.views, self.halo_cells_by_tile)))
        tiles_checksum = hashlib.sha256(cells.encode()).hexdigest()[:8]
        settings = f"{self.input_shape} -> {self.output_shape}, {self.window}, tiles {tiles_checksum}"
        for reduction in self.layer.reductions_for(self.input_shape):
            settings += f", {tuple(reduction)}"
        return f"'{self.name}': {self.class_name} {settings}, {format_arguments(self.layer.arguments())}"

    def check_messages_match(self, arrays: Sequence[GlobalArray], tile: int) -> None:
        """Raise PlanMismatchError if the messages of the built layer's arrays differ from the plan."""
        declared_plans = [
            (
                shape,
                self.output_halo_plan(tile) or HaloPlan.of(self._input_partition(shape), window, tile, self.regions[1]),
            )
            for shape, window in self._halos
        ]
        if self._gather is not None:
            declared_plans.append(((self._gather.channels,), self._gather.plan(tile)))
        planned_sizes = sorted(piece.source.size * shape[-1] for shape, plan in declared_plans for piece in plan.sends)
        actual_sizes = sorted(piece.source.size * array.channels for array in arrays for piece in array.plan.sends)
        if actual_sizes != planned_sizes:
            raise PlanMismatchError(
                f"layer '{self.name}' ({self.class_name}): its arrays send messages of {actual_sizes} elements per"
                f" sample, but halos_for and gathered_gradient_shape_and_window declare {planned_sizes}; declare every"
                " array that register_array returns"
            )

    def forward_multiplications(self, tile: int) -> int:
        """Return the multiplications per sample of a tile's forward pass.

        The count is based on the cells that the tile computes or, if weights are partitioned, on the tile's weights.
        """
        weights = self.trained_parameters.get("weights")
        if weights is None:
            return 0
        if weights.layout.is_partitioned:
            return weights.elements_on(self.grid, tile)
        computed_cells = self.view(tile).own if self.adds_output_halo else self.tile(tile)
        return computed_cells.size * prod(weights.shape)

    def num_parameters_on(self, tile: int) -> int:
        """Return the number of parameter elements on a tile's rank: all, or only the elements of the tile."""
        return sum(p.elements_on(self.grid, tile) for p in self.trained_parameters.values())

    def tile_class_keys(self, level: KeyDetail) -> list[PartClassKeys]:
        """Return keys that distinguish tiles by outputs, parameters and, depending on `level`, messages or extents."""
        exchanges = [self._view, *filter(None, [self._output_halo])] if level != "messages" else []
        exchanges += [*self._exchanges, *filter(None, [self._gather])] if level != "extents" else []
        extents = [extent for p in self.trained_parameters.values() if (extent := p.layout.partitioned_extent(p.shape))]
        partitions = [self.output_partition, *map(self.grid.partition, extents)]
        return [*(exchange.tile_class_keys(level) for exchange in exchanges), *map(part_class_keys, partitions)]

    @cached_property
    def classes(self) -> TileClasses:
        """Classes of tiles that differ in their messages or parameters."""
        return tile_classes(self.grid.tiles, self.tile_class_keys("messages"))

    @cached_property
    def num_parameters_by_tile(self) -> list[int]:
        """Result of `num_parameters_on` for every tile."""
        return self.classes.per_tile(self.num_parameters_on)

    @property
    def output_partition(self) -> Partition:
        """Partition of the output."""
        return self.regions[1] or self.grid.partition(self.output_shape[:-1])

    @cached_property
    def tiles(self) -> list[Box]:
        """Cells of the output of every tile."""
        return self.output_partition.boxes()

    @cached_property
    def views(self) -> list[Box]:
        """View of the input of every tile."""
        return [self.view(tile).need for tile in range(self.grid.tiles)]

    @property
    def representative_tiles(self) -> list[int]:
        """Tiles among which all extents of views and outputs occur along each axis."""
        inputs = self._view.tile_class_keys("extents")
        return sorted({*inputs.representative_tiles, *part_class_keys(self.output_partition).representative_tiles})

    @cached_property
    def max_view_cells(self) -> int:
        """Maximum number of cells of an array that holds both a tile's view and the tile itself."""
        return prod(map(max, zip(*(self.view(tile).buffer.shape for tile in self.representative_tiles), strict=True)))

    @cached_property
    def halo_cells_by_tile(self) -> list[int]:
        """Number of halo cells of each tile in all exchanged arrays, without channels."""
        return self.classes.per_tile(lambda tile: sum(exchange.plan(tile).halo_volume for exchange in self._exchanges))

    def sent_message_sizes(self, tile: int) -> tuple[list[int], list[int]]:
        """Return the elements per sample of each message that a tile sends in an exact forward and backward pass."""
        gathered_sizes, returned_sizes = self._message_sizes_of_gather(tile), self._message_sizes_of_adjoint(tile)
        return (returned_sizes, gathered_sizes) if self.adds_output_halo else (gathered_sizes, returned_sizes)

    @property
    def forward_elements_sent(self) -> list[int]:
        """Elements per sample that each tile sends in an exact forward pass."""
        return self.classes.per_tile(lambda tile: sum(self.sent_message_sizes(tile)[0]))

    @property
    def backward_elements_sent(self) -> list[int]:
        """Elements per sample that each tile sends in an exact backward pass."""
        return self.classes.per_tile(lambda tile: sum(self.sent_message_sizes(tile)[1]))

    def halo_bytes_by_tile(
        self, samples: int, itemsize: int, needs_dx: bool = True, num_forwards: int = 1
    ) -> list[float]:
        """Return the bytes of halos that each tile sends in a training step; arguments as for `halo_bytes_of`."""
        return self.classes.per_tile(lambda tile: self.halo_bytes_of(tile, samples, itemsize, needs_dx, num_forwards))

    def halo_bytes_of(
        self, tile: int, samples: int, itemsize: int, needs_dx: bool = True, num_forwards: int = 1
    ) -> float:
        """Return the bytes of halos that a tile sends in a training step, by the layer's scheme.

        Parameters
        ----------
        samples : int
            Samples of one replica.
        needs_dx : bool
            Whether the gradient of the layer's input is needed.
        num_forwards : int
            Number of forward exchanges.
        """
        gathered_sizes, returned_sizes = ([n * samples for n in messages] for messages in self.sent_message_sizes(tile))
        needed = needs_dx or self.adds_output_halo  # weights of a transposed convolution need neighbours' gradients
        backward_bytes = self.scheme.mean_bytes(returned_sizes, itemsize, "backward") if needed else 0
        return num_forwards * self.scheme.mean_bytes(gathered_sizes, itemsize, "forward") + backward_bytes

    def reduction_bytes_per_rank(
        self, samples: int, itemsize: int, group_sizes: dict[str, int], num_micro_batches: int = 1
    ) -> int:
        """Return the bytes that a rank contributes to the layer's reductions in a training step.

        Parameters
        ----------
        group_sizes : dict of group to int
            Number of ranks of each group.
        """
        return sum(
            sums.result_elements(samples, num_micro_batches) * itemsize
            for sums in self.reductions
            if sums.group and group_sizes[sums.group] > 1 and self._runs_in_training(sums)
        )

    def _runs_in_training(self, reduction: Reduction) -> bool:
        needed_by_parameters = reduction.needed_by_parameters and self.trained_parameters
        return bool(reduction.direction == "forward" or self.needs_input_gradient or needed_by_parameters)

    def _message_sizes_of_gather(self, tile: int) -> list[int]:
        """Return the sizes of the messages that send a tile's cells to the tiles that see them."""
        return _message_sizes((exchange.plan(tile).sends, exchange.channels) for exchange in self._exchanges)

    def _message_sizes_of_adjoint(self, tile: int) -> list[int]:
        """Return the sizes of the adjoint's messages: gradients of the cells that a tile sees, or of its outputs."""
        if self._gather is not None:
            return _message_sizes([(self._gather.plan(tile).sends, self._gather.channels)])
        return _message_sizes((exchange.plan(tile).receives, exchange.channels) for exchange in self._exchanges)

    def _input_partition(self, shape: Shape) -> Partition:
        return self.regions[0] or self.grid.partition(shape[:-1])

    def _planned_exchange(self, shape: Shape, window: Window) -> PlannedExchange:
        outputs = None if self.adds_output_halo else self.regions[1]  # with an output halo, the view is the tile
        return PlannedExchange(self._input_partition(shape), window, outputs, shape[-1])


def _message_sizes(pieces_with_channels: Iterable[tuple[Iterable[Piece], int]]) -> list[int]:
    """Return the elements of each message, given pieces and their channels."""
    return [piece.source.size * channels for pieces, channels in pieces_with_channels for piece in pieces]
