"""Messages of more elements than an MPI call can count: counts and extents before MPI 4 are 32-bit integers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

MAX_COUNT = 2**30
"""Largest count, in elements or bytes."""


def chunk_slices(size: int, max_count: int) -> Iterator[slice]:
    """Yield slices of at most `max_count` elements that cover a flat array."""
    return (slice(first, min(first + max_count, size)) for first in range(0, size, max_count))


def create_box_datatype(cell: Any, shape: Sequence[int], strides: Sequence[int], offset: int, max_count: int) -> Any:
    """Return the committed MPI datatype of a box of cells, with no count above `max_count`.

    Parameters
    ----------
    cell : mpi4py.MPI.Datatype
    shape : sequence of int
    strides : sequence of int
        Bytes from one index of an axis to the next.
    offset : int
        Bytes from the start of the buffer to the first cell.
    """
    datatype = cell.Dup()
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        datatype = _repeat_datatype(datatype, extent, stride, max_count)
    return _free_and_return(datatype, datatype.Create_hindexed([1], [offset])).Commit()


def _repeat_datatype(item: Any, count: int, stride: int, max_count: int) -> Any:
    """Return the datatype of `count` items, `stride` bytes apart; the item is freed."""
    blocks, rest = divmod(count, max_count)
    if not blocks:
        return _free_and_return(item, item.Create_hvector(rest, 1, stride))
    after = item.Create_hvector(rest, 1, stride)
    block = _free_and_return(item, item.Create_hvector(max_count, 1, stride))
    before = _repeat_datatype(block, blocks, max_count * stride, max_count)
    datatype = item.Create_struct([1, 1], [0, blocks * max_count * stride], [before, after])
    before.Free()
    return _free_and_return(after, datatype)


def _free_and_return(old: Any, new: Any) -> Any:
    old.Free()
    return new
