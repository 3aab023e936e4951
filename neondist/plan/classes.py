"""Equivalence classes of tiles that differ only in position, so that one tile represents its class.

Tiles and the pieces that they exchange are products of ranges, so thousands of tiles fall into a few classes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeVar

import numpy as np

from ..geometry import PartClassKeys, Partition

T = TypeVar("T")


class TileClasses(NamedTuple):
    """The classes of the tiles of a grid.

    Attributes
    ----------
    class_by_tile : array (tiles,)
        The number of each tile's class.
    representatives : list of int
        The first tile of each class.
    """

    class_by_tile: np.ndarray
    representatives: list[int]

    def per_tile(self, compute: Callable[[int], T]) -> list[T]:
        """Return a value for every tile, computed once for each class."""
        values = [compute(tile) for tile in self.representatives]
        return [values[number] for number in self.class_by_tile.tolist()]


def tile_classes(tiles: int, image_keys: Iterable[PartClassKeys], extra_keys: Sequence[np.ndarray] = ()) -> TileClasses:
    """Group tiles, numbered row-major, into the fewest classes whose members have the same keys.

    Parameters
    ----------
    image_keys : iterable of PartClassKeys
        For each image that is partitioned into these tiles, the keys of its parts along each axis.
    extra_keys : sequence of arrays (tiles,)
        Further numbers that distinguish tiles.
    """
    keys_by_parts: dict[tuple[int, ...], list[list[list[Hashable]]]] = {}
    for entry in image_keys:
        if entry.by_axis:
            keys_by_axis = keys_by_parts.setdefault(entry.parts, [[[] for _ in range(parts)] for parts in entry.parts])
            for parts_of_axis, kinds_of_axis in zip(keys_by_axis, entry.by_axis, strict=True):
                for part, kind in zip(parts_of_axis, kinds_of_axis, strict=True):
                    part.append(kind)
    codes = np.zeros(tiles, np.int64)
    for parts, keys_by_axis in keys_by_parts.items():
        joint_codes = np.zeros((), np.int64)
        for count, keys in zip(parts, keys_by_axis, strict=True):
            joint_codes = joint_codes[..., None] * count + _codes_of_keys(tuple(key) for key in keys)
        codes = _combine_codes(codes, joint_codes.reshape(-1))
    for tile_codes in extra_keys:
        codes = _combine_codes(codes, tile_codes)
    _, first_tiles, class_by_tile = np.unique(codes, return_index=True, return_inverse=True)
    return TileClasses(class_by_tile.reshape(-1), first_tiles.tolist())


@lru_cache(maxsize=256)
def part_class_keys(cells: Partition) -> PartClassKeys:
    """Return the keys of parts along each axis: extents, and whether they touch the ends of the image."""
    axes = [[(hi - lo, lo == 0, hi == n) for lo, hi in cells.ranges_along(a)] for a, n in enumerate(cells.extent)]
    return PartClassKeys(cells.parts[: len(axes)], axes)


def tile_keys_from_strips(strip_keys: PartClassKeys, strips: int) -> PartClassKeys:
    """Return the keys of tiles, given those of their strips: `strips` strips per tile along the first axis."""
    first_axis, *other_axes = strip_keys.by_axis
    tile_keys = [tuple(first_axis[at : at + strips]) for at in range(0, len(first_axis), strips)]
    return PartClassKeys((len(tile_keys), *strip_keys.parts[1:]), [tile_keys, *other_axes])


def _combine_codes(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return codes that are equal exactly where both inputs are equal."""
    (_, a), (second_values, b) = (np.unique(codes, return_inverse=True) for codes in (first, second))
    combined: np.ndarray = a.reshape(-1) * len(second_values) + b.reshape(-1)
    return combined


def _codes_of_keys(keys: Iterable[Hashable]) -> np.ndarray:
    """Return an integer code for each key; equal keys get equal codes."""
    code_of_key: dict[Hashable, int] = {}
    return np.array([code_of_key.setdefault(key, len(code_of_key)) for key in keys], np.int64)
