"""Tiled activation, and its view for a window: own cells, halo and padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..arrays.namespace import as_real_numbers, to_host
from ..arrays.precision import parse_dtype
from ..backends import Backend, get_backend
from ..comm import CALL_KEY, Exchange, ProcessGrid, Reductions, check_equal_on_ranks, reduction_group
from ..errors import GridError, ShapeError
from ..geometry import Box, HaloPlan, Partition, Window, part_range
from ..registry.arguments import type_checked
from .buffer import HaloBuffer, Slots
from .exchange import DEFAULT_PHASE, HaloExchange, Phase
from .policies.base import ExchangePolicy
from .policies.halo import Halo
from .redistribute import BoxesForSampleCount, boxes_by_rank, redistribute


class GlobalArray:
    """An activation (N, *spatial, C) tiled over the ranks of a grid, with halo exchange for a layer's window.

    `get_fprop_view` and `get_bprop_view` are collective over the ranks of a replica.

    Parameters
    ----------
    grid : ProcessGrid
    global_shape : (N, *spatial, C)
        Global shape; N is the global batch size. (N, C) is a vector, replicated on the ranks of all tiles.
    window : Window, optional
        None: no halo; each cell depends only on itself.
    dtype : str
    backend : str or Backend
    reuse : bool
        True (for layers): a view is valid until the next call and may alias the tile; arrays must have dtype `dtype`.
        False: methods accept real numbers of any dtype and return new arrays.

    Attributes
    ----------
    local_shape, view_shape : tuple of int
        Shapes of this rank's tile, and of the tile plus its halo and padding.
    own, need, extent : Box, Box, tuple
        The tile and the view as boxes in image coordinates, and the image's extent.
    policy : ExchangePolicy
        The border scheme; default: exact halo exchange.
    swaps_directions : bool
        Whether the halo is added in fprop and gathered in bprop, as for a transposed convolution.
    memory : dict of (samples, direction) to dict
        State that the policy keeps between steps.
    recorded_exchanges : list of (direction, Exchange)
        All exchanges, 'forward' or 'backward', with their run counts.
    reductions : Reductions
        Reductions over ranks performed for the array.
    bytes_sent : int
        Bytes of halos sent by this rank since construction.

    Examples
    --------
    >>> ga = nd.GlobalArray(grid, (8, 256, 256, 3), nd.Window(kernel=3, padding=1))   # doctest: +SKIP
    >>> view = ga.get_fprop_view(ga.scatter(images))                                  # doctest: +SKIP
    """

    @type_checked
    def __init__(
        self,
        grid: ProcessGrid,
        global_shape: Sequence[int],
        window: Window | None = None,
        dtype: str = "float32",
        backend: str | Backend = "numpy",
        *,
        reuse: bool = False,
    ) -> None:
        self.grid, self.global_shape, self.window = grid, tuple(global_shape), window
        self.dtype, self.backend, self.reuse = parse_dtype("GlobalArray: dtype", dtype), get_backend(backend), reuse
        self.extent, self.channels = self.global_shape[1:-1], self.global_shape[-1]
        if window is not None:
            window.check(self.extent)
        self.policy: ExchangePolicy = Halo()
        self.swaps_directions = False
        self.memory: dict[tuple[int, str], dict[str, Any]] = {}
        self.recorded_exchanges: list[tuple[str, Exchange]] = []
        self.reductions = Reductions(grid)
        self.repartition()

    def repartition(self, tiles: Partition | None = None, outputs: Partition | None = None) -> None:
        """Repartition the array; call this method before the first use of the array.

        Tiles may overlap; overlapping cells are then supplied with each tile, not exchanged.

        Parameters
        ----------
        tiles : Partition, optional
            Default: balanced tiles.
        outputs : Partition, optional
            Cells of the window's output computed on each tile. Default: a balanced partition of the output.
        """
        grid, window = self.grid, self.window or Window.for_pointwise(len(self.extent))
        self.tiles = grid.partition(self.extent) if tiles is None else tiles
        self.set_halo_plan(HaloPlan.of(self.tiles, window, grid.tile, outputs))

    def set_halo_plan(self, plan: HaloPlan) -> None:
        """Set the tile and the view to those of a plan, and discard the buffers."""
        self.plan, grid = plan, self.grid
        self.own, self.need = plan.own, plan.need
        lo, hi = grid.sample_range(self.global_shape[0])
        self.local_shape = (hi - lo, *self.own.shape, self.channels)
        self.view_shape = (hi - lo, *self.need.shape, self.channels)
        self._buffers: dict[tuple[int, int], HaloBuffer] = {}

    @property
    def zero_padding_cells(self) -> tuple[tuple[int, int], ...] | None:
        """Number of zero padding cells at both ends of each axis of the view; None: padding may be nonzero."""
        if self.window is None or self.window.mode != "zeros" or self.window.fill != 0:
            return None
        zeros_by_axis = []
        for (lo, hi), n in zip(self.need.axes(), self.extent, strict=True):
            zeros_before = min(max(0, -lo), hi - lo)  # all cells, if the view is outside the image
            zeros_by_axis.append((zeros_before, min(max(0, hi - n), hi - lo - zeros_before)))
        return tuple(zeros_by_axis)

    @property
    def is_tiled(self) -> bool:
        """Whether the array is tiled; False for a vector, which is replicated on the ranks of all tiles."""
        return bool(self.extent)

    @property
    def bytes_sent(self) -> int:
        """Bytes of halos sent by this rank since construction."""
        return sum(exchange.run_count * exchange.bytes_sent for _, exchange in self.recorded_exchanges)

    def get_fprop_view(self, tile: Any, phase: Phase = DEFAULT_PHASE) -> Any:
        """Return the view that the window needs: this rank's tile with halo and padding.

        Parameters
        ----------
        tile : array (n, *own.shape, C)
            This rank's tile.
        phase : Phase, optional
            Purpose of the view, for border schemes that depend on it.

        Returns
        -------
        array (n, *need.shape, C)
        """
        tile = self._convert_unless_reuse("tile", tile)
        self.check_tile_shape("tile", tile)
        self._check_same_call_on_ranks("get_fprop_view", tile)
        if self.plan.trivial:
            return self._copy_unless_reuse(tile)
        return self._copy_unless_reuse(self.buffer(len(tile)).forward(tile, phase))

    def get_bprop_view(self, dview: Any, phase: Phase = DEFAULT_PHASE) -> Any:
        """Return the gradient of this rank's tile: the adjoint of `get_fprop_view`.

        Contributions of other ranks' windows are received and added; those of padding are added to the cells from which
        it was filled.

        Parameters
        ----------
        dview : array (n, *need.shape, C)

        Returns
        -------
        array (n, *own.shape, C)
        """
        dview = self._convert_unless_reuse("dview", dview)
        self._require_sample_shape("dview", dview, self.view_shape[1:])
        self._check_same_call_on_ranks("get_bprop_view", dview)
        if self.plan.trivial:
            return self._copy_unless_reuse(dview)
        return self._copy_unless_reuse(self.buffer(len(dview)).backward(dview, phase))

    def scatter(self, global_array: Any) -> Any:
        """Return this rank's tile of a whole array (N, *spatial, C), which must be equal on every rank."""
        real_array = as_real_numbers("array", global_array, self.backend.xp)
        if real_array.shape[1:] != self.global_shape[1:]:
            expected = ", ".join(map(str, ("N", *self.global_shape[1:])))
            raise ShapeError(f"array of shape {real_array.shape}: expected ({expected})")
        if self.grid.size > 1:
            self.grid.record_replicated_array("the array given to scatter", to_host(real_array))
        lo, hi = self.grid.sample_range(len(real_array))
        return self.backend.from_host(real_array[(slice(lo, hi), *self.own.slices)], self.dtype)

    def gather(self, tile: Any) -> Any:
        """Return the whole array (N, *spatial, C) on every rank. Collective."""
        num_ranks, sample_shape = self.grid.size, self.global_shape[1:]
        tile = as_real_numbers("tile", tile, self.backend.xp)
        self.check_tile_shape("tile", tile)
        self.grid.check("gather", {"the shape of samples": sample_shape})
        return self._redistribute(tile, self, lambda samples: [Box.of((samples, *sample_shape))] * num_ranks)

    def redistribute(self, tile: Any, other: GlobalArray) -> Any:
        """Return this rank's tile of another array, given its tile of this array, by an all-to-all. Collective.

        Parameters
        ----------
        tile : array (n, *own.shape, C)
            This rank's tile, with any number of samples; the batch consists of the samples of all replicas, in order.
        other : GlobalArray
            Array of the same shape, apart from the number of samples, over the same ranks; windows are ignored.

        Returns
        -------
        new array (n', *other.own.shape, C)

        Raises
        ------
        GridError, ShapeError
            If the grids have different numbers of ranks, or the shapes differ; raised on every rank.
        """
        (ranks, shape), (other_ranks, expected) = ((array.grid.size, array.global_shape[1:]) for array in (self, other))
        if ranks != other_ranks:
            raise GridError(
                f"redistribute: the grids have {ranks} and {other_ranks} ranks; create both on the same communicator"
            )
        if shape != expected:
            raise ShapeError(f"redistribute: samples of shape {shape} and {expected}; use arrays of the same shape")
        replicas = range(other.grid.replicas)
        self.check_tile_shape("tile", tile)
        self.grid.check("redistribute", {"the shape of samples": shape, "the number of replicas": len(replicas)})

        def boxes(samples: int) -> list[Box]:
            return boxes_by_rank(
                (part_range(samples, len(replicas), at) for at in replicas), other.tiles, other.channels
            )

        return self._redistribute(tile, other, boxes)

    def owned_part(self, tile: Any) -> Any:
        """Return the part of an array on this rank's tile, which may overlap other tiles, that this rank owns."""
        return tile[(slice(None), *self.grid.tile_box(self.extent).relative_to(self.own).slices)]

    def sum_over_ranks(self, array: Any, replicas: bool = False) -> Any:
        """Return the sum over tiles (and replicas) of values that each rank computed on its own cells.

        A vector is replicated, so nothing is summed over the tiles. The input array is not modified; the result is a
        new array on every rank.
        """
        group, summed = reduction_group(self.is_tiled, replicas), array.copy()
        return summed if group is None else self.reductions.allreduce(group, summed)

    def buffer(self, samples: int, block_number: int = -1, slots: Slots = (None, None)) -> HaloBuffer:
        """Return the buffer for batches with `samples` samples on this rank's replica.

        Parameters
        ----------
        block_number : int
            Index of the workspace; -1 outside forward and backward passes.
        slots : pair
            Memory slots for the view and its gradient; used only if the buffer does not exist yet.
        """
        key = block_number, samples
        if key not in self._buffers:
            self._buffers[key] = HaloBuffer(self, samples, slots)
        return self._buffers[key]

    @property
    def exchanges_by_samples_and_direction(self) -> dict[tuple[int, str], HaloExchange]:
        """The halo exchanges used so far, by number of samples and direction."""
        return {
            (samples, halo.direction): halo
            for (_, samples), buffer in self._buffers.items()
            for halo in (buffer.gather, buffer.scatter_add)
        }

    def wait_for_messages(self) -> None:
        """Wait for all pending messages, so that none arrives in a released buffer."""
        for _, exchange in self.recorded_exchanges:
            exchange.finish()

    def scheme_state(self) -> dict[tuple[int, str], list[Any]]:
        """Return copies of the policy's state from earlier steps, by number of samples and direction."""
        return {
            key: [array.copy() for array in self.policy.get_state(halo)]
            for key, halo in self.exchanges_by_samples_and_direction.items()
        }

    def restore_scheme_state(self, memory: dict[tuple[int, str], list[Any]]) -> None:
        """Replace the policy's state with a result of `scheme_state`. Collective."""
        self.wait_for_messages()
        for samples, _ in memory:
            self.buffer(samples)
        for key, halo in self.exchanges_by_samples_and_direction.items():
            self.policy.set_state(halo, memory.get(key, []))

    def renew_buffers(self) -> None:
        """Recreate the buffers for the current transport of `grid.tile_comm`; policies keep their state. Collective."""
        memory = self.scheme_state()
        self.wait_for_messages()
        self._buffers = {}
        self.memory.clear()
        self.restore_scheme_state({key: arrays for key, arrays in memory.items() if arrays})

    def _redistribute(self, tile: Any, other: GlobalArray, target_boxes: BoxesForSampleCount) -> Any:
        return other.backend.from_host(redistribute(tile, self.grid, self.own, self.extent, target_boxes), other.dtype)

    def _convert_unless_reuse(self, name: str, array: Any) -> Any:
        return array if self.reuse else self.backend.as_real_array(name, array, self.dtype)

    def _copy_unless_reuse(self, array: Any) -> Any:
        return array if self.reuse else array.copy()

    def check_tile_shape(self, name: str, tile: Any) -> None:
        """Raise ShapeError if the array `name` is not this rank's tile, for any number of samples."""
        self._require_sample_shape(name, tile, self.local_shape[1:])

    def _check_same_call_on_ranks(self, call: str, array: Any) -> None:
        """Check that all ranks of the replica make the same call, unless called by a layer."""
        if not self.reuse:
            settings = {CALL_KEY: call, "the window": self.window, "samples": len(array), "channels": array.shape[-1]}
            check_equal_on_ranks(self.grid.world if self.grid.replicas == 1 else self.grid.tile_comm, settings)

    def _require_sample_shape(self, name: str, array: Any, expected: tuple[int, ...]) -> None:
        if array.shape[1:] != expected:
            shape_text = ", ".join(map(str, ("n", *expected)))
            raise ShapeError(f"{name} of shape {array.shape}: rank {self.grid.rank} expects ({shape_text})")


class SerialArray(GlobalArray):
    """GlobalArray on a 1 x 1 grid, whole on one rank; takes the same arguments except the grid."""

    @type_checked
    def __init__(
        self,
        global_shape: Sequence[int],
        window: Window | None = None,
        dtype: str = "float32",
        backend: str | Backend = "numpy",
        *,
        reuse: bool = False,
    ) -> None:
        super().__init__(ProcessGrid.serial(), global_shape, window, dtype=dtype, backend=backend, reuse=reuse)
