"""The window of local contrast normalisation: its weights, and the two ways to fetch what it sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, prod
from typing import Any

from ..geometry import Box, GridShape, Window, split
from ..halo import Phase
from .layout import Shape

Halos = list[tuple[Shape, Window]]


@dataclass(frozen=True)
class LocalWindow:
    """A window with weights, that two stages slide over the image one after the other."""

    kernel_size: int | Sequence[int]
    weighting: str
    sigma: float | None
    mode: str

    def over(self, input_shape: Shape, stages: int = 1) -> Window:
        """Return what an output cell of one stage, or of both together, depends on."""
        kernel = Window(self.kernel_size, padding=0, ndim=len(input_shape) - 1).kernel
        reach = [k // 2 * stages for k in kernel]
        return Window([2 * r + 1 for r in reach], padding=reach, mode=self.mode, ndim=len(kernel))

    def taps(self, input_shape: Shape) -> list[list[float]]:
        """Return the weights along every spatial axis, each axis summing to 1."""
        return [self._taps(k) for k in self.over(input_shape).kernel]

    def _taps(self, kernel: int) -> list[float]:
        sigma = self.sigma or kernel / 4
        flat = self.weighting == "uniform"
        weights = [1.0 if flat else exp(-(((i - kernel // 2) / sigma) ** 2) / 2) for i in range(kernel)]
        return [weight / sum(weights) for weight in weights]

    def ways(self, input_shape: Shape) -> dict[str, Halos]:
        """Return what travels either way; 'wide' is left out where the image is too small to be reflected so far."""
        one, both = self.over(input_shape), self.over(input_shape, stages=2)
        found: dict[str, Halos] = {"twice": [((*input_shape[:-1], 1), one)] * 2}
        reach = [before for before, _ in both.padding]
        if self.mode == "zeros" or all(r < n for r, n in zip(reach, input_shape, strict=False)):
            found["wide"] = [(input_shape, both)]
        return found

    def fewest(self, input_shape: Shape, grid: GridShape) -> str:
        """Return the way that sends fewer numbers; of equal ones 'twice', which computes less.

        One halo of twice the radius holds all cells of one of the radius, so with two channels or more 'twice' never
        sends more; with one channel it does where tiles are so narrow that the image's border cuts the wide halo.
        """
        words = {
            way: sum(shape[-1] * halo_volume(shape[:-1], window, grid) for shape, window in halos)
            for way, halos in self.ways(input_shape).items()
        }
        return min(words, key=words.__getitem__)


def halo_volume(extent: Shape, window: Window, grid: GridShape) -> int:
    """Return the cells that all tiles together receive for a centred window of stride 1.

    Tiles are products of ranges, and so is what they need, so this takes no walk over the tiles.
    """
    needed = 1
    for n, parts, (reach, _) in zip(extent, grid.parts(len(extent)), window.padding, strict=True):
        ranges = [split(n, parts, part) for part in range(parts)]
        needed *= sum(min(hi + reach, n) - max(lo - reach, 0) for lo, hi in ranges if lo < hi)
    return needed - prod(extent)


class InView:
    """Takes the place of an exchanged array where the view holds the neighbours already; it blanks what lies outside.

    It writes into what it is given.

    Parameters
    ----------
    region : Box
        What the array covers.
    image : Box
    """

    def __init__(self, region: Box, image: Box) -> None:
        self.outside = [(slice(None), *box.relative_to(region).slices) for box in region.outside(image)]

    def get_fprop_view(self, x: Any, phase: Phase) -> Any:
        """Return x with zeros outside the image."""
        for cells in self.outside:
            x[cells] = 0
        return x

    def get_bprop_view(self, dview: Any, phase: Phase) -> Any:
        """Return the adjoint."""
        return self.get_fprop_view(dview, phase)


def middle(array: Any, inner: Any) -> tuple[slice, ...]:
    """Return where, in the spatial axes of `array`, the smaller `inner` has its place."""
    axes = list(zip(array.shape[1:-1], inner.shape[1:-1], strict=True))
    return (slice(None), *(slice((n - m) // 2, (n + m) // 2) for n, m in axes))
