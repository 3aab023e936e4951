"""Valid convolution of images and volumes by PyTorch's kernels (oneDNN on CPUs), channels-last, without autograd."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from .strips import Sides, cropped
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
    dy: np.ndarray, weights: np.ndarray, extent: Ints, stride: Ints, dilation: Ints, groups: int, crop: Sides
) -> np.ndarray:
    """Return the gradient of x (N, *extent, C_in) without `crop`: the transposed convolution.

    It is as fast as the backward kernel, which wants x beside it and uses nothing but its shape. What both ends are to
    lose it does not compute (measured: 1.25 times faster for 5 x 5 on 14 cells).
    """
    cut = tuple(min(sides) if n > 2 * min(sides) else 0 for sides, n in zip(crop, extent, strict=True))
    axes = zip(extent, weights.shape[:-2], stride, dilation, strict=True)
    unseen = [(n - d * (k - 1) - 1) % s for n, k, s, d in axes]  # cells at the end that no window reaches
    dx = channels_last(
        _aten.convolution(channels_first(dy), kernels(weights), None, stride, cut, dilation, True, unseen, groups)
    )
    return cropped(dx, [(before - c, after - c) for (before, after), c in zip(crop, cut, strict=True)])


def backward_weights(
    x: np.ndarray, dy: np.ndarray, kernel: Ints, stride: Ints, dilation: Ints, groups: int, zeros: Sides
) -> np.ndarray:
    """Return the gradient of the weights (*kernel, C_in / groups, C_out)."""
    if groups == 1 and min(x.shape[-1], dy.shape[-1]) >= 16 and torch.backends.cpu.get_cpu_capability() != "AVX512":
        return weights_by_gemm(x, dy, kernel, stride, dilation, zeros[0])
    none, only = (0,) * len(stride), (False, True, False)
    like = torch.empty((dy.shape[-1], x.shape[-1] // groups, *kernel), dtype=tensor(x).dtype)
    _, gradient, _ = _aten.convolution_backward(
        channels_first(dy), channels_first(x), like, None, stride, none, dilation, False, none, groups, only
    )
    return np.ascontiguousarray(gradient.movedim((0, 1), (-1, -2)).numpy())
