"""Shape of a process grid: numbers of replicas and tiles; needs no MPI."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from ..errors import ConfigError, GridError
from ..terminal.console import counted
from .partition import Partition, factorisations, part_range
from .regions import OverlappingPartition


@dataclass(frozen=True)
class GridShape:
    """Grid of replicas x planes x rows x cols ranks, numbered row-major with replicas slowest."""

    replicas: int = 1
    rows: int = 1
    cols: int = 1
    planes: int = 1

    @property
    def tiles(self) -> int:
        """Number of tiles of a sample, one for each rank of a replica."""
        return self.planes * self.rows * self.cols

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.replicas * self.tiles

    def parts(self, ndim: int) -> tuple[int, ...]:
        """Return the number of parts of each of `ndim` spatial axes."""
        if ndim == 3:
            return self.planes, self.rows, self.cols
        if ndim == 2:
            return self.planes * self.rows, self.cols
        return (self.tiles,) * ndim  # a single axis is divided among all tiles

    def partition(self, extent: Sequence[int]) -> Partition:
        """Return the partition of an image of `extent` cells; an image without axes is replicated."""
        if len(extent) > 3:
            raise ConfigError(
                f"images of extent {tuple(extent)}: a grid can partition at most three spatial axes, not {len(extent)}"
            )
        return Partition(tuple(extent), self.parts(len(extent)), self.tiles)


@dataclass(frozen=True)
class TileStripGrid(GridShape):
    """Grid whose tiles are cut into strips along the first axis; strips are numbered like tiles.

    Only the last `num_last_strips` strips of each tile (default: all) have cells.
    """

    strips: int = 1
    num_last_strips: int | None = None

    @property
    def tiles(self) -> int:
        """Total number of strips of all tiles."""
        return super().tiles * self.strips

    def parts(self, ndim: int) -> tuple[int, ...]:
        """Return the number of parts of each of `ndim` spatial axes."""
        first_count, *other_counts = self.without_strips.parts(ndim) if ndim else (1,)
        return (first_count * self.strips, *other_counts)[:ndim]

    @property
    def without_strips(self) -> GridShape:
        """The grid without strips."""
        return GridShape(self.replicas, self.rows, self.cols, self.planes)

    def partition(self, extent: Sequence[int]) -> Partition:
        """Return the partition of an image into the strips of all tiles."""
        return _partition_strips(self, tuple(extent))

    def strip_numbers_of(self, tile: int, ndim: int) -> list[int]:
        """Return the numbers of a tile's strips, for images with `ndim` axes."""
        others = self.without_strips.parts(ndim)[1:]
        first_axis_tile, position_in_rest = divmod(tile, prod(others))
        return [(first_axis_tile * self.strips + at) * prod(others) + position_in_rest for at in range(self.strips)]


@lru_cache(maxsize=256)
def _partition_strips(grid: TileStripGrid, extent: tuple[int, ...]) -> Partition:
    tiles = grid.without_strips.partition(extent)
    if not extent:
        return Partition((), (), grid.tiles)
    ranges = [tuple(tiles.ranges_along(axis)) for axis in range(len(extent))]
    num_empty_strips = 0 if grid.num_last_strips is None else grid.strips - grid.num_last_strips
    cut = [[part_range(hi - lo, grid.strips, at) for at in range(grid.strips)] for lo, hi in ranges[0]]
    cut = [[(strips[num_empty_strips][0],) * 2] * num_empty_strips + strips[num_empty_strips:] for strips in cut]
    ranges[0] = tuple((lo + a, lo + b) for (lo, _), strips in zip(ranges[0], cut, strict=True) for a, b in strips)
    return OverlappingPartition(extent, grid.parts(len(extent)), grid.tiles, tuple(ranges))


def grid_shape(
    ranks: int, replicas: int | None = 1, rows: int | None = None, cols: int | None = None, planes: int = 1
) -> GridShape:
    """Return the grid of `ranks` ranks; rows and cols default to the most square factorisation.

    With replicas=None, rows and cols default to 1, and there are as many replicas as the ranks allow.

    Raises
    ------
    GridError
        If a factor is not a positive integer, or the product is not `ranks`; the message then lists valid factors.
    """
    for field, value in {"replicas": replicas, "rows": rows, "cols": cols, "planes": planes}.items():
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise GridError(f"{field} {value!r}: expected an integer of at least 1")
    if replicas is None:
        replicas, rows, cols = max(1, ranks // ((rows or 1) * (cols or 1) * planes)), rows or 1, cols or 1
    ranks_per_plane, remainder = divmod(ranks, replicas * planes)
    factor_pairs = factorisations(ranks_per_plane, 2) if not remainder else []
    matching_pairs = [(r, c) for r, c in factor_pairs if rows in (None, r) and cols in (None, c)]
    if not matching_pairs:
        raise GridError(_mismatch_message(ranks, replicas, rows, cols, planes, factor_pairs))
    # of r x c and c x r, prefer more rows: a halo along H is contiguous in memory
    most_square = min(matching_pairs, key=lambda rc: (abs(rc[0] - rc[1]), -rc[0]))
    return GridShape(replicas, *most_square, planes)


def _mismatch_message(
    ranks: int, replicas: int, rows: int | None, cols: int | None, planes: int, factor_pairs: list[tuple[int, ...]]
) -> str:
    requested_text = f"replicas: {replicas}, " + (f"planes: {planes}, " if planes > 1 else "")
    requested_text += f"rows: {rows or 'any'}, cols: {cols or 'any'}"
    problem = f"grid ({requested_text}) does not match {counted(ranks, 'rank')}"
    if factor_pairs:
        more_replicas, remainder = divmod(ranks, (rows or ranks) * (cols or ranks) * planes)
        alternative = f", or replicas {more_replicas}" if more_replicas and not remainder else ""
        return f"{problem}; rows x cols can be " + ", ".join(f"{r} x {c}" for r, c in factor_pairs) + alternative
    divisors = ", ".join(str(d) for d in range(1, ranks + 1) if ranks % d == 0)
    return f"{problem}; replicas x planes must divide {ranks}: {divisors}"
