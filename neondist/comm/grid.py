"""Which rank holds which tile of which replica."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from ..errors import ConfigError
from ..geometry import Box, GridShape, Partition, grid_shape, split
from ..registry.arguments import checked
from . import mpi
from .abort import abort_on_error
from .single import SingleTransport
from .transport import Transport


class ProcessGrid:
    """All ranks as replicas x rows x cols (x planes, for volumes).

    The ranks of one replica share each sample, a tile each; the replicas share the batch. The first grid of a script
    lets the ranks share the cores of their machine, if nobody has set the number of threads. Grids of one shape over
    one communicator share the communicators of their tiles and replicas.

    Parameters
    ----------
    comm : mpi4py communicator or Transport, optional
        Default MPI.COMM_WORLD, looked up here and not at import.
    replicas : int
    rows, cols : int, optional
        Default: the most square factorisation of size / replicas.
    planes : int
        Cuts of the first axis of volumes (N, D, H, W, C).

    Raises
    ------
    GridError
        If replicas x planes x rows x cols is not the number of ranks.
    """

    @checked
    def __init__(
        self, comm: Any = None, replicas: int = 1, rows: int | None = None, cols: int | None = None, planes: int = 1
    ) -> None:
        self.world = _transport(comm)
        self.shape: GridShape = grid_shape(self.world.size, replicas, rows, cols, planes)
        self.size, self.rank = self.world.size, self.world.rank
        self.replicas, self.planes = replicas, planes
        self.rows, self.cols = self.shape.rows, self.shape.cols
        self.replica, self.tile = divmod(self.rank, self.shape.tiles)
        place, self.col = divmod(self.tile, self.cols)
        self.plane, self.row = divmod(place, self.rows)
        #: the ranks of this replica, by tile; and those that hold this tile, by replica
        self.tile_comm, self.replica_comm = self.world.cut(self.shape.tiles)

    def group(self, name: str) -> Transport:
        """Return the ranks of one of GROUPS."""
        return {"world": self.world, "tiles": self.tile_comm, "replicas": self.replica_comm}[name]

    @property
    def tiles(self) -> Transport:
        """`tile_comm`, by its name before 0.2."""
        warnings.warn("grid.tiles is called grid.tile_comm now", DeprecationWarning, stacklevel=2)
        return self.tile_comm

    @property
    def copies(self) -> Transport:
        """`replica_comm`, by its name before 0.2."""
        warnings.warn("grid.copies is called grid.replica_comm now", DeprecationWarning, stacklevel=2)
        return self.replica_comm

    @classmethod
    def serial(cls) -> ProcessGrid:
        """Return the 1 x 1 grid of this process alone; needs no MPI."""
        return cls(SingleTransport())

    def partition(self, extent: Sequence[int]) -> Partition:
        """Return the cut of an image of this extent into tiles."""
        return self.shape.partition(extent)

    def tile_box(self, extent: Sequence[int]) -> Box:
        """Return this rank's cells of an image of this extent."""
        return self.partition(extent).box(self.tile)

    def sample_range(self, batch: int) -> tuple[int, int]:
        """Return the half-open range of samples, of a batch, that this rank's replica takes."""
        return split(batch, self.replicas, self.replica)

    def __repr__(self) -> str:
        return f"ProcessGrid(rank {self.rank} of {self.size}, {self.shape})"


class WideGrid(ProcessGrid):
    """A grid whose tiles of the images of one extent are others, and may overlap: for reading them."""

    def __init__(self, grid: ProcessGrid, tiles: Partition) -> None:
        vars(self).update(vars(grid))
        self.wide = tiles

    def tile_box(self, extent: Sequence[int]) -> Box:
        """Return the cells of an image of this extent that this rank reads."""
        return self.wide.box(self.tile) if tuple(extent) == self.wide.extent else super().tile_box(extent)


def _transport(comm: Any) -> Transport:
    if isinstance(comm, Transport):
        return comm
    if not (comm is None or callable(getattr(comm, "Get_rank", None))):
        raise ConfigError(f"comm: expected an mpi4py communicator, a Transport or None, got {comm!r}")
    transport = mpi.world() if comm is None else mpi.MPITransport(comm)
    transport.share_cores()
    abort_on_error(transport)  # a script that fails on one rank must not leave the others waiting
    return transport
