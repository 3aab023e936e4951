"""Messages with more elements than an MPI call can count: before MPI 4, counts and extents are 32-bit integers."""

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


def _repeat_datatype(item_type: Any, count: int, stride: int, max_count: int) -> Any:
    """Return the datatype of `count` items, `stride` bytes apart; `item_type` is freed."""
    num_blocks, remainder = divmod(count, max_count)
    if not num_blocks:
        return _free_and_return(item_type, item_type.Create_hvector(remainder, 1, stride))
    remainder_type = item_type.Create_hvector(remainder, 1, stride)
    block_type = _free_and_return(item_type, item_type.Create_hvector(max_count, 1, stride))
    blocks_type = _repeat_datatype(block_type, num_blocks, max_count * stride, max_count)
    datatype = item_type.Create_struct([1, 1], [0, num_blocks * max_count * stride], [blocks_type, remainder_type])
    blocks_type.Free()
    return _free_and_return(remainder_type, datatype)


def _free_and_return(old: Any, new: Any) -> Any:
    old.Free()
    return new
