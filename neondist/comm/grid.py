"""Assignment of ranks to the tiles of replicas."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from html import escape
from itertools import count
from types import MappingProxyType
from typing import Any
from weakref import WeakValueDictionary

from ..errors import ConfigError
from ..geometry import Box, GridShape, Partition, grid_shape, part_range
from ..observer import Observers
from ..registry.arguments import type_checked
from . import mpi
from .agreement import CALL_KEY, check_equal_on_ranks, checksum_of
from .process_hooks import ExceptionAndExitHooks
from .single import SingleTransport
from .transport import CLOSED, Transport

_HANDLE_COUNTER = count()
_GRID_BY_HANDLE: WeakValueDictionary[int, ProcessGrid] = WeakValueDictionary()


class ProcessGrid:
    """A grid of ranks: replicas x rows x cols (x planes, for volumes).

    The ranks of a replica each hold one tile of every sample; the batch is split over the replicas. Grids of the same
    shape on the same communicator share the communicators of their tiles and replicas. While a grid of several MPI
    ranks is open, an uncaught exception aborts the job on all ranks, and the ranks on a machine share its cores unless
    the number of threads has been set.

    `with nd.ProcessGrid() as grid:` closes the grid on exit.

    Parameters
    ----------
    comm : mpi4py communicator or Transport, optional
        Default: MPI.COMM_WORLD, looked up when the grid is created.
    replicas : int or None
        Default: 1. None: as many as the ranks allow, with rows and cols defaulting to 1.
    rows, cols : int, optional
        Default: the most square factorisation of size / (replicas x planes).
    planes : int
        Number of parts of the first spatial axis of volumes (N, D, H, W, C).

    Raises
    ------
    GridError
        If replicas x planes x rows x cols is not the number of ranks; after `close`, also raised by communication.
    """

    _tile_partition: Partition | None = None
    _owns_world = False

    @type_checked
    def __init__(
        self,
        comm: Any = None,
        replicas: int | None = 1,
        rows: int | None = None,
        cols: int | None = None,
        planes: int = 1,
    ) -> None:
        self.world, self.observers = _as_transport(comm), Observers()
        if self.world.size > 1:
            requested_shape = {"replicas": replicas, "planes": planes, "rows": rows, "cols": cols}
            check_equal_on_ranks(self.world, {CALL_KEY: "ProcessGrid", **requested_shape})
        self.shape: GridShape = grid_shape(self.world.size, replicas, rows, cols, planes)
        self.size, self.rank = self.world.size, self.world.rank
        self.replicas, self.planes = self.shape.replicas, planes
        self.rows, self.cols = self.shape.rows, self.shape.cols
        self.replica, self.tile = divmod(self.rank, self.shape.tiles)
        tile_row, self.col = divmod(self.tile, self.cols)
        self.plane, self.row = divmod(tile_row, self.rows)
        #: transports over the ranks of this replica, ordered by tile, and over those of this tile, ordered by replica
        self.tile_comm, self.replica_comm = self.world.split_tiles_and_replicas(self.shape.tiles)
        #: objects created once per grid, by keys that their creators choose
        self.cached_objects: dict[Any, Any] = {}
        #: number that identifies this grid where objects cannot be passed, such as in PyTorch operators
        self.handle = next(_HANDLE_COUNTER)
        _GRID_BY_HANDLE[self.handle] = self
        self._checksum_by_name: dict[str, int] = {}
        self._close_callbacks = ExitStack()
        self._owns_world = self.world is not comm
        if self._owns_world:  # a caller's transport stays open, and the process unchanged
            self._close_callbacks.callback(self.world.close)
            if self.size > 1:
                self._close_callbacks.callback(ExceptionAndExitHooks.add_grid(self.world).remove_grid, self.world)
        for group in (self.tile_comm, self.replica_comm):
            self._close_callbacks.callback(group.close)

    def close(self) -> None:
        """Free the communicators created for this grid, and undo its changes to this process.

        Collective. Communicators shared with an open grid remain until that grid is closed as well. Objects built on
        the grid can no longer communicate. Closing a closed grid does nothing.
        """
        if self.closed:
            return
        if self._owns_world and not self.world.ended:
            self.check("ProcessGrid.close")
        self._close_callbacks.close()
        self.world = self.tile_comm = self.replica_comm = self.shape = CLOSED

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self.world is CLOSED

    def __enter__(self) -> ProcessGrid:
        return self

    def __exit__(self, error_type: Any, error: BaseException | None, traceback: Any) -> None:
        """Close the grid, unless an error is propagating that other ranks may not have raised."""
        if error is None or getattr(error, "raised_on_all_ranks", False) or self.size == 1:
            self.close()

    def record_replicated_array(self, name: str, array: Any) -> None:
        """Record an array that must be equal on all ranks; the next `check` compares it.

        Parameters
        ----------
        name : str
            Description, such as 'the image passed to scatter'.
        array : np.ndarray, or int
            The array, or its checksum.
        """
        if self.size > 1:
            previous_checksum = self._checksum_by_name.get(name, 0)
            checksum = array if isinstance(array, int) else checksum_of(array)
            self._checksum_by_name[name] = (previous_checksum * 31 + checksum) % 2**32  # several arrays, in order

    def check(
        self, call: str, values: Mapping[str, Any] = MappingProxyType({}), error: Exception | None = None,
        versions: Sequence[int] = (),
    ) -> bool:  # fmt: skip
        """Raise on all ranks unless all begin this call with equal values and equal replicated arrays. Collective.

        Calls `check_equal_on_ranks`, adding checksums of the arrays recorded by `record_replicated_array`.
        """
        checksum_by_name, self._checksum_by_name = self._checksum_by_name, {}
        checksums = {name: f"of checksum {number:08x}" for name, number in checksum_by_name.items()}
        with self.observers.observe("wait", subject="world"):
            return check_equal_on_ranks(self.world, {CALL_KEY: call, **checksums, **values}, error, versions)

    def on_close(self, callback: Callable[[], object]) -> None:
        """Register a callback for `close`, called before the communicators are freed."""
        self._close_callbacks.callback(callback)

    def group(self, name: str) -> Transport:
        """Return the transport of a group, one of GROUP_NAMES."""
        return {"world": self.world, "tiles": self.tile_comm, "replicas": self.replica_comm}[name]

    @staticmethod
    def from_handle(handle: int) -> ProcessGrid:
        """Return the grid with this handle; KeyError if the grid has been garbage-collected."""
        return _GRID_BY_HANDLE[handle]

    @classmethod
    def serial(cls) -> ProcessGrid:
        """Return the 1 x 1 grid of this process alone; needs no MPI."""
        return cls(SingleTransport())

    def partition(self, extent: Sequence[int]) -> Partition:
        """Return the partition of an image of this extent into tiles."""
        return self.shape.partition(extent)

    def tile_box(self, extent: Sequence[int]) -> Box:
        """Return this rank's cells of an image of this extent."""
        if self._tile_partition is not None and tuple(extent) == self._tile_partition.extent:
            return self._tile_partition.box(self.tile)
        return self.partition(extent).box(self.tile)

    def with_tiles(self, tiles: Partition | None) -> ProcessGrid:
        """Return this grid with other, possibly overlapping, tiles for images of one extent."""
        if tiles is None:
            return self
        grid = copy.copy(self)
        grid._tile_partition = tiles
        return grid

    def single_tile_grid(self, shape: GridShape, strip: int) -> ProcessGrid:
        """Return a grid of one process in the role of tile `strip` of another grid shape."""
        grid = ProcessGrid.serial()
        grid.shape, grid.tile = shape, strip
        return grid

    def sample_range(self, batch_size: int) -> tuple[int, int]:
        """Return the half-open range of a batch's samples on this rank's replica."""
        return part_range(batch_size, self.replicas, self.replica)

    def _repr_html_(self) -> str:
        return f"<pre>{escape(repr(self))}</pre>"

    def __repr__(self) -> str:
        return f"ProcessGrid(rank {self.rank} of {self.size}, {'closed' if self.closed else self.shape})"


def _as_transport(comm: Any) -> Transport:
    if isinstance(comm, Transport):
        return comm
    if not (comm is None or callable(getattr(comm, "Get_rank", None))):
        raise ConfigError(f"comm: expected an mpi4py communicator, a Transport or None, got {comm!r}")
    return mpi.world_transport() if comm is None else mpi.MPITransport(comm)
