"""The reference backend: NumPy, always there."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from . import numpy_conv as conv
from . import numpy_filter as separable
from . import numpy_local as local
from . import numpy_pool as pool
from .base import Backend
from .strips import Sides, cropped

Ints = Sequence[int]
_SUMMED = 1 << 13  # cells at a time


class NumpyBackend(Backend):
    """NumPy arrays; convolutions through GEMM."""

    name = "numpy"
    strip = 1 << 16

    def full(self, shape: Ints, value: float, dtype: np.dtype) -> np.ndarray:
        """Return a new array filled with `value`."""
        return np.full(shape, value, dtype)

    def empty(self, shape: Ints, dtype: np.dtype) -> np.ndarray:
        """Return a new array with any values."""
        return np.empty(shape, dtype)

    def asarray(self, array: Any, dtype: np.dtype) -> np.ndarray:
        """Return a new contiguous array with the values of `array`."""
        return np.array(array, dtype, order="C")

    def to_numpy(self, array: np.ndarray) -> np.ndarray:
        """Return the array itself."""
        return array

    def conv_forward(
        self,
        x: np.ndarray,
        weights: np.ndarray,
        stride: Ints,
        dilation: Ints,
        groups: int,
        bias: np.ndarray | None = None,
    ) -> np.ndarray:
        """Return the valid convolution plus bias (N, *out, C_out)."""
        return conv.forward(x, weights, stride, dilation, groups, bias)

    def conv_backward_input(
        self,
        dy: np.ndarray,
        weights: np.ndarray,
        extent: Ints,
        stride: Ints,
        dilation: Ints,
        groups: int,
        crop: Sides | None = None,
    ) -> np.ndarray:
        """Return the gradient of x (N, *extent, C_in), without `crop`."""
        return cropped(conv.backward_input(dy, weights, extent, stride, dilation, groups), crop)

    def conv_backward_weights(
        self,
        x: np.ndarray,
        dy: np.ndarray,
        kernel: Ints,
        stride: Ints,
        dilation: Ints,
        groups: int,
        zeros: Sides | None = None,
    ) -> np.ndarray:
        """Return the gradient of the weights."""
        return conv.backward_weights(x, dy, kernel, stride, dilation, groups)

    def copy(self, source: np.ndarray, target: np.ndarray) -> None:
        """Copy the values of `source` into `target`."""
        np.copyto(target, source)

    def rectify(self, z: np.ndarray, y: np.ndarray) -> None:
        """Write max(z, 0) into y."""
        np.maximum(z, 0, out=y)

    def rectify_back(self, y: np.ndarray, dy: np.ndarray) -> np.ndarray:
        """Return dy where y is positive."""
        return np.multiply(dy, y > 0, order="C")

    def local_forward(self, x: np.ndarray, weights: np.ndarray, stride: Ints) -> np.ndarray:
        """Return the unshared convolution."""
        return local.forward(x, weights, stride)

    def local_backward_input(self, dy: np.ndarray, weights: np.ndarray, extent: Ints, stride: Ints) -> np.ndarray:
        """Return the gradient of x."""
        return local.backward_input(dy, weights, extent, stride)

    def local_backward_weights(self, x: np.ndarray, dy: np.ndarray, weights: np.ndarray, stride: Ints) -> np.ndarray:
        """Return the gradient of the unshared weights."""
        return local.backward_weights(x, dy, weights, stride)

    def max_pool(self, x: np.ndarray, kernel: Ints, stride: Ints) -> tuple[np.ndarray, np.ndarray]:
        """Return the maxima and their places."""
        return pool.max_forward(x, kernel, stride)

    def max_pool_backward(
        self, dy: np.ndarray, place: np.ndarray, extent: Ints, kernel: Ints, stride: Ints
    ) -> np.ndarray:
        """Return the gradient of x."""
        return pool.max_backward(dy, place, extent, kernel, stride)

    def window_sum(self, x: np.ndarray, kernel: Ints, stride: Ints) -> np.ndarray:
        """Return the sum over every window."""
        return pool.window_sum(x, kernel, stride)

    def window_spread(self, dy: np.ndarray, extent: Ints, kernel: Ints, stride: Ints) -> np.ndarray:
        """Return the adjoint of `window_sum`."""
        return pool.window_spread(dy, extent, kernel, stride)

    def separable_filter(self, x: np.ndarray, taps: Sequence[Sequence[float]]) -> np.ndarray:
        """Return the valid correlation with the product of `taps`."""
        return separable.forward(x, taps)

    def separable_spread(self, dy: np.ndarray, extent: Ints, taps: Sequence[Sequence[float]]) -> np.ndarray:
        """Return the adjoint of `separable_filter`."""
        return separable.spread(dy, extent, taps)

    def channel_sum(self, x: np.ndarray) -> np.ndarray:
        """Return the sum over everything but the channels, by GEMM: its blocked sums err less than a running sum."""
        cells, total = x.reshape(-1, x.shape[-1]), np.zeros(x.shape[-1:], x.dtype)
        ones = np.ones((1, min(_SUMMED, len(cells))), x.dtype)
        for start in range(0, len(cells), _SUMMED):
            part = cells[start : start + _SUMMED]
            total += self.matmul(ones[:, : len(part)], part)[0]
        return total

    def sample_sum(self, x: np.ndarray) -> np.ndarray:
        """Return each sample's sum over its cells, by GEMM as `channel_sum`."""
        cells, channels = prod(x.shape[1:-1]), x.shape[-1]
        rows, total = x.reshape(len(x), cells, channels), np.zeros((len(x), 1, channels), x.dtype)
        ones = np.ones((1, min(_SUMMED, cells)), x.dtype)
        for start in range(0, cells, _SUMMED):
            part = rows[:, start : start + _SUMMED]
            total += self.matmul(ones[:, : part.shape[1]], part)
        return total[:, 0]
