"""Sums over the ranks of a grid, and the books of them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .grid import ProcessGrid

GROUPS = ("world", "tiles", "copies")
"""all ranks; those of one replica; those that hold the same tile in all replicas"""


def group_of(tiled: bool, replicas: bool) -> str | None:
    """Return over whom a sum goes of what each rank counted in its own cells; None: over nobody.

    Parameters
    ----------
    tiled : bool
        Whether the cells are cut over the tiles; what is not is known whole on every tile's rank.
    replicas : bool
        Whether the samples of all replicas count.
    """
    if replicas:
        return "world" if tiled else "copies"
    return "tiles" if tiled else None


class Sums:
    """Sums that belong to one account, such as those of a layer.

    Parameters
    ----------
    grid : ProcessGrid

    Attributes
    ----------
    direction : 'forward' or 'backward'
        The pass at work.
    booked : Counter of (direction, group, bytes)
        How often an array of so many bytes was summed; groups of one rank send nothing, and are left out.
    """

    def __init__(self, grid: ProcessGrid) -> None:
        self.grid, self.direction = grid, "forward"
        self.booked: Counter[tuple[str, str, int]] = Counter()

    def over(self, group: str, array: Any) -> Any:
        """Replace the array by its sum over one of GROUPS, and return it; collective over that."""
        transport = self.grid.group(group)
        transport.allreduce(array)
        if transport.size > 1 and array.nbytes:
            self.booked[self.direction, group, array.nbytes] += 1
        return array

    @property
    def bytes_given(self) -> int:
        """Bytes of all arrays that this rank has given into sums."""
        return sum(count * nbytes for (_, _, nbytes), count in self.booked.items())
