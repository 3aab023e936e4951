"""16-bit PyTorch convolutions of float32 NumPy arrays, channels-last."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from .torch_arrays import to_channels_first, to_channels_last, to_tensor, weights_to_tensor
from .windows import Sides, crop_borders, unreached_cells

Ints = Sequence[int]
_aten = torch.ops.aten


def has_fast_instructions(dtype: str) -> bool:
    """Return whether this processor has instructions for a dtype; without them, oneDNN slowly converts to float32."""
    is_fast: bool
    if dtype == "float16":
        is_fast = torch.ops.mkldnn._is_mkldnn_fp16_supported()
    else:
        is_fast = torch.ops.mkldnn._is_mkldnn_bf16_supported() and (
            torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        )
    return is_fast


def round_to_dtype(dtype: str, array: np.ndarray) -> np.ndarray:
    """Return a new contiguous float32 array, rounded to the nearest numbers of a dtype."""
    return np.ascontiguousarray(to_tensor(array).to(getattr(torch, dtype)).float().numpy())


def forward(
    dtype: str, x: np.ndarray, weights: np.ndarray, stride: Ints, dilation: Ints, groups: int, bias: np.ndarray | None
) -> np.ndarray:
    """Return the valid convolution plus bias (N, *out, C_out)."""
    torch_dtype, zero_padding = getattr(torch, dtype), (0,) * len(stride)
    added = None if bias is None else to_tensor(bias).to(torch_dtype)
    input_tensor, kernel = to_channels_first(x).to(torch_dtype), weights_to_tensor(weights).to(torch_dtype)
    y = _aten.convolution(input_tensor, kernel, added, stride, zero_padding, dilation, False, zero_padding, groups)
    return to_channels_last(x, y.float())


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
    """Return the gradient of x (N, *extent, C_in), with the sides in `crop` removed (a transposed convolution)."""
    torch_dtype, zero_padding = getattr(torch, dtype), (0,) * len(stride)
    output_padding = unreached_cells(extent, weights.shape[:-2], stride, dilation)
    dy_tensor, weight_tensor = to_channels_first(dy).to(torch_dtype), weights_to_tensor(weights).to(torch_dtype)
    dx = _aten.convolution(dy_tensor, weight_tensor, None, stride, zero_padding, dilation, True, output_padding, groups)
    return crop_borders(to_channels_last(dy, dx.float()), crop)
