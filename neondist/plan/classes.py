"""Classes of tiles that differ in nothing but their place: what is asked of one tile of a class holds for all.

Tiles are a product of ranges, and so are the pieces that they exchange; of thousands of tiles, few differ.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeVar

import numpy as np

from ..geometry import Kinds, Partition

T = TypeVar("T")


class TileClasses(NamedTuple):
    """The classes of the tiles of a grid.

    Attributes
    ----------
    of : array (tiles,)
        The number of each tile's class.
    tiles : list of int
        The first tile of each class.
    counts : list of int
        Tiles in each class.
    """

    of: np.ndarray
    tiles: list[int]
    counts: list[int]

    def each(self, value: Callable[[int], T]) -> list[T]:
        """Return a value for every tile, computed once for each class."""
        found = [value(tile) for tile in self.tiles]
        return [found[number] for number in self.of.tolist()]


def classes_of(tiles: int, kinds: Iterable[Kinds], apart: Sequence[np.ndarray] = ()) -> TileClasses:
    """Return the coarsest classes of so many tiles, numbered row-major, whose parts are of the same kinds.

    Parameters
    ----------
    kinds : iterable of Kinds
        Of any cuts of images into so many tiles.
    apart : sequence of arrays (tiles,)
        Numbers that tell tiles apart beside these.
    """
    axes: dict[tuple[int, ...], list[list[list[Hashable]]]] = {}
    for one in kinds:
        if one.axes:
            found = axes.setdefault(one.parts, [[[] for _ in range(parts)] for parts in one.parts])
            for mine, theirs in zip(found, one.axes, strict=True):
                for part, kind in zip(mine, theirs, strict=True):
                    part.append(kind)
    codes = np.zeros(tiles, np.int64)
    for parts, found in axes.items():
        whole = np.zeros((), np.int64)
        for count, keys in zip(parts, found, strict=True):
            whole = whole[..., None] * count + _numbered(tuple(key) for key in keys)
        codes = _joined(codes, whole.reshape(-1))
    for numbers in apart:
        codes = _joined(codes, numbers)
    _, first, of, counts = np.unique(codes, return_index=True, return_inverse=True, return_counts=True)
    return TileClasses(of.reshape(-1), first.tolist(), counts.tolist())


@lru_cache(maxsize=256)
def cells_kinds(cells: Partition) -> Kinds:
    """Return the extent of each part along each axis, and at which ends of the image it is."""
    axes = [
        [(hi - lo, lo == 0, hi == n) for lo, hi in (cells.range(axis, part) for part in range(cells.parts[axis]))]
        for axis, n in enumerate(cells.extent)
    ]
    return Kinds(cells.parts[: len(axes)], axes)


def of_strips(kinds: Kinds, strips: int) -> Kinds:
    """Return the kinds of tiles, given those of their strips, so many along the first axis of each."""
    first, *others = kinds.axes
    tiles = [tuple(first[at : at + strips]) for at in range(0, len(first), strips)]
    return Kinds((len(tiles), *kinds.parts[1:]), [tiles, *others])


def _joined(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return numbers that are equal where both are."""
    (_, a), (values, b) = (np.unique(codes, return_inverse=True) for codes in (one, other))
    found: np.ndarray = a.reshape(-1) * len(values) + b.reshape(-1)
    return found


def _numbered(keys: Iterable[Hashable]) -> np.ndarray:
    """Return a number for each key, the same where keys are equal."""
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)
