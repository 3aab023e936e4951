"""The axes of an array in a file, as they lie there and channels-last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from ..errors import ConfigError, ShapeError
from ..geometry import Box

ORDER = "NTZYXC"
"""what comes first and what last: samples, time, depth, height, width, channels; unknown letters count as samples"""
BoxLike: TypeAlias = Box | Sequence[slice] | Sequence[tuple[int, int]]
Cells: TypeAlias = tuple[slice, ...]


class Axes:
    """From boxes of an array with channels last to those of the same array as it lies in its file, and back.

    Parameters
    ----------
    stored : str
        A letter an axis, as they lie in the file: 'CYX'.

    Attributes
    ----------
    names : str
        The same channels-last: 'YXC'. C is always there, of extent 1 where the file has none.
    """

    def __init__(self, stored: str) -> None:
        if len(set(stored)) != len(stored):
            raise ConfigError(f"axes: '{stored}' repeats a letter; give each axis its own, such as 'ZYXC'")
        self.stored = stored
        kept = sorted(stored, key=lambda name: ORDER.find(name))
        self._order = [stored.index(name) for name in kept]
        self._no_channels = "C" not in stored
        self.names = "".join(kept) + "C" * self._no_channels

    def extents(self, stored: Sequence[int]) -> tuple[int, ...]:
        """Return extents of the stored array (its shape, its chunks) in the order of `names`."""
        return (*(int(stored[axis]) for axis in self._order), *(1,) * self._no_channels)

    def to_stored(self, extents: Sequence[Any]) -> tuple[Any, ...]:
        """Return extents, or slices, in the order of the file."""
        found: list[Any] = [None] * len(self.stored)
        for axis, extent in zip(self._order, extents, strict=False):
            found[axis] = extent
        return tuple(found)

    def from_file(self, array: np.ndarray) -> np.ndarray:
        """Return cells as they lie in the file with channels last."""
        found = array.transpose(self._order)
        return found[..., None] if self._no_channels else found

    def to_file(self, array: np.ndarray) -> np.ndarray:
        """Return cells with channels last as they lie in the file."""
        return (array[..., 0] if self._no_channels else array).transpose(np.argsort(self._order))


def guess(shape: Sequence[int], where: str | Path = "") -> str:
    """Return the axes of an array whose file does not name them: a last axis of up to 4 of three or more is channels.

    Raises
    ------
    ShapeError
        It has no axis, or more than five.
    """
    has_channels = len(shape) > 3 or (len(shape) == 3 and shape[-1] <= 4)
    known = {1: "X", 2: "YX", 3: "YXC" if has_channels else "NYX", 4: "NYXC", 5: "NZYXC"}
    if len(shape) not in known:
        start = f"{where}: " if str(where) else ""
        raise ShapeError(
            f"{start}cannot interpret an array of shape {list(shape)} as images; give one with 1 to 5 axes"
        )
    return known[len(shape)]


def bare(axes: str, shape: tuple[int, ...], options: Mapping[str, Any]) -> tuple[str, tuple[int, ...]]:
    """Return axes and shape without a single channel, if the options say that it shall have no axis of its own."""
    if options.get("channels", True) or shape[-1] != 1:
        return axes, shape
    return axes[:-1], shape[:-1]


def cells_of(box: BoxLike, shape: Sequence[int], what: str) -> Cells:
    """Return a box as slices of an array; ShapeError if it is none, or reaches beyond it."""
    pairs = (
        list(box.axes()) if isinstance(box, Box) else [_bounds(part, n) for part, n in zip(box, shape, strict=False)]
    )
    given = box.ndim if isinstance(box, Box) else len(box)
    if given != len(shape) or not all(0 <= lo <= hi <= n for (lo, hi), n in zip(pairs, shape, strict=False)):
        raise ShapeError(
            f"{what}: box {pairs} does not fit in an array of shape {list(shape)}; give its bounds by axis"
        )
    return tuple(slice(int(lo), int(hi)) for lo, hi in pairs)


def relative(cells: Sequence[slice], origin: Sequence[slice]) -> Cells:
    """Return where cells lie in an array of those from `origin` on."""
    return tuple(slice(cut.start - of.start, cut.stop - of.start) for cut, of in zip(cells, origin, strict=True))


def _bounds(part: Any, n: int) -> tuple[int, int]:
    if isinstance(part, slice):
        return (0 if part.start is None else part.start, n if part.stop is None else part.stop)
    lo, hi = part
    return lo, hi
