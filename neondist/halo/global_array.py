"""An activation, and the view that a window has of it: its cells plus the cells around them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..backends import Backend, get_backend
from ..comm import CALL, Exchange, ProcessGrid, Reductions, check_alike, group_of
from ..errors import GridError, ShapeError
from ..geometry import Box, HaloPlan, Partition, Window, split
from ..namespace import to_host
from ..registry.arguments import checked
from .buffer import HaloBuffer, Slots
from .exchange import WHOLE, HaloExchange, Phase
from .policies.base import ExchangePolicy
from .policies.halo import Halo
from .redistribute import Boxes, boxes_of, redistributed


class GlobalArray:
    """An activation (N, *spatial, C) cut over the ranks of a grid, and the view that a layer's window has of it.

    `get_fprop_view` and `get_bprop_view` are collective over the ranks of a replica.

    Parameters
    ----------
    grid : ProcessGrid
    global_shape : (N, *spatial, C)
        Shape of the whole activation; N is the global batch size. (N, C) is a vector, known whole on every tile's rank.
    window : Window, optional
        None: every cell sees itself alone.
    dtype : str
    backend : str or Backend
    reuse : bool
        True: a view is valid until the next call, and may be the tile itself; arrays are of `dtype` (what layers use).
        False: every call takes real numbers of any kind, and returns new arrays.

    Attributes
    ----------
    local_shape, view_shape : tuple of int
        This rank's tile, and the tile plus what the window needs.
    own, need, extent : Box, Box, tuple
        The same as boxes in the coordinates of the image, and the image's extent.
    policy : ExchangePolicy
        What crosses between tiles; default: every cell.
    reverse : bool
        True where the halo adds in fprop and is gathered in bprop, as under a transposed convolution.
    memory : dict of (samples, direction) to dict
        What the policy keeps from step to step.
    recorded : list of (direction, Exchange)
        Every exchange, 'forward' or 'backward'; each counts its runs.
    reductions : Reductions
        What was summed over ranks for it.
    bytes_sent : int
        Bytes of halos sent by this rank since construction.

    Examples
    --------
    >>> ga = nd.GlobalArray(grid, (8, 256, 256, 3), nd.Window(kernel=3, padding=1))   # doctest: +SKIP
    >>> view = ga.get_fprop_view(ga.scatter(images))                                  # doctest: +SKIP
    """

    @checked
    def __init__(
        self,
        grid: ProcessGrid,
        global_shape: Sequence[int],
        window: Window | None = None,
        *,
        dtype: str = "float32",
        backend: str | Backend = "numpy",
        reuse: bool = False,
    ) -> None:
        self.grid, self.global_shape, self.window = grid, tuple(global_shape), window
        self.dtype, self.backend, self.reuse = np.dtype(dtype), get_backend(backend), reuse
        self.extent, self.channels = self.global_shape[1:-1], self.global_shape[-1]
        if window is not None:
            window.check(self.extent)
        self.policy: ExchangePolicy = Halo()
        self.reverse = False
        self.memory: dict[tuple[int, str], dict[str, Any]] = {}
        self.recorded: list[tuple[str, Exchange]] = []
        self.reductions = Reductions(grid)
        self.cut()

    def cut(self, tiles: Partition | None = None, outputs: Partition | None = None) -> None:
        """Cut the array anew, before it is used: into tiles that may overlap, which are then whole without messages.

        Parameters
        ----------
        tiles : Partition, optional
            Default: balanced tiles.
        outputs : Partition, optional
            Which cells of the window's output each tile computes; default: the output is cut alike.
        """
        grid, window = self.grid, self.window or Window.of_one(len(self.extent))
        self.tiles = grid.partition(self.extent) if tiles is None else tiles
        self.take(HaloPlan.of(self.tiles, window, grid.tile, outputs))

    def take(self, plan: HaloPlan) -> None:
        """Have the tile and the view that a plan says, before it is used."""
        self.plan, grid = plan, self.grid
        self.own, self.need = plan.own, plan.need
        lo, hi = grid.sample_range(self.global_shape[0])
        self.local_shape = (hi - lo, *self.own.shape, self.channels)
        self.view_shape = (hi - lo, *self.need.shape, self.channels)
        self._buffers: dict[tuple[int, int], HaloBuffer] = {}

    @property
    def held(self) -> int:
        """Numbers of a sample in the view with the tile around which it lies."""
        return self.plan.buffer.size * self.channels

    @property
    def outside(self) -> tuple[tuple[int, int], ...] | None:
        """How many cells at both ends of each axis of the view are zeros around the image; None: they may be others."""
        if self.window is None or self.window.mode != "zeros" or self.window.fill != 0:
            return None
        sides = []
        for (lo, hi), n in zip(self.need.axes(), self.extent, strict=True):
            before = min(max(0, -lo), hi - lo)  # all of a view that sees nothing of the image
            sides.append((before, min(max(0, hi - n), hi - lo - before)))
        return tuple(sides)

    @property
    def tiled(self) -> bool:
        """False for a vector, which every tile's rank knows whole."""
        return bool(self.extent)

    @property
    def bytes_sent(self) -> int:
        """Bytes of halos sent by this rank since construction."""
        return sum(exchange.runs * exchange.bytes_sent for _, exchange in self.recorded)

    def get_fprop_view(self, tile: Any, phase: Phase = WHOLE) -> Any:
        """Return the cells that the window needs, halo and padding filled in.

        Parameters
        ----------
        tile : array (n, *own.shape, C)
            This rank's tile.
        phase : Phase, optional
            What it is for, where a policy asks.

        Returns
        -------
        array (n, *need.shape, C)
        """
        tile = self._taken("tile", tile)
        self.check_tile("tile", tile)
        self._check_call("get_fprop_view", tile)
        if self.plan.trivial:
            return self._given(tile)
        return self._given(self.buffer(len(tile)).forward(tile, phase))

    def get_bprop_view(self, dview: Any, phase: Phase = WHOLE) -> Any:
        """Return the gradient of this rank's tile: the adjoint of `get_fprop_view`.

        Contributions of other ranks' windows are sent here and added; those of the padding go where it came from.

        Parameters
        ----------
        dview : array (n, *need.shape, C)

        Returns
        -------
        array (n, *own.shape, C)
        """
        dview = self._taken("dview", dview)
        self._check("dview", dview, self.view_shape[1:])
        self._check_call("get_bprop_view", dview)
        if self.plan.trivial:
            return self._given(dview)
        return self._given(self.buffer(len(dview)).backward(dview, phase))

    def scatter(self, whole: Any) -> Any:
        """Return this rank's tile of a whole array (N, *spatial, C), the same on every rank."""
        if whole.shape[1:] != self.global_shape[1:]:
            expected = ", ".join(map(str, ("N", *self.global_shape[1:])))
            raise ShapeError(f"array of shape {whole.shape}: expected ({expected})")
        if self.grid.size > 1:
            self.grid.note_whole("the array given to scatter", to_host(whole))
        lo, hi = self.grid.sample_range(len(whole))
        return self.backend.from_host(whole[(slice(lo, hi), *self.own.slices)], self.dtype)

    def gather(self, tile: Any) -> Any:
        """Return the whole array (N, *spatial, C) on every rank; collective."""
        size, shape = self.grid.size, self.global_shape[1:]
        self.check_tile("tile", tile)
        self.grid.check("gather", {"the shape of samples": shape})
        return self._moved(tile, self, lambda samples: [Box.of((samples, *shape))] * size)

    def redistribute(self, tile: Any, other: GlobalArray) -> Any:
        """Return this rank's tile on another grid, or of other tiles, given that of this array; one all-to-all.

        Parameters
        ----------
        tile : array (n, *own.shape, C)
            Any number of samples, replicas one after the other.
        other : GlobalArray
            Of the same shape, but for the samples, over the same ranks; windows do not matter.

        Returns
        -------
        array (n', *other.own.shape, C), a new one

        Raises
        ------
        GridError, ShapeError
            On every rank: the grids have other ranks, or the shapes differ.
        """
        (here, shape), (there, wanted) = ((array.grid.size, array.global_shape[1:]) for array in (self, other))
        if here != there:
            raise GridError(
                f"redistribute: the grids have {here} and {there} ranks; create both on the same communicator"
            )
        if shape != wanted:
            raise ShapeError(f"redistribute: samples of shape {shape} and {wanted}; give arrays of the same shape")
        replicas = range(other.grid.replicas)
        self.check_tile("tile", tile)
        self.grid.check("redistribute", {"the shape of samples": shape, "the replicas": len(replicas)})

        def boxes(samples: int) -> list[Box]:
            return boxes_of((split(samples, len(replicas), at) for at in replicas), other.tiles, other.channels)

        return self._moved(tile, other, boxes)

    def owned(self, tile: Any) -> Any:
        """Return the part of an array over this rank's tile that no other rank has too."""
        own = self.grid.tile_box(self.extent).relative_to(self.own)
        return tile[(slice(None), *own.slices)]

    def total(self, array: Any, replicas: bool = False) -> Any:
        """Return the sum over the tiles (and replicas) of what each rank counted over its own cells.

        A vector is counted whole on every tile's rank, so nothing is added for it over the tiles. The array itself
        stays as it is; all ranks' may be written to, and are new ones.
        """
        group, total = group_of(self.tiled, replicas), array.copy()
        return total if group is None else self.reductions.allreduce(group, total)

    def buffer(self, samples: int, number: int = -1, slots: Slots = (None, None)) -> HaloBuffer:
        """Return the memory for batches of so many samples (of this rank's replica).

        Parameters
        ----------
        number : int
            Of the workspace that it belongs to; -1: of none, for calls from outside of passes.
        slots : pair
            Where the view and its gradient live, if they are made now.
        """
        key = number, samples
        if key not in self._buffers:
            self._buffers[key] = HaloBuffer(self, samples, slots)
        return self._buffers[key]

    @property
    def exchanges(self) -> dict[tuple[int, str], HaloExchange]:
        """The halo exchanges that have been used so far, by number of samples and direction."""
        return {
            (samples, halo.direction): halo
            for (_, samples), buffer in self._buffers.items()
            for halo in (buffer.gather, buffer.scatter_add)
        }

    def settle(self) -> None:
        """Wait for all that is under way: nothing may arrive any more where a buffer has been."""
        for _, exchange in self.recorded:
            exchange.finish()

    def remembered(self) -> dict[tuple[int, str], list[Any]]:
        """Return copies of what the policy remembers of earlier steps, by number of samples and direction."""
        return {key: [array.copy() for array in self.policy.remembered(halo)] for key, halo in self.exchanges.items()}

    def remember(self, memory: dict[tuple[int, str], list[Any]]) -> None:
        """Let the policy remember what `remembered` returned, and nothing else; collective."""
        self.settle()
        for samples, _ in memory:
            self.buffer(samples)
        for key, halo in self.exchanges.items():
            self.policy.remember(halo, memory.get(key, []))

    def renew_buffers(self) -> None:
        """Make new buffers, with the transport that `grid.tile_comm` is now; policies keep their memory; collective."""
        memory = self.remembered()
        self.settle()
        self._buffers = {}
        self.memory.clear()
        self.remember({key: arrays for key, arrays in memory.items() if arrays})

    def _moved(self, tile: Any, other: GlobalArray, target: Boxes) -> Any:
        return other.backend.from_host(redistributed(tile, self.grid, self.own, self.extent, target), other.dtype)

    def _taken(self, name: str, array: Any) -> Any:
        return array if self.reuse else self.backend.real_array(name, array, self.dtype)

    def _given(self, array: Any) -> Any:
        return array if self.reuse else array.copy()

    def check_tile(self, name: str, tile: Any) -> None:
        """Raise ShapeError if an array is not this rank's tile, for any number of samples; `name` is the array's."""
        self._check(name, tile, self.local_shape[1:])

    def _check_call(self, call: str, array: Any) -> None:
        """Compare, where users call, whether all ranks of the replica make the same call."""
        if not self.reuse:
            facts = {CALL: call, "the window": self.window, "samples": len(array), "channels": array.shape[-1]}
            check_alike(self.grid.world if self.grid.replicas == 1 else self.grid.tile_comm, facts)

    def _check(self, name: str, array: Any, expected: tuple[int, ...]) -> None:
        if array.shape[1:] != expected:
            told = ", ".join(map(str, ("n", *expected)))
            raise ShapeError(f"{name} of shape {array.shape}: rank {self.grid.rank} expects ({told})")


class PaddedArray(GlobalArray):
    """A GlobalArray on the 1 x 1 grid, which is whole on one rank; the arguments are the same but for the grid."""

    @checked
    def __init__(
        self,
        global_shape: Sequence[int],
        window: Window | None = None,
        dtype: str = "float32",
        *,
        backend: str | Backend = "numpy",
        reuse: bool = False,
    ) -> None:
        super().__init__(ProcessGrid.serial(), global_shape, window, dtype=dtype, backend=backend, reuse=reuse)
