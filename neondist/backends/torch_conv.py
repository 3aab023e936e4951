"""Valid convolution of images and volumes by PyTorch's kernels (oneDNN on CPUs), channels-last, without autograd."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from .torch_arrays import channels_first, channels_last, kernels, tensor
from .torch_gemm import weights_by_gemm

Ints = Sequence[int]
_aten = torch.ops.aten


def forward(
    x: np.ndarray, weights: np.ndarray, stride: Ints, dilation: Ints, groups: int, bias: np.ndarray | None = None
) -> np.ndarray:
    """Return the convolution plus bias (N, *out, C_out); the bias costs no pass of its own."""
    convolve = torch.conv2d if len(stride) == 2 else torch.conv3d  # with less overhead than the operator by its name
    added = None if bias is None else tensor(bias)
    return channels_last(convolve(channels_first(x), kernels(weights), added, stride, 0, dilation, groups))


def backward_input(
    dy: np.ndarray, weights: np.ndarray, extent: Ints, stride: Ints, dilation: Ints, groups: int
) -> np.ndarray:
    """Return the gradient of x (N, *extent, C_in): the transposed convolution, as fast as the backward kernel.

    That one wants x beside it, of which it uses nothing but the shape.
    """
    zeros = (0,) * len(stride)
    axes = zip(extent, weights.shape[:-2], stride, dilation, strict=True)
    unseen = [(n - d * (k - 1) - 1) % s for n, k, s, d in axes]  # cells at the end that no window reaches
    return channels_last(
        _aten.convolution(channels_first(dy), kernels(weights), None, stride, zeros, dilation, True, unseen, groups)
    )


def backward_weights(
    x: np.ndarray, dy: np.ndarray, kernel: Ints, stride: Ints, dilation: Ints, groups: int
) -> np.ndarray:
    """Return the gradient of the weights (*kernel, C_in / groups, C_out)."""
    if groups == 1 and min(x.shape[-1], dy.shape[-1]) >= 16 and torch.backends.cpu.get_cpu_capability() != "AVX512":
        return weights_by_gemm(x, dy, kernel, stride, dilation)
    zeros, only = (0,) * len(stride), (False, True, False)
    like = torch.empty((dy.shape[-1], x.shape[-1] // groups, *kernel), dtype=tensor(x).dtype)
    _, gradient, _ = _aten.convolution_backward(
        channels_first(dy), channels_first(x), like, None, stride, zeros, dilation, False, zeros, groups, only
    )
    return np.ascontiguousarray(gradient.movedim((0, 1), (-1, -2)).numpy())
