"""Convolutions by PyTorch's kernels of 16 bits, over NumPy's arrays of float32, channels-last."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from .torch_arrays import channels_first, channels_last, kernels, tensor
from .windows import Sides, cropped, unreached

Ints = Sequence[int]
_aten = torch.ops.aten


def is_fast(dtype: str) -> bool:
    """Return whether this processor has instructions for a dtype: otherwise oneDNN converts to float32, slowly."""
    fast: bool
    if dtype == "float16":
        fast = torch.ops.mkldnn._is_mkldnn_fp16_supported()
    else:
        fast = torch.ops.mkldnn._is_mkldnn_bf16_supported() and (
            torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        )
    return fast


def rounded(dtype: str, array: np.ndarray) -> np.ndarray:
    """Return a new contiguous array of float32 with the nearest numbers of a dtype."""
    return np.ascontiguousarray(tensor(array).to(getattr(torch, dtype)).float().numpy())


def forward(
    dtype: str, x: np.ndarray, weights: np.ndarray, stride: Ints, dilation: Ints, groups: int, bias: np.ndarray | None
) -> np.ndarray:
    """Return the valid convolution plus bias (N, *out, C_out)."""
    kind, none = getattr(torch, dtype), (0,) * len(stride)
    added = None if bias is None else tensor(bias).to(kind)
    seen, kernel = channels_first(x).to(kind), kernels(weights).to(kind)
    y = _aten.convolution(seen, kernel, added, stride, none, dilation, False, none, groups)
    return channels_last(x, y.float())


def backward_input(
    dtype: str,
    dy: np.ndarray,
    weights: np.ndarray,
    extent: Ints,
    stride: Ints,
    dilation: Ints,
    groups: int,
    crop: Sides | None,
) -> np.ndarray:
    """Return the gradient of x (N, *extent, C_in) without `crop`: the transposed convolution."""
    kind, none = getattr(torch, dtype), (0,) * len(stride)
    unseen = unreached(extent, weights.shape[:-2], stride, dilation)
    gradient, kernel = channels_first(dy).to(kind), kernels(weights).to(kind)
    dx = _aten.convolution(gradient, kernel, None, stride, none, dilation, True, unseen, groups)
    return cropped(channels_last(dy, dx.float()), crop)
