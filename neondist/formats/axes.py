"""Axes of an array in a file, in stored order and channels-last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from ..errors import ConfigError, ShapeError
from ..geometry import Box

AXIS_ORDER = "NTZYXC"  # standard order: samples, time, depth, height, width, channels; unknown letters count as samples
MAX_GUESSED_CHANNELS = 4  # extent up to which an unnamed last axis may be the channel axis
BoxLike: TypeAlias = Box | Sequence[slice] | Sequence[tuple[int, int]]
Cells: TypeAlias = tuple[slice, ...]


class Axes:
    """Conversion of boxes and arrays between the axis order of a file and channels-last.

    Parameters
    ----------
    letters : str
        One letter per axis, in stored order: 'CYX'.

    Attributes
    ----------
    channels_last_letters : str
        The letters with channels last: 'YXC'. C is always present, with extent 1 if the file has no channel axis.
    """

    def __init__(self, letters: str) -> None:
        if len(set(letters)) != len(letters):
            raise ConfigError(f"axes: '{letters}' repeats a letter; give each axis its own, such as 'ZYXC'")
        self.letters = letters
        ordered = sorted(letters, key=lambda name: AXIS_ORDER.find(name))
        self._channels_last_order = [letters.index(name) for name in ordered]
        self._lacks_channel_axis = "C" not in letters
        self.channels_last_letters = "".join(ordered) + "C" * self._lacks_channel_axis

    def to_channels_last(self, stored_extents: Sequence[int]) -> tuple[int, ...]:
        """Return extents of the stored array (shape or chunks) in the order of `channels_last_letters`."""
        return (*(int(stored_extents[axis]) for axis in self._channels_last_order), *(1,) * self._lacks_channel_axis)

    def to_stored_order(self, extents: Sequence[Any]) -> tuple[Any, ...]:
        """Return extents, or slices, in stored order."""
        stored_extents: list[Any] = [None] * len(self.letters)
        for axis, extent in zip(self._channels_last_order, extents, strict=False):
            stored_extents[axis] = extent
        return tuple(stored_extents)

    def from_file(self, array: np.ndarray) -> np.ndarray:
        """Return stored cells with channels last."""
        cells = array.transpose(self._channels_last_order)
        return cells[..., None] if self._lacks_channel_axis else cells

    def to_file(self, array: np.ndarray) -> np.ndarray:
        """Return channels-last cells in stored order."""
        return (array[..., 0] if self._lacks_channel_axis else array).transpose(np.argsort(self._channels_last_order))


def guess_axes(shape: Sequence[int], where: str | Path = "") -> str:
    """Guess the axes of an array whose file does not name them; the last of three axes is C if its extent is at most 4.

    Raises
    ------
    ShapeError
        If the array has no axis, or more than five.
    """
    has_channels = len(shape) > 3 or (len(shape) == 3 and shape[-1] <= MAX_GUESSED_CHANNELS)
    defaults = {1: "X", 2: "YX", 3: "YXC" if has_channels else "NYX", 4: "NYXC", 5: "NZYXC"}
    if len(shape) not in defaults:
        prefix = f"{where}: " if str(where) else ""
        raise ShapeError(
            f"{prefix}cannot interpret an array of shape {list(shape)} as images; give one with 1 to 5 axes"
        )
    return defaults[len(shape)]


def squeeze_channels(axes: str, shape: tuple[int, ...], options: Mapping[str, Any]) -> tuple[str, tuple[int, ...]]:
    """Return axes and shape without the channel axis, if `channels` is False, it has extent 1, and others exist."""
    if options.get("channels", True) or shape[-1] != 1 or len(shape) == 1:
        return axes, shape
    return axes[:-1], shape[:-1]


def box_to_slices(box: BoxLike, shape: Sequence[int], name: str) -> Cells:
    """Return a box as slices of an array; ShapeError if the number of axes is wrong, or the box exceeds the array."""
    if isinstance(box, Box):
        bounds, ndim = list(box.axes()), box.ndim
    else:
        bounds, ndim = [_slice_bounds(part, n) for part, n in zip(box, shape, strict=False)], len(box)
    if ndim != len(shape) or not all(0 <= lo <= hi <= n for (lo, hi), n in zip(bounds, shape, strict=False)):
        raise ShapeError(
            f"{name}: box {bounds} does not fit in an array of shape {list(shape)}; give one pair of bounds"
            " within the array per axis"
        )
    return tuple(slice(int(lo), int(hi)) for lo, hi in bounds)


def relative_slices(cells: Sequence[slice], origin: Sequence[slice]) -> Cells:
    """Return slices of cells relative to the start of `origin`."""
    return tuple(slice(cut.start - base.start, cut.stop - base.start) for cut, base in zip(cells, origin, strict=True))


def _slice_bounds(axis_part: Any, extent: int) -> tuple[int, int]:
    if isinstance(axis_part, slice):
        return (0 if axis_part.start is None else axis_part.start, extent if axis_part.stop is None else axis_part.stop)
    lo, hi = axis_part
    return lo, hi
