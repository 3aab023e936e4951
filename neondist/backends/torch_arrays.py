"""Conversion of NumPy's or a device's arrays to tensors and back, over the same memory.

An array (N, *spatial, C) in C order, with its axes permuted to (N, C, *spatial), is a channels-last tensor in PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..arrays.namespace import namespace

MEMORY_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def to_tensor(array: Any) -> torch.Tensor:
    """Return a tensor over the array's memory, or over a copy if torch rejects it (read-only, or negative strides).

    A device's array is converted by DLPack, ordered on its current stream.
    """
    if not isinstance(array, np.ndarray):
        return torch.from_dlpack(array)
    if not array.flags.writeable or min(array.strides, default=0) < 0:
        array = array.copy()
    return torch.from_numpy(array)


def array_like(like: Any, result: torch.Tensor) -> Any:
    """Return an array over a tensor's memory, in the namespace of `like`."""
    return result.numpy() if isinstance(like, np.ndarray) else namespace(like).from_dlpack(result)


def to_channels_first(x: Any) -> torch.Tensor:
    """Return (N, *spatial, C) as a tensor (N, C, *spatial)."""
    channel_axis = x.ndim - 1
    return to_tensor(x.transpose(0, channel_axis, *range(1, channel_axis)))  # NumPy moves axes faster than torch


def to_channels_last(like: Any, y: torch.Tensor) -> Any:
    """Return (N, C, *spatial) as a contiguous array (N, *spatial, C), without a copy if it is channels-last.

    The result is in the namespace of `like`.
    """
    result = array_like(like, y).transpose(0, *range(2, y.ndim), 1)
    return namespace(like).ascontiguousarray(result)


def empty_channels_last(samples: int, extent: Sequence[int], channels: int, like: torch.Tensor) -> torch.Tensor:
    """Return a new tensor (N, C, *extent), channels-last in memory."""
    return torch.empty((samples, *extent, channels), dtype=like.dtype, device=like.device).movedim(-1, 1)


def weights_to_tensor(weights: Any) -> torch.Tensor:
    """Return (*kernel, C_in / groups, C_out) as a tensor (C_out, C_in / groups, *kernel), channels-last in memory.

    The small copy makes the gradient of the input 1.5 to 1.8 times faster than strides that oneDNN must reorder.
    """
    last = weights.ndim - 1
    reordered = to_tensor(weights.transpose(last, last - 1, *range(last - 1)))
    return reordered.contiguous(memory_format=MEMORY_FORMATS[reordered.ndim])


def matmul(a: Any, b: Any) -> Any:
    """Return the product of matrices, or of stacks of them."""
    return array_like(a, torch.matmul(to_tensor(a), to_tensor(b)))
