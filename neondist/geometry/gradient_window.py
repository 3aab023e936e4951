"""The way back through a window: which output cells look at given input cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .box import Box
from .lattice import Cells, clip_ranges, outputs_using
from .split import Partition, split
from .window import Window


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
        """Return the output cells of the window that look at the input cells `out`, from the first to the last."""
        lo, hi = [], []
        for axis, ends in enumerate(out.axes()):
            found = self.along(axis).used_cells(*ends)
            lo.append(found[0].start if found else 0)
            hi.append(found[-1].stop if found else 0)
        return Box(tuple(lo), tuple(hi))

    def used_cells(self, lo: int, hi: int) -> Cells:
        """Return the outputs of a window of one axis that are computed from the input cells [lo, hi)."""
        window = self.window
        (kernel,), (stride,), ((before, _),), (dilation,) = (
            window.kernel, window.stride, window.padding, window.dilation
        )  # fmt: skip
        return outputs_using(lo, hi, kernel, stride, before, dilation)

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
            seen = alone.used_cells(*split(out, parts, part))
            needs += sum(map(len, clip_ranges(seen, 0, n)))
            keeps += sum(map(len, clip_ranges(seen, *split(n, parts, part))))
        needed, kept = needed * needs, kept * keeps
    return needed - kept
