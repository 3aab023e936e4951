"""Base class of pooling layers, and max pooling."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

from ..errors import ConfigError
from ..geometry import Window
from ..halo import ExchangePolicy
from .base import Dist, Layer, Shape
from .context import StepContext


class PoolingLayer(Layer):
    """Base class of pooling layers, which reduce each window to one value per channel.

    Input (N, *spatial, C), output (N, *spatial', C), both local to this rank.

    Parameters
    ----------
    kernel_size : int or one per axis
    stride : int or one per axis, optional
        Default: kernel_size.
    padding : int, one per axis, or ((before, after), ...) per axis
        Must be less than the kernel, so that every window contains a cell of the image.
    scheme : ExchangePolicy or str, optional
        Border scheme, such as 'tower' or Tower(fill='reflect'). Default: the scheme of the model.
    """

    needs_image = True

    window: Window
    fill = 0.0

    def __init__(
        self,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] | None = None,
        padding: int | Sequence[Any] = 0,
        *,
        scheme: ExchangePolicy | str | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name, scheme=scheme)
        self.kernel_size, self.padding = kernel_size, padding
        self.stride = kernel_size if stride is None else stride

    def window_for(self, input_shape: Shape) -> Window:
        """Return the window."""
        window = Window(self.kernel_size, self.stride, self.padding, fill=self.fill, ndim=len(input_shape) - 1)
        if any(max(sides) >= k for sides, k in zip(window.padding, window.kernel, strict=True)):
            raise ConfigError(f"padding {self.padding} must be less than kernel_size {self.kernel_size}")
        return window

    @property
    def _kernel_and_stride(self) -> tuple[Shape, Shape]:
        return self.window.kernel, self.window.stride


class MaxPoolingLayer(PoolingLayer):
    """Maximum over each window, ignoring padding; the gradient of a tie goes to its first cell in row-major order."""

    saves_input = saves_output = False
    can_apply_input_relu_gradient = True
    saved_bytes_and_elements = (1, 0)
    fill = -inf

    def forward(self, ctx: StepContext, view: Any) -> Any:
        """Return the maxima."""
        y = ctx.out
        ctx.save(argmax=self.kernels.max_pool_into(y, view, *self._kernel_and_stride, ctx.applies_input_relu_gradient))
        return y

    def backward(self, ctx: StepContext, dy: Any) -> Any:
        """Pass each gradient to the position of the maximum."""
        dview = ctx.out
        self.kernels.max_pool_backward_into(dview, dy, ctx.argmax, *self._kernel_and_stride)
        return dview


class MaxPoolingLayerDist(Dist, MaxPoolingLayer):
    """Max pooling over tiles."""
