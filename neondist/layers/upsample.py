"""Upsampling."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import floor
from typing import Any

from ..errors import ConfigError
from ..geometry import Upsampling
from ..halo import ExchangePolicy
from ..terminal.console import counted
from .base import Dist, Layer, Shape
from .context import StepContext

INTERPOLATION_MODES = ("nearest", "bilinear")


class UpsampleLayer(Layer):
    """Upsampling of every spatial axis by an integer factor: (N, *spatial, C) to (N, *spatial * factor, C) per tile.

    Equivalent to torch.nn.Upsample with align_corners=False.

    Parameters
    ----------
    factor : int or one per axis
    mode : {'nearest', 'bilinear'}
        'bilinear' interpolates linearly along each axis, for any number of axes.
    scheme : ExchangePolicy or str, optional
        Border scheme, such as 'tower' or Tower(fill='reflect'). Default: the scheme of the model.
    """

    needs_image = True
    saves_input = saves_output = False
    saved_bytes_and_elements = (0, 0)

    window: Upsampling

    def __init__(
        self,
        factor: int | Sequence[int] = 2,
        mode: str = "nearest",
        *,
        scheme: ExchangePolicy | str | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name, scheme=scheme)
        factors = (factor,) if isinstance(factor, int) else tuple(factor)
        if any(f < 1 for f in factors):
            raise ConfigError(f"factor {factor}: expected integers of at least 1")
        if mode not in INTERPOLATION_MODES:
            raise ConfigError(f"mode '{mode}': choose from {', '.join(INTERPOLATION_MODES)}")
        self.factor, self.mode = factor, mode

    def window_for(self, input_shape: Shape) -> Upsampling:
        """Return the window of input cells that an upsampled cell reads."""
        ndim = len(input_shape) - 1
        factor = (self.factor,) * ndim if isinstance(self.factor, int) else tuple(self.factor)
        if len(factor) != ndim:
            raise ConfigError(
                f"factor {self.factor}: expected one integer, or one for each of {counted(ndim, 'axis', 'axes')}"
            )
        return Upsampling(factor, self.mode == "bilinear")

    def forward(self, ctx: StepContext, view: Any) -> Any:
        """Return the upsampled cells, one axis after the other."""
        for axis in range(1, view.ndim - 1):
            shape = list(view.shape)
            shape[axis] = ctx.output_box.shape[axis - 1]
            y = ctx.xp.zeros(shape, view.dtype)
            for out, cells, weight in self._interpolation_terms(ctx, axis):
                y[out] += view[cells] * view.dtype.type(weight)
            view = y
        return view

    def backward(self, ctx: StepContext, dy: Any) -> Any:
        """Return the adjoint; axes are processed in reverse order."""
        for axis in range(dy.ndim - 2, 0, -1):
            shape = list(dy.shape)
            shape[axis] = ctx.input_box.shape[axis - 1]
            dview = ctx.xp.zeros(shape, dy.dtype)
            for out, cells, weight in self._interpolation_terms(ctx, axis):
                dview[cells] += dy[out] * dy.dtype.type(weight)
            dy = dview
        return dy

    def _interpolation_terms(self, ctx: StepContext, axis: int) -> Iterator[tuple[tuple, tuple, float]]:
        """Yield (output cells, view cells, weight): every factor-th output cell reads neighbouring input cells."""
        window, spatial_axis, box = self.window, axis - 1, ctx.output_box
        factor, view_start = window.factor[spatial_axis], ctx.input_box.lo[spatial_axis]
        lo, n = box.lo[spatial_axis], box.shape[spatial_axis]
        if box.empty:
            return
        leading = (slice(None),) * axis
        for phase in range(min(factor, n)):
            num_cells, first_cell = -(-(n - phase) // factor), window.source_cell(spatial_axis, lo + phase) - view_start
            source_position = (2 * (lo + phase) + 1) / (2 * factor) - 0.5
            right_weight = source_position - floor(source_position) if window.linear else 0.0
            out_slices = (*leading, slice(phase, n, factor))
            yield out_slices, (*leading, slice(first_cell, first_cell + num_cells)), 1.0 - right_weight
            if right_weight:
                yield out_slices, (*leading, slice(first_cell + 1, first_cell + 1 + num_cells)), right_weight


class UpsampleLayerDist(Dist, UpsampleLayer):
    """Upsampling over tiles."""
