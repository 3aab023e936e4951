"""Axes of an array in a file: stored order and channels-last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from ..errors import ConfigError, ShapeError
from ..geometry import Box

ORDER = "NTZYXC"
"""standard order: samples, time, depth, height, width, channels; unknown letters count as samples"""
BoxLike: TypeAlias = Box | Sequence[slice] | Sequence[tuple[int, int]]
Cells: TypeAlias = tuple[slice, ...]


class Axes:
    """Conversion of boxes and arrays between the axis order of a file and channels-last.

    Parameters
    ----------
    stored : str
        One letter per axis, in stored order: 'CYX'.

    Attributes
    ----------
    names : str
        The same, channels-last: 'YXC'. C is always present, with extent 1 if the file has no channel axis.
    """

    def __init__(self, stored: str) -> None:
        if len(set(stored)) != len(stored):
            raise ConfigError(f"axes: '{stored}' repeats a letter; give each axis its own, such as 'ZYXC'")
        self.stored = stored
        ordered = sorted(stored, key=lambda name: ORDER.find(name))
        self._order = [stored.index(name) for name in ordered]
        self._no_channels = "C" not in stored
        self.names = "".join(ordered) + "C" * self._no_channels

    def extents(self, stored: Sequence[int]) -> tuple[int, ...]:
        """Return extents of the stored array (shape or chunks) in the order of `names`."""
        return (*(int(stored[axis]) for axis in self._order), *(1,) * self._no_channels)

    def to_stored(self, extents: Sequence[Any]) -> tuple[Any, ...]:
        """Return extents, or slices, in stored order."""
        stored: list[Any] = [None] * len(self.stored)
        for axis, extent in zip(self._order, extents, strict=False):
            stored[axis] = extent
        return tuple(stored)

    def from_file(self, array: np.ndarray) -> np.ndarray:
        """Return stored cells with channels last."""
        cells = array.transpose(self._order)
        return cells[..., None] if self._no_channels else cells

    def to_file(self, array: np.ndarray) -> np.ndarray:
        """Return channels-last cells in stored order."""
        return (array[..., 0] if self._no_channels else array).transpose(np.argsort(self._order))


def guess(shape: Sequence[int], where: str | Path = "") -> str:
    """Guess the axes of an array whose file does not name them; of three or more, a last one of extent <= 4 is C.

    Raises
    ------
    ShapeError
        If it has no axis, or more than five.
    """
    has_channels = len(shape) > 3 or (len(shape) == 3 and shape[-1] <= 4)
    defaults = {1: "X", 2: "YX", 3: "YXC" if has_channels else "NYX", 4: "NYXC", 5: "NZYXC"}
    if len(shape) not in defaults:
        prefix = f"{where}: " if str(where) else ""
        raise ShapeError(
            f"{prefix}cannot interpret an array of shape {list(shape)} as images; give one with 1 to 5 axes"
        )
    return defaults[len(shape)]


def drop_channel_axis(axes: str, shape: tuple[int, ...], options: Mapping[str, Any]) -> tuple[str, tuple[int, ...]]:
    """Return axes and shape without the channel axis, if it has extent 1 and the option `channels` is False."""
    if options.get("channels", True) or shape[-1] != 1:
        return axes, shape
    return axes[:-1], shape[:-1]


def box_to_slices(box: BoxLike, shape: Sequence[int], name: str) -> Cells:
    """Return a box as slices of an array; ShapeError if it has the wrong number of axes, or extends beyond it."""
    pairs = (
        list(box.axes()) if isinstance(box, Box) else [_bounds(part, n) for part, n in zip(box, shape, strict=False)]
    )
    ndim = box.ndim if isinstance(box, Box) else len(box)
    if ndim != len(shape) or not all(0 <= lo <= hi <= n for (lo, hi), n in zip(pairs, shape, strict=False)):
        raise ShapeError(
            f"{name}: box {pairs} does not fit in an array of shape {list(shape)}; give its bounds by axis"
        )
    return tuple(slice(int(lo), int(hi)) for lo, hi in pairs)


def relative(cells: Sequence[slice], origin: Sequence[slice]) -> Cells:
    """Return slices of cells relative to the start of `origin`."""
    return tuple(slice(cut.start - base.start, cut.stop - base.start) for cut, base in zip(cells, origin, strict=True))


def _bounds(part: Any, n: int) -> tuple[int, int]:
    if isinstance(part, slice):
        return (0 if part.start is None else part.start, n if part.stop is None else part.stop)
    lo, hi = part
    return lo, hi
