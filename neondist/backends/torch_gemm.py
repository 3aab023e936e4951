"""The weights' gradient by GEMM: on CPUs without AVX-512 oneDNN's own kernel reaches a fifth to a half of it."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import torch

from .torch_arrays import tensor

Ints = Sequence[int]
_BLOCK = 1 << 19  # gathered numbers at a time; measured best of 2^16 ... 2^20


def weights_by_gemm(x: np.ndarray, dy: np.ndarray, kernel: Ints, stride: Ints, dilation: Ints) -> np.ndarray:
    """Return the gradient of the weights (*kernel, C_in, C_out), groups being 1.

    Windows are gathered along all axes but the first; along that one, a row of the kernel is a shift of the gathered
    rows, so that they are copied once and not for each row of the kernel.
    """
    (first, *_), step, apart = kernel, stride[0], dilation[0]
    length = prod(kernel[1:]) * x.shape[-1]
    windows = _windows(tensor(x), kernel, stride, dilation)
    rows_of_dy = tensor(dy).transpose(0, 1)  # (rows, N, ...)
    total = torch.zeros((first, length, dy.shape[-1]), dtype=rows_of_dy.dtype)
    rows, cells = rows_of_dy.shape[0], prod(rows_of_dy.shape[1:-1])
    per_block = max(1, _BLOCK // (cells * length))
    for lo in range(0, rows, per_block):
        hi = min(lo + per_block, rows)
        part = rows_of_dy[lo:hi].reshape(-1, dy.shape[-1])
        seen = windows[lo * step : (hi - 1) * step + apart * (first - 1) + 1]
        if step == 1:
            seen = seen.reshape(len(seen), cells, length)
        for row in range(first):
            columns = seen[row * apart : row * apart + (hi - lo - 1) * step + 1 : step].reshape(-1, length)
            total[row].addmm_(columns.T, part)
    return total.numpy().reshape(*kernel, x.shape[-1], dy.shape[-1])


def _windows(x: torch.Tensor, kernel: Ints, stride: Ints, dilation: Ints) -> torch.Tensor:
    """Return x (N, *spatial, C) as a view (rows, N, *out[1:], *kernel[1:], C)."""
    for axis, (k, s, d) in enumerate(zip(kernel[1:], stride[1:], dilation[1:], strict=True), start=2):
        x = x.unfold(axis, d * (k - 1) + 1, s)[..., ::d]
    return x.transpose(0, 1).movedim(len(kernel) + 1, -1)
