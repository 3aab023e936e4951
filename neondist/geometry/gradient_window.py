"""Adjoint of a window: the output cells that depend on given input cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .lattice import AxisCells, outputs_using
from .window import Window


@dataclass(frozen=True, init=False)
class GradientWindow(Window):
    """Window over the OUTPUT of `window` whose view determines the gradient of an input cell.

    The outputs of this window are the cells of the image, of shape `extent`, over which `window` slides; cells of the
    view beyond the first or last output of `window` are zero.
    """

    window: Window
    extent: tuple[int, ...]

    def __init__(self, window: Window, extent: Sequence[int]) -> None:
        super().__init__(1, padding=0, ndim=window.ndim)
        self._set("window", window)
        self._set("extent", tuple(extent))

    @property
    def pointwise(self) -> bool:
        """Whether the window is pointwise."""
        return self.window.pointwise

    def _output_extent_along(self, axis: int, n: int) -> int:
        return self.extent[axis]

    def used_cells(self, lo: int, hi: int) -> AxisCells:
        """Return the outputs of a window of one axis that depend on the input cells [lo, hi)."""
        window = self.window
        (kernel,), (stride,), ((before, _),), (dilation,) = (
            window.kernel, window.stride, window.padding, window.dilation
        )  # fmt: skip
        return outputs_using(lo, hi, kernel, stride, before, dilation)

    def scale_factor(self, axis: int) -> tuple[int, int]:
        """Return the inverse of the window's scale factor."""
        return 1, self.window.stride[axis]

    def axis_window(self, axis: int) -> Window:
        """Return the window of one axis."""
        return GradientWindow(self.window.axis_window(axis), self.extent[axis : axis + 1])

    def check(self, extent: Sequence[int]) -> None:
        """Accept every extent."""
