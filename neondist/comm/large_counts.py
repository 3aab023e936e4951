"""Messages of more elements than an MPI call can count: before MPI 4 counts are 32-bit integers, and so are extents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

MOST = 2**30
"""Elements, or bytes, that one count stands for at most."""


def chunks(size: int, most: int) -> Iterator[slice]:
    """Yield the slices of at most `most` elements that a flat array is made of."""
    return (slice(first, min(first + most, size)) for first in range(0, size, most))


def box_type(cell: Any, shape: Sequence[int], strides: Sequence[int], offset: int, most: int) -> Any:
    """Return the MPI datatype of a box of cells, committed; no count in it is above `most`.

    Parameters
    ----------
    cell : mpi4py.MPI.Datatype
    shape : sequence of int
    strides : sequence of int
        Bytes from one index of an axis to the next.
    offset : int
        Bytes from the start of the buffer to the first cell.
    """
    found = cell.Dup()
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        found = _repeated(found, extent, stride, most)
    return _replaced(found, found.Create_hindexed([1], [offset])).Commit()


def _repeated(item: Any, count: int, stride: int, most: int) -> Any:
    """Return the datatype of so many items, so many bytes apart; the item is freed."""
    blocks, rest = divmod(count, most)
    if not blocks:
        return _replaced(item, item.Create_hvector(rest, 1, stride))
    after = item.Create_hvector(rest, 1, stride)
    block = _replaced(item, item.Create_hvector(most, 1, stride))
    before = _repeated(block, blocks, most * stride, most)
    found = item.Create_struct([1, 1], [0, blocks * most * stride], [before, after])
    before.Free()
    return _replaced(after, found)


def _replaced(old: Any, new: Any) -> Any:
    old.Free()
    return new
