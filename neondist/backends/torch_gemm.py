"""The weights' gradient by GEMM: on CPUs without AVX-512 oneDNN's own kernel reaches a fifth to a half of it."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import torch

from .torch_arrays import tensor
from .windows import blocks

Ints = Sequence[int]
_BLOCK = 1 << 19  # gathered numbers at a time; measured best of 2^17 ... 2^22


def weights_by_gemm(
    x: np.ndarray, dy: np.ndarray, kernel: Ints, stride: Ints, dilation: Ints, zeros: tuple[int, int] = (0, 0)
) -> np.ndarray:
    """Return the gradient of the weights (*kernel, C_in, C_out), groups being 1.

    Windows are gathered along all axes but the first; along that one, a row of the kernel is a shift of the gathered
    rows, so that they are copied once and not for each row of the kernel. Small images go many at a time.

    Parameters
    ----------
    zeros : how many of the first and last rows of x are zero: they are left out
    """
    (first, *_), step, apart = kernel, stride[0], dilation[0]
    channels, length = dy.shape[-1], prod(kernel[1:]) * x.shape[-1]
    windows = _windows(tensor(x), kernel, stride, dilation)
    rows_of_dy = tensor(dy).transpose(0, 1)  # (rows, N, ...)
    total = torch.zeros((first, channels, length), dtype=rows_of_dy.dtype)
    for samples, rows in blocks(len(dy), dy.shape[1:-1], prod(dy.shape[2:-1]) * length, _BLOCK):
        part = rows_of_dy[rows, samples].reshape(rows.stop - rows.start, -1, channels)
        lo = max(zeros[0], rows.start * step)
        hi = min(len(windows) - zeros[1], (rows.stop - 1) * step + apart * (first - 1) + 1)
        if lo >= hi:
            continue
        seen = windows[lo:hi, samples]
        if step == 1:
            seen = seen.reshape(hi - lo, part.shape[1], length)
        for row in range(first):
            start = max(rows.start, -((row * apart - lo) // step))  # of dy, those that see a row from lo to hi
            stop = min(rows.stop, (hi - 1 - row * apart) // step + 1)
            if start < stop:
                at = start * step + row * apart - lo
                columns = seen[at : at + (stop - start - 1) * step + 1 : step].reshape(-1, length)
                gradient = part[start - rows.start : stop - rows.start].reshape(-1, channels)
                total[row].addmm_(gradient.T, columns)
    return total.transpose(1, 2).reshape(*kernel, x.shape[-1], channels).numpy()


def _windows(x: torch.Tensor, kernel: Ints, stride: Ints, dilation: Ints) -> torch.Tensor:
    """Return x (N, *spatial, C) as a view (rows, N, *out[1:], *kernel[1:], C)."""
    for axis, (k, s, d) in enumerate(zip(kernel[1:], stride[1:], dilation[1:], strict=True), start=2):
        x = x.unfold(axis, d * (k - 1) + 1, s)[..., ::d]
    return x.transpose(0, 1).movedim(len(kernel) + 1, -1)
