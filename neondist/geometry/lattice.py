"""Lattices: equally spaced cells along every axis, as used by windows with strides or dilation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from .box import Box

Range = tuple[int, int]
"""Half-open range [lo, hi) of cells of one axis."""
AxisCells = tuple[range, ...]
"""Cells of one axis: disjoint ranges with steps, ordered by their first cells."""


@dataclass(frozen=True)
class Lattice:
    """The cells whose coordinate on every axis a is in ranges[a]; steps are positive."""

    ranges: tuple[range, ...]

    @classmethod
    def of(cls, box: Box) -> Lattice:
        """Return all cells of a box."""
        return cls(tuple(range(lo, lo + n) for lo, n in zip(box.lo, box.shape, strict=True)))

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of cells along every axis."""
        return tuple(map(len, self.ranges))

    @property
    def size(self) -> int:
        """Number of cells."""
        return prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The cells as an index into an array that starts at cell 0."""
        return tuple(to_slice(cells) for cells in self.ranges)

    @property
    def hull(self) -> Box:
        """The smallest box around the cells."""
        return Box.from_ranges((cells[0], cells[-1] + 1) if cells else (cells.start,) * 2 for cells in self.ranges)

    def shift(self, offset: Sequence[int]) -> Lattice:
        """Return the cells moved by `offset`."""
        return Lattice(tuple(shift_range(cells, by) for cells, by in zip(self.ranges, offset, strict=True)))

    def relative_to(self, origin: Box) -> Lattice:
        """Return the cells in the coordinates of an array whose first cell is origin.lo."""
        return self.shift([-lo for lo in origin.lo])


def to_slice(cells: range) -> slice:
    """Return a range as a slice; a step of 1 is omitted."""
    return slice(cells.start, cells.stop, cells.step) if cells.step > 1 else slice(cells.start, cells.stop)


def shift_range(cells: range, offset: int) -> range:
    """Return a range shifted by `offset` cells."""
    return range(cells.start + offset, cells.stop + offset, cells.step)


def clip_ranges(cells: Iterable[range], lo: int, hi: int) -> Iterator[range]:
    """Yield the non-empty intersections of ranges with [lo, hi)."""
    for whole in cells:
        stride = whole.step
        first = whole.start + max(0, -((whole.start - lo) // stride)) * stride
        clipped = range(first, min(whole.stop, hi), stride)
        if clipped:
            yield clipped


def hull_of(cells: AxisCells) -> Range:
    """Return the smallest range that contains all cells."""
    return (cells[0].start, max(part[-1] for part in cells) + 1) if cells else (0, 0)


def group_into_ranges(indices: Sequence[int]) -> AxisCells:
    """Return ranges that contain exactly these sorted, distinct indices; only a few if the indices are regular."""
    if indices and indices[-1] - indices[0] == len(indices) - 1:
        return (range(indices[0], indices[-1] + 1),)
    run_starts = [at for at, i in enumerate(indices) if not at or indices[at - 1] != i - 1]
    runs = [(indices[a], b - a) for a, b in pairwise([*run_starts, len(indices)])]
    ranges: list[range] = []
    first_run = 0
    while first_run < len(runs):
        start, length = runs[first_run]
        last, step = first_run, runs[first_run + 1][0] - start if first_run + 1 < len(runs) else 0
        while last + 1 < len(runs) and runs[last + 1] == (runs[last][0] + step, length):
            last += 1
        if last + 1 - first_run > length:  # one range for each cell of a run
            ranges += [range(start + i, runs[last][0] + i + 1, step if last > first_run else 1) for i in range(length)]
        else:
            last = first_run
            ranges.append(range(start, start + length))
        first_run = last + 1
    return tuple(ranges)


def cells_used_by(lo: int, hi: int, kernel: int, stride: int, padding: int, dilation: int) -> AxisCells:
    """Return the cells of an axis, inside the image or not, that the outputs [lo, hi) of a window depend on."""
    if lo >= hi:
        return ()
    first, steps = lo * stride - padding, (hi - lo - 1) * stride
    if (dilation == 1 and kernel >= stride) or (dilation <= hi - lo and stride == 1):
        return (range(first, first + steps + dilation * (kernel - 1) + 1),)
    if kernel == 1:
        return (range(first, first + steps + 1, stride),)
    taps = (range(at, at + steps + 1, stride) for at in range(first, first + dilation * (kernel - 1) + 1, dilation))
    return group_into_ranges(sorted({cell for tap in taps for cell in tap}))


def outputs_using(lo: int, hi: int, kernel: int, stride: int, padding: int, dilation: int) -> AxisCells:
    """Return the outputs that depend on the cells [lo, hi), including positions outside the valid output range."""
    outputs: list[range] = []
    for tap in reversed(range(kernel)) if lo < hi else ():
        tap_offset = padding - dilation * tap
        first_output, stop_output = -(-(lo + tap_offset) // stride), (hi - 1 + tap_offset) // stride + 1
        if outputs and first_output <= outputs[-1].stop:
            outputs[-1] = range(outputs[-1].start, max(stop_output, outputs[-1].stop))
        elif first_output < stop_output:
            outputs.append(range(first_output, stop_output))
    return tuple(outputs)
