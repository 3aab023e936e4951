"""Which rank holds which part of a whole array."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from ..layers.layout import Strip
from ..models.entry import Entry

BLOCK = 4 << 20  # bytes that travel at a time
Slices = tuple[slice, ...]


@dataclass(frozen=True)
class Piece:
    """This rank's part of a whole array.

    Attributes
    ----------
    name : str
    shape : tuple of int
        Of the whole array.
    array : ndarray
        This rank's part.
    places : list of list of Strip
        For each rank, where its part lies in the whole; a single one if every rank has all of it.
    """

    name: str
    shape: tuple[int, ...]
    array: Any
    places: Sequence[Sequence[Strip]]

    @classmethod
    def of(cls, entry: Entry, array: Any, group: str) -> Piece:
        """Return an array of a layer, to be named '<group>/<layer name>/<parameter>'."""
        ranks = range(entry.grid.size if entry.cut else 1)
        places = [entry.strips(rank % entry.grid.shape.tiles) for rank in ranks]
        return cls(f"{group}/{entry.full_name}", tuple(entry.parameter.shape), array, places)

    @property
    def dtype(self) -> np.dtype:
        """The array's dtype, native byte order."""
        return np.dtype(self.array.dtype)

    def blocks(self, rank: int) -> Iterator[tuple[Slices, Slices]]:
        """Yield the blocks of a rank's part: where each lies in the part, and where in the whole."""
        for here, there in self.places[rank]:
            for block in blocks(shape_of(there), max(1, BLOCK // self.dtype.itemsize)):
                yield _within(here, block), _within(there, block)

    @property
    def largest(self) -> int:
        """Bytes of the longest block that travels."""
        strips = (prod(shape_of(there)) for place in self.places[1:] for _, there in place)
        return min(BLOCK, max(strips, default=0) * self.dtype.itemsize)


def shape_of(place: Slices) -> tuple[int, ...]:
    """Return the shape of the box that slices choose."""
    return tuple(s.stop - s.start for s in place)


def _within(place: Slices, block: Slices) -> Slices:
    return tuple(slice(p.start + b.start, p.start + b.stop) for p, b in zip(place, block, strict=True))


def blocks(shape: Sequence[int], cells: int) -> Iterator[Slices]:
    """Yield boxes of at most `cells` cells, each contiguous in an array of this shape, that fill it in order."""
    if 0 in shape:
        return
    axis = next((at for at in range(len(shape)) if prod(shape[at + 1 :]) <= cells), len(shape))
    if axis == len(shape):  # a single number
        yield ()
        return
    step = max(1, cells // prod(shape[axis + 1 :]))
    rest = tuple(slice(0, n) for n in shape[axis + 1 :])
    for index in np.ndindex(*shape[:axis]):
        outer = tuple(slice(i, i + 1) for i in index)
        for lo in range(0, shape[axis], step):
            yield (*outer, slice(lo, min(lo + step, shape[axis])), *rest)
