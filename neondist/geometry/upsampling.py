"""Window of an upsampling layer, which advances by a fraction of a cell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .lattice import AxisCells
from .window import Window


@dataclass(frozen=True, init=False)
class Upsampling(Window):
    """Window in which output o reads input cell o // factor (nearest), or the two cells around its centre (linear).

    Centres are aligned as in PyTorch with align_corners=False: output o lies at input (o + 1/2) / factor - 1/2.
    """

    factor: tuple[int, ...]
    linear: bool

    def __init__(self, factor: Sequence[int], linear: bool) -> None:
        super().__init__(2 if linear else 1, padding=0, mode="replicate", ndim=len(factor))
        self._set("factor", tuple(factor))
        self._set("linear", linear)

    @property
    def pointwise(self) -> bool:
        """Whether every output cell depends only on the input cell at the same position."""
        return super().pointwise and all(factor == 1 for factor in self.factor)

    def _output_extent_along(self, axis: int, n: int) -> int:
        return n * self.factor[axis]

    def used_cells(self, lo: int, hi: int) -> AxisCells:
        """Return the cells that outputs [lo, hi) of one axis read; if linear, some may lie outside the image."""
        return (range(self.source_cell(0, lo), self.source_cell(0, hi - 1) + self.kernel[0]),) if lo < hi else ()

    def source_cell(self, axis: int, output_cell: int) -> int:
        """Return the first input cell that an output cell reads."""
        f = self.factor[axis]
        return (2 * output_cell + 1 - f) // (2 * f) if self.linear else output_cell // f

    def scale_factor(self, axis: int) -> tuple[int, int]:
        """Return (1, factor)."""
        return 1, self.factor[axis]

    def axis_window(self, axis: int) -> Window:
        """Return the window of one axis."""
        return Upsampling(self.factor[axis : axis + 1], self.linear)

    def check(self, extent: Sequence[int]) -> None:
        """Accept every extent."""
