"""Messages of more elements than an MPI call can count: counts and extents before MPI 4 are 32-bit integers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

MOST = 2**30
"""Largest count, in elements or bytes."""


def chunks(size: int, most: int) -> Iterator[slice]:
    """Yield slices of at most `most` elements that cover a flat array."""
    return (slice(first, min(first + most, size)) for first in range(0, size, most))


def box_type(cell: Any, shape: Sequence[int], strides: Sequence[int], offset: int, most: int) -> Any:
    """Return the committed MPI datatype of a box of cells, with no count above `most`.

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
        datatype = _repeat(datatype, extent, stride, most)
    return _replace(datatype, datatype.Create_hindexed([1], [offset])).Commit()


def _repeat(item: Any, count: int, stride: int, most: int) -> Any:
    """Return the datatype of `count` items, `stride` bytes apart; the item is freed."""
    blocks, rest = divmod(count, most)
    if not blocks:
        return _replace(item, item.Create_hvector(rest, 1, stride))
    after = item.Create_hvector(rest, 1, stride)
    block = _replace(item, item.Create_hvector(most, 1, stride))
    before = _repeat(block, blocks, most * stride, most)
    datatype = item.Create_struct([1, 1], [0, blocks * most * stride], [before, after])
    before.Free()
    return _replace(after, datatype)


def _replace(old: Any, new: Any) -> Any:
    old.Free()
    return new
