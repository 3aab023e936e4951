"""Pooling of images and volumes by PyTorch's kernels, channels-last, without autograd."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..arrays.namespace import namespace
from .torch_arrays import empty_channels_last, to_channels_first, to_channels_last
from .windows import factor_box_window

Ints = Sequence[int]
Taps = Sequence[Sequence[float]]
_aten = torch.ops.aten


def max_forward(x: np.ndarray, kernel: Ints, stride: Ints) -> tuple[np.ndarray, torch.Tensor]:
    """Return the maxima, and PyTorch's flat index of the first maximum in each window."""
    pool = _aten.max_pool2d_with_indices if len(kernel) == 2 else _aten.max_pool3d_with_indices
    y, max_positions = pool(to_channels_first(x), kernel, stride)
    return to_channels_last(x, y), max_positions


def max_backward(dy: np.ndarray, max_positions: torch.Tensor, extent: Ints, kernel: Ints, stride: Ints) -> np.ndarray:
    """Return the gradient of x, which is passed to the first maximum of each window."""
    dx = namespace(dy).empty((len(dy), *extent, dy.shape[-1]), dy.dtype)
    max_backward_into(dx, dy, max_positions, kernel, stride)
    return dx


def max_backward_into(dx: np.ndarray, dy: np.ndarray, max_positions: torch.Tensor, kernel: Ints, stride: Ints) -> None:
    """Write the gradient of x into a contiguous array."""
    dy_tensor, dx_tensor = to_channels_first(dy), to_channels_first(dx)
    back = _aten.max_pool2d_with_indices_backward if len(kernel) == 2 else _aten.max_pool3d_with_indices_backward
    zeros, ones = (0,) * len(kernel), (1,) * len(kernel)
    # only the shape of x is used
    back.grad_input(dy_tensor, dx_tensor, kernel, stride, zeros, ones, False, max_positions, grad_input=dx_tensor)


def window_sum(x: np.ndarray, kernel: Ints, stride: Ints) -> np.ndarray:
    """Return the sum over every window: each channel convolved with ones, along one axis at a time for large boxes."""
    sums = to_channels_first(x)
    for box, step in factor_box_window(kernel, stride):
        sums = _convolve_channels(sums, _kernel_of_ones(box), step)
    return to_channels_last(x, sums)


def window_sum_adjoint(dy: np.ndarray, extent: Ints, kernel: Ints, stride: Ints) -> np.ndarray:
    """Return the adjoint of `window_sum`, for images."""
    gradient = to_channels_first(dy)
    if max(stride) == 1:
        for box, step in reversed(factor_box_window(kernel, stride)):
            gradient = _convolve_channels(gradient, _kernel_of_ones(box), step, transposed=True)
        return to_channels_last(dy, gradient)
    dx = empty_channels_last(len(dy), extent, dy.shape[-1], gradient)
    _aten.avg_pool2d_backward.grad_input(gradient, dx, kernel, stride, (0, 0), False, True, 1, grad_input=dx)
    return to_channels_last(dy, dx)


def separable_filter(x: np.ndarray, taps: Taps) -> np.ndarray:
    """Return the valid correlation with the product of `taps`, one axis after the other."""
    y = to_channels_first(x)
    for weights in _axis_filters(taps):
        y = _convolve_channels(y, weights, (1,) * len(taps))
    return to_channels_last(x, y)


def separable_filter_adjoint(dy: np.ndarray, taps: Taps) -> np.ndarray:
    """Return the adjoint of `separable_filter`; axes are processed in reverse order."""
    gradient = to_channels_first(dy)
    for weights in reversed(_axis_filters(taps)):
        gradient = _convolve_channels(gradient, weights, (1,) * len(taps), transposed=True)
    return to_channels_last(dy, gradient)


def _convolve_channels(x: torch.Tensor, weights: torch.Tensor, stride: Ints, transposed: bool = False) -> torch.Tensor:
    """Return the convolution, or its adjoint, of every channel with the same weights (*kernel)."""
    channels, zeros, ones = x.shape[1], (0,) * len(stride), (1,) * len(stride)
    channel_weights = weights.to(x).expand(channels, 1, *weights.shape).contiguous()
    return _aten.convolution(x, channel_weights, None, stride, zeros, ones, transposed, zeros, channels)


def _kernel_of_ones(kernel: Ints) -> torch.Tensor:
    return torch.ones(tuple(kernel))


def _axis_filters(taps: Taps) -> list[torch.Tensor]:
    """Return the taps of each axis as weights over all axes."""
    return [
        torch.tensor(weights, dtype=torch.float64).reshape([-1 if a == axis else 1 for a in range(len(taps))])
        for axis, weights in enumerate(taps)
    ]
