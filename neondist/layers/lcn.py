"""Local contrast normalisation."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, prod
from typing import Any, Literal

import numpy as np

from ..errors import ConfigError, ShapeError
from ..geometry import Box, GridShape, Window
from ..halo import ExchangePolicy, GlobalArray
from ..registry.ranges import Positive
from ..terminal.console import counted
from .base import Dist, Layer, Shape
from .context import StepContext
from .lcn_window import HaloShapesAndWindows, LCNWindow, LocalArray, centred_slices
from .reduction import Reduction

_MAX_NOISE_ULPS = 8
"""Deviations of up to this many rounding units of the mean count as 0."""


class LCNLayer(Layer):
    """v = x - local mean of x, y = v / max(c, local deviation) (Jarrett et al. 2009, Le et al. 2012).

    The mean is a weighted mean over a window and all channels, with weights that sum to 1; the deviation is the root of
    the same mean of v². Input and output (N, *spatial, C) per tile.

    A cell depends on its neighbours only through their channel means, first of x and then of v². Therefore two halos of
    one channel suffice ('twice'), or one halo of all channels and twice the radius, from which each rank computes its
    neighbours' v² ('wide'). Both methods give the same results.

    Parameters
    ----------
    kernel_size : int or one per axis
        Extent of the window; odd, so that the window has a centre.
    window : {'gaussian', 'uniform'}
    sigma : float, optional
        The Gaussian's standard deviation in cells; default: a quarter of kernel_size.
    padding_mode : {'zeros', 'reflect'}
        Outside the image both x and v are 0, or both are reflected.
    min_deviation : float or 'mean'
        The constant c; 'mean': each sample's mean deviation over the whole image (its gradient is exact, too).
    halo : {'auto', 'twice', 'wide'}
        'auto' selects the method that sends fewer bytes on this grid.
    scheme : ExchangePolicy or str, optional
        Border scheme, such as 'tower' or Tower(fill='reflect'). Default: the scheme of the model.
    """

    saves_input = saves_output = False
    saved_bytes_and_elements = (0, 1)
    recompute_blocker = "its two stages exchange means"
    views_receptive_window_in_strips = True

    def __init__(
        self,
        kernel_size: int | Sequence[int] = 9,
        *,
        window: Literal["gaussian", "uniform"] = "gaussian",
        sigma: Positive | None = None,
        min_deviation: Positive | Literal["mean"] = 1.0,
        halo: Literal["auto", "twice", "wide"] = "auto",
        padding_mode: Literal["zeros", "reflect"] = "zeros",
        scheme: ExchangePolicy | str | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name, scheme=scheme)
        if any(k % 2 == 0 for k in Window(kernel_size, padding=0).kernel):
            raise ConfigError(f"kernel_size {kernel_size}: expected odd integers, so that a window has a centre")
        if sigma is not None and window != "gaussian":
            raise ConfigError(f"sigma {sigma} needs window 'gaussian'; leave sigma out, or change the window")
        self.local_window = LCNWindow(kernel_size, window, sigma, padding_mode)
        self.min_deviation, self.halo = min_deviation, halo
        self.uses_mean_deviation = min_deviation == "mean"

    def window_for(self, input_shape: Shape) -> Window:
        """Return the window of one stage or, for halo 'wide', of both stages."""
        if len(input_shape) < 2:
            problem = f"local contrast normalisation needs an image, but its input has shape {input_shape}"
            raise ShapeError(f"{problem}; move it before the layers that return vectors, or leave it out")
        stages, remedy = (2, " halo 'auto'") if self.halo == "wide" else (1, "")
        window = self.local_window.window_of_stages(input_shape, stages)
        for axis, (n, (reach, _)) in enumerate(zip(input_shape, window.padding, strict=False)):
            if window.mode == "reflect" and reach >= n:
                raise ConfigError(
                    f"kernel_size {self.local_window.kernel_size} with halo '{self.halo}' and padding_mode 'reflect'"
                    f" needs an image of more than {counted(reach, 'cell')} on axis {axis}, but it has {n}; use a"
                    f" smaller kernel_size,{remedy} or padding_mode 'zeros'"
                )
        return window

    def view_window_for(self, input_shape: Shape, grid: GridShape) -> Window | None:
        """Return the window of halo 'wide'; None for 'twice', where only halos of means are exchanged."""
        halos = self.halos_for(input_shape, grid)
        return halos[0][1] if len(halos) == 1 else None

    def receptive_window_for(self, input_shape: Shape) -> Window | None:
        """Return the window of both stages; None if the image is too small for reflection."""
        return next((window for _, window in self.local_window.halos_by_method(input_shape).get("wide", [])), None)

    def halos_for(self, input_shape: Shape, grid: GridShape) -> HaloShapesAndWindows:
        """Return the halos of the method `halo`; for 'auto', of the method that sends fewer bytes."""
        method = self.local_window.least_sending_method(input_shape, grid) if self.halo == "auto" else self.halo
        return self.local_window.halos_by_method(input_shape)[method]

    def reductions_for(self, input_shape: Shape) -> list[Reduction]:
        """Return the reductions of the mean deviation, in the forward and backward pass, if it is used."""
        directions = ("forward", "backward") if self.uses_mean_deviation else ()
        return [Reduction(direction, "tiles", result_elements_per_sample=1) for direction in directions]

    def prepare_for_tile(self) -> None:
        """Choose the method, and create the arrays whose halos are exchanged."""
        self.axis_weights = self.local_window.axis_weights(self.input_shape)
        is_wide = self.regions[1] is not None or len(self.halos_for(self.input_shape, self.context.grid.shape)) == 1
        # these arrays make views of the channel means: first of x, then of v²
        arrays: list[Any] = [
            self._create_local_array(n) if is_wide else self._register_channel_mean_array() for n in (2, 1)
        ]
        self.channel_mean_array, self.channel_mean_square_array = arrays

    def _register_channel_mean_array(self) -> GlobalArray:
        return self.register_array((*self.input_shape[:-1], 1), self.local_window.window_of_stages(self.input_shape))

    def _create_local_array(self, stages: int) -> LocalArray:
        """Return an array of the cells within the reach of `stages` stages around this rank's tile."""
        region = self.local_window.window_of_stages(self.input_shape, stages).needs(self.output_tile)
        # reflected cells stay reflected: the weights are symmetric
        return LocalArray(
            region, region if self.local_window.padding_mode == "reflect" else Box.of(self.input_shape[:-1])
        )

    def reduce(self, ctx: StepContext, view: Any) -> Any:
        """Return each sample's sum of the deviations of this rank's cells."""
        self._save_deviations(ctx, view)
        return self.kernels.sample_sum(ctx.owned(ctx.sigma, ctx.output_box))

    def forward(self, ctx: StepContext, view: Any) -> Any:
        """Return v divided by its local deviation."""
        if not self.uses_mean_deviation:
            self._save_deviations(ctx, view)
        min_divisor = self._image_mean(ctx, ctx.reduced) if self.uses_mean_deviation else self.min_deviation
        divisor = ctx.xp.maximum(ctx.sigma, min_divisor)
        scale = 1 / ctx.xp.where(divisor != 0, divisor, inf)  # a constant image becomes 0
        ctx.save(min_divisor=min_divisor, scale=scale)
        y = ctx.out
        ctx.xp.multiply(ctx.v[centred_slices(ctx.v, divisor)], scale, out=y)
        return y

    def _save_deviations(self, ctx: StepContext, view: Any) -> None:
        """Save v for all cells whose windows lie in the view, and the deviations of this rank's cells."""
        channel_means = ctx.gather(self.channel_mean_array, self._channel_mean(view))
        mean = self.kernels.separable_filter(channel_means, self.axis_weights)
        v = view[centred_slices(view, mean)] - mean
        squares = ctx.gather(self.channel_mean_square_array, self._channel_mean(v * v))
        sigma = ctx.xp.sqrt(self.kernels.separable_filter(squares, self.axis_weights))
        # deviations of constant cells are rounding errors, which would differ between grids
        sigma *= sigma > _MAX_NOISE_ULPS * np.finfo(view.dtype).eps * abs(mean[centred_slices(mean, sigma)])
        ctx.save(v=v, sigma=sigma, extents=(channel_means.shape[1:-1], squares.shape[1:-1]))

    def reduce_backward(self, ctx: StepContext, dy: Any) -> Any:
        """Return the sums for the gradient through the mean deviation."""
        if not ctx.needs_input_gradient:
            return None
        ddivisor, dsigma = self._divisor_and_deviation_gradients(ctx, dy)
        return self.kernels.sample_sum(ddivisor - dsigma)

    def backward(self, ctx: StepContext, dy: Any) -> Any:
        """Return the gradient of the view: through the cell itself, the deviations and the means around it."""
        if not ctx.needs_input_gradient:
            return None
        kernels = self.kernels
        _, dsigma = self._divisor_and_deviation_gradients(ctx, dy)
        if self.uses_mean_deviation:
            own_dsigma = ctx.owned(dsigma, ctx.output_box)
            # the minimum divisor rises with every deviation of the image
            own_dsigma += self._image_mean(ctx, ctx.reduced)
        dvariance = dsigma / ctx.xp.where(ctx.sigma > 0, 2 * ctx.sigma, inf)
        dsquares = ctx.scatter_add(
            self.channel_mean_square_array,
            kernels.separable_filter_adjoint(dvariance, ctx.extents[1], self.axis_weights),
        )
        dv_factor = dsquares * (2 / dy.shape[-1])
        mean_dv = dv_factor * self._channel_mean(ctx.v)  # channel mean of the gradient of v, which is never stored
        mean_dv[centred_slices(mean_dv, dy)] += ctx.scale * self._channel_mean(dy)
        dview = ctx.out
        dview[...] = ctx.scatter_add(
            self.channel_mean_array, kernels.separable_filter_adjoint(-mean_dv, ctx.extents[0], self.axis_weights)
        )
        dview[centred_slices(dview, mean_dv)] += ctx.v * dv_factor
        dview[centred_slices(dview, dy)] += dy * ctx.scale
        return dview

    def _divisor_and_deviation_gradients(self, ctx: StepContext, dy: Any) -> tuple[Any, Any]:
        """Return the gradients of max(minimum divisor, deviation) and, through this maximum, of the deviation."""
        dscale = self._channel_mean(dy * ctx.v[centred_slices(ctx.v, dy)]) * dy.shape[-1]
        ddivisor = -dscale * ctx.scale * ctx.scale
        return ddivisor, ctx.xp.where(ctx.sigma > ctx.min_divisor, ddivisor, 0)

    def _channel_mean(self, x: Any) -> Any:
        """Return the mean over the channels, (n, *cells, 1), by GEMM, which was 4 to 20 times as fast as `mean`."""
        channels = x.shape[-1]
        sums = self.kernels.matmul(x.reshape(-1, channels), self.kernels.xp.ones((channels, 1), x.dtype))
        return sums.reshape(*x.shape[:-1], 1) / channels

    def _image_mean(self, ctx: StepContext, sums: Any) -> Any:
        """Return each sample's mean over all cells of the image, (n, 1, ..., 1), given the sums (n, 1)."""
        return sums.reshape(len(sums), *(1 for _ in self.input_shape)) / prod(self.input_shape[:-1])


class LCNLayerDist(Dist, LCNLayer):
    """Local contrast normalisation over tiles."""
