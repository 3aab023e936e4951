"""The way back through a window: which output cells look at given input cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .box import Box
from .split import Partition, split
from .window import Window, narrowed


@dataclass(frozen=True, init=False)
class GradientWindow(Window):
    """A window that slides over the OUTPUT of `window`, and from whose view the gradient of an input cell follows.

    Its outputs are the cells of the image of `extent` that `window` slides over; cells of the view beyond the first or
    last output are zeros.
    """

    window: Window
    extent: tuple[int, ...]

    def __init__(self, window: Window, extent: Sequence[int]) -> None:
        super().__init__(1, padding=0, ndim=window.ndim)
        self._set("window", window)
        self._set("extent", tuple(extent))

    @property
    def pointwise(self) -> bool:
        """True if the window is so."""
        return self.window.pointwise

    def _fit(self, axis: int, n: int) -> int:
        return self.extent[axis]

    def needs(self, out: Box) -> Box:
        """Return the output cells of the window that look at the input cells `out`."""
        lo, hi = [], []
        window = self.window
        slides = zip(window.kernel, window.stride, window.padding, window.dilation, window.span, strict=True)
        for (a, b), (k, s, (p, _), d, span) in zip(out.axes(), slides, strict=True):
            first = -((span - 1 - a - p) // s)
            last = max(first, (b - 1 + p) // s + 1) if b > a else first
            if d > 1:

                def looks(o: int, lo: int = a + p, hi: int = b + p, s: int = s, d: int = d, k: int = k) -> bool:
                    return any(lo <= o * s + d * at < hi for at in range(k))

                first, last = narrowed(first, last, looks)
            lo.append(first)
            hi.append(last)
        return Box(tuple(lo), tuple(hi))

    def pace(self, axis: int) -> tuple[int, int]:
        """Return the inverse of the window's."""
        return 1, self.window.stride[axis]

    def along(self, axis: int) -> Window:
        """Return the window of one axis."""
        return GradientWindow(self.window.along(axis), self.extent[axis : axis + 1])

    def check(self, extent: Sequence[int]) -> None:
        """Accept every extent that the window has."""


def halo_volume(partition: Partition, window: Window) -> int:
    """Return the cells that all tiles together receive for a window of mode 'zeros'.

    Tiles are products of ranges, and so is what they need, so this takes no walk over the tiles.
    """
    outputs = window.output_extent(partition.extent)
    needed = kept = 1
    for axis, (n, out, parts) in enumerate(zip(partition.extent, outputs, partition.parts, strict=True)):
        alone, needs, keeps = window.along(axis), 0, 0
        for part in range(parts):
            (lo, hi), (start, stop) = next(alone.needs(_range(out, parts, part)).axes()), split(n, parts, part)
            needs += max(0, min(hi, n) - max(lo, 0))
            keeps += max(0, min(hi, stop) - max(lo, start))
        needed, kept = needed * needs, kept * keeps
    return needed - kept


def _range(n: int, parts: int, part: int) -> Box:
    lo, hi = split(n, parts, part)
    return Box((lo,), (hi,))
