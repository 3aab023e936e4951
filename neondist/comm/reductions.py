"""Reductions and redistributions over the ranks of a grid, and a record of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..arrays.namespace import HostTwin, namespace, to_host, wait_for
from ..geometry import split
from .grid import ProcessGrid
from .transport import Done, ReduceOp, Request, Transport

GROUPS = ("world", "tiles", "replicas")
"""all ranks; those of one replica; those that hold the same tile in all replicas"""


def group_of(tiled: bool, replicas: bool) -> str | None:
    """Return the group whose ranks add up what each counted in its own cells; None: no other rank has any.

    Parameters
    ----------
    tiled : bool
        Whether the cells are cut over the tiles; what is not is known whole on every tile's rank.
    replicas : bool
        Whether the samples of all replicas count.
    """
    if replicas:
        return "world" if tiled else "replicas"
    return "tiles" if tiled else None


def _ready(transport: Transport, array: Any) -> bool:
    """Return whether the transport takes an array itself, once what computes that is done."""
    if transport.takes_of_device(array):
        wait_for(array)
    return transport.takes(array)


class _Staged(Request):
    """A sum under way, of a device's array that the transport does not take."""

    def __init__(self, transport: Transport, array: Any) -> None:
        self.twin = HostTwin(array)
        self.request = transport.iallreduce(self.twin.fetch())

    def wait(self) -> None:
        """Return when the array holds the sum."""
        self.request.wait()
        self.twin.put()


class Reductions:
    """Reductions and redistributions that belong to one account, such as those of a layer.

    Parameters
    ----------
    grid : ProcessGrid

    Attributes
    ----------
    direction : 'forward' or 'backward'
        The pass at work.
    recorded : Counter of (direction, group, bytes)
        How often an array of so many bytes was reduced; groups of one rank send nothing, and are left out.
    moved : Counter of (direction, group, peer, bytes)
        How often so many bytes of a redistributed array were sent to a rank of the group.
    """

    def __init__(self, grid: ProcessGrid) -> None:
        self.grid, self.direction = grid, "forward"
        self.recorded: Counter[tuple[str, str, int]] = Counter()
        self.moved: Counter[tuple[str, str, int, int]] = Counter()

    def allreduce(self, group: str, array: Any, op: ReduceOp = "sum") -> Any:
        """Replace the array by its sum, or maximum, over one of GROUPS, and return it; collective over that."""
        transport = self._record(group, array)
        with self.grid.observers.during("wait", "", self.direction, group):
            if transport.size == 1 or _ready(transport, array):
                transport.allreduce(array, op)
            else:
                twin = HostTwin(array)
                transport.allreduce(twin.fetch(), op)
                twin.put()
        return array

    def iallreduce(self, group: str, array: Any) -> Request:
        """Begin to replace the array by its sum over one of GROUPS; collective over that, in the same order."""
        transport = self._record(group, array)
        if transport.size == 1:
            return Done()
        return transport.iallreduce(array) if _ready(transport, array) else _Staged(transport, array)

    def wait(self, group: str, request: Request) -> None:
        """Wait for a sum over one of GROUPS that has begun."""
        with self.grid.observers.during("wait", "", self.direction, group):
            request.wait()

    def gather(self, group: str, array: Any) -> Any:
        """Return all ranks' arrays, stacked in their order; collective over one of GROUPS."""
        transport = self._record(group, array)
        if transport.size == 1:
            return array[None]
        with self.grid.observers.during("wait", "", self.direction, group):
            return namespace(array).asarray(transport.allgather_array(to_host(array)))

    def sum_encoded(
        self, group: str, codes: np.ndarray, encode: Callable[[Any], np.ndarray], decode: Callable[[np.ndarray], Any]
    ) -> tuple[np.ndarray, slice, Any]:
        """Return the codes of the sum of numbers that travel encoded; collective over one of GROUPS.

        Each rank decodes a slice of all ranks' codes, and adds the numbers up in the order of ranks.

        Parameters
        ----------
        codes : ndarray, 1-D
            This rank's numbers, one code each; recorded once, as an array that is reduced.
        encode, decode : callable
            From numbers to codes, and back.

        Returns
        -------
        codes, slice, array
            The codes of the whole sum; this rank's slice of it, and what encoding that has left out.
        """
        transport = self._record(group, codes)
        bounds = [split(codes.size, transport.size, rank) for rank in range(transport.size)]
        lo, hi = bounds[transport.rank]
        with self.grid.observers.during("wait", "", self.direction, group):
            shares = transport.all_to_all([codes[start:stop] for start, stop in bounds], [(hi - lo,)] * len(bounds))
            total = decode(shares[0])
            for share in shares[1:]:
                total += decode(share)
            mine = encode(total)
            found = transport.all_to_all([mine] * len(bounds), [(stop - start,) for start, stop in bounds])
        return np.concatenate(found), slice(lo, hi), total - decode(mine)

    def all_to_all(self, group: str, sends: Sequence[Any], shapes: Sequence[tuple[int, ...]]) -> list[Any]:
        """Send an array to every rank of one of GROUPS, and return what each sent to this one; collective over it."""
        transport = self.grid.group(group)
        others = [(peer, array.nbytes) for peer, array in enumerate(sends) if peer != transport.rank]
        self.moved.update((self.direction, group, peer, nbytes) for peer, nbytes in others if nbytes)
        with self.grid.observers.during("wait", "", self.direction, group):
            if transport.size == 1:
                return [array.copy() for array in sends]
            found = transport.all_to_all([to_host(array) for array in sends], shapes)
            return [namespace(array).asarray(part) for array, part in zip(sends, found, strict=True)]

    def _record(self, group: str, array: Any) -> Transport:
        """Take note of an array that is given into a reduction over a group, and return the group."""
        transport = self.grid.group(group)
        if transport.size > 1 and array.nbytes:
            self.recorded[self.direction, group, array.nbytes] += 1
        return transport

    @property
    def bytes_reduced(self) -> int:
        """Bytes of all arrays that this rank has given into reductions, or sent to redistribute an array."""
        moved = sum(count * nbytes for (*_, nbytes), count in self.moved.items())
        return moved + sum(count * nbytes for (_, _, nbytes), count in self.recorded.items())
