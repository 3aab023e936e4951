"""PyTorch as a library of kernels over NumPy arrays: nothing is copied, nothing is recorded for autograd."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from contextlib import ExitStack
from math import prod
from typing import Any

import numpy as np
import torch
from threadpoolctl import threadpool_info

from . import torch_conv as conv
from . import torch_pool as pool
from .allocator import give_back_freed, keep_freed_memory
from .host import HostKernels
from .torch_arrays import tensor
from .windows import Sides, out_extent, strips

Ints = Sequence[int]
Taps = Sequence[Sequence[float]]
_FEW = 4  # with fewer channels torch's pooling does not fill a vector, and NumPy is as fast or faster


class TorchKernels(HostKernels):
    """PyTorch's kernels where they are faster than NumPy's; arrays stay NumPy's.

    Series (N, L, C) run as images of one row. The numbers below are NumPy's time over PyTorch's: float32, one thread,
    AVX2.
    """

    #: Numbers, or multiplications, below which a call of torch alone takes longer than NumPy needs
    small = 1 << 15
    #: Multiplications of a matrix product up to which one thread of NumPy's takes no longer
    few_products = 1 << 22

    def __init__(self) -> None:
        super().__init__()
        self._closing = ExitStack()
        self._closing.callback(torch.set_num_threads, torch.get_num_threads())
        share = os.environ.get("OMP_NUM_THREADS", "")
        if share.isdecimal():  # torch read it already, unless it was imported before the launcher set it
            torch.set_num_threads(max(1, min(int(share), torch.get_num_threads())))
        # one thread is as fast with 2^19 as with 2^20 (2^18: 1.2 times slower); two are no faster with 2^22 than with
        # 2^20 (at most 1.05 times, over six networks), which takes 30 to 100 MiB less
        self.alone = torch.get_num_threads() == 1
        self.strip = 1 << 19 if self.alone else 1 << 20
        self._closing.callback(keep_freed_memory())
        if not self.alone and self.compiled is not None:
            self.threads, self.start = torch.get_num_threads(), _gomp_parallel()

    def close(self) -> None:
        """Take back PyTorch's number of threads and the setting of malloc."""
        self._closing.close()

    def give_back_freed(self, above: int) -> None:
        """Give back what malloc keeps."""
        give_back_freed(above)

    def conv_forward(
        self,
        x: np.ndarray,
        weights: np.ndarray,
        stride: Ints,
        dilation: Ints,
        groups: int,
        bias: np.ndarray | None = None,
        zeros: Sides | None = None,
    ) -> np.ndarray:
        """Return the valid convolution plus bias (N, *out, C_out): 1.3 to 4, depthwise 30."""
        out = out_extent(x.shape[1:-1], weights.shape[:-2], stride, dilation)
        few = weights.size * prod(out) * len(x) < self.small
        other = few or self.transforms(x, weights.shape, stride, dilation, groups)
        if other or not self._convolves(x, (len(x), *out, weights.shape[-1])):
            return super().conv_forward(x, weights, stride, dilation, groups, bias, zeros)
        sides = zeros or ((0, 0),) * len(stride)
        if len(stride) == 1:
            how = (1, *stride), (1, *dilation), groups, bias, ((0, 0), *sides)
            return self.conv_forward(x[:, None], weights[None], *how)[:, 0]
        return conv.forward(x, weights, stride, dilation, groups, bias, sides)

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
        """Return the gradient of x (N, *extent, C_in), without `crop`: 1.6 to 3.4, depthwise 37."""
        if self.transforms(dy, weights.shape, stride, dilation, groups) or not self._convolves(dy, dy.shape):
            return super().conv_backward_input(dy, weights, extent, stride, dilation, groups, crop)
        sides = crop or ((0, 0),) * len(stride)
        if len(stride) == 1:
            how = (1, *extent), (1, *stride), (1, *dilation), groups, ((0, 0), *sides)
            return self.conv_backward_input(dy[:, None], weights[None], *how)[:, 0]
        return conv.backward_input(dy, weights, extent, stride, dilation, groups, sides)

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
        """Return the gradient of the weights: 1 to 1.5, few channels 2 to 4, depthwise 15."""
        shape = *kernel, x.shape[-1] // groups, dy.shape[-1]
        if self.transforms(x, shape, stride, dilation, groups) or not self._convolves(x, dy.shape):
            return super().conv_backward_weights(x, dy, kernel, stride, dilation, groups, zeros)
        found = self.weights_by_rows(x, dy, kernel, stride, dilation, groups)
        if found is not None:
            return found
        sides = zeros or ((0, 0),) * len(stride)
        if len(stride) == 1:
            how = (1, *kernel), (1, *stride), (1, *dilation), groups, ((0, 0), *sides)
            return self.conv_backward_weights(x[:, None], dy[:, None], *how)[0]
        return conv.backward_weights(x, dy, kernel, stride, dilation, groups, sides)

    def conv_into(self, y: np.ndarray, x: np.ndarray, weights: np.ndarray, *how: Any) -> None:
        """Write finish(convolution plus bias) into y: the weights are brought into oneDNN's order once."""
        other = self.transforms(x, weights.shape, *how[:3])
        super().conv_into(y, x, weights if other else conv.arranged(weights), *how)

    def conv_back_into(
        self, dx: np.ndarray | None, x: np.ndarray, dy: np.ndarray, weights: np.ndarray, *how: Any
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the gradients of weights and bias, as the table does: the weights are brought into order once."""
        other = self.transforms(x, weights.shape, *how[:3])
        by_weights, by_bias = super().conv_back_into(dx, x, dy, weights if other else conv.arranged(weights), *how)
        return conv.in_order(by_weights), by_bias

    def copy(self, source: np.ndarray, target: np.ndarray) -> None:
        """Copy the values of `source` into `target`: by torch's threads."""
        if source.size < self.small:
            return super().copy(source, target)
        tensor(target).copy_(tensor(source))

    def contiguous(self, x: np.ndarray) -> np.ndarray:
        """Return x, or a copy of it, in one piece: by torch's threads."""
        return tensor(x).contiguous().numpy()

    def relu(self, z: np.ndarray, y: np.ndarray) -> None:
        """Write max(z, 0) into y: by torch's threads."""
        if z.size < self.small or self.compiled is not None:
            return super().relu(z, y)
        torch.clamp_min(tensor(z), 0, out=tensor(y))

    def relu_backward(self, y: np.ndarray, dy: np.ndarray, dz: np.ndarray | None = None) -> np.ndarray:
        """Return dy where y is positive, in dz: in one pass, without a mask."""
        dz = torch.empty(dy.shape, dtype=tensor(dy).dtype).numpy() if dz is None else dz
        if self.compiled is not None:
            return super().relu_backward(y, dy, dz)
        torch.ops.aten.threshold_backward.grad_input(tensor(dy), tensor(y), 0, grad_input=tensor(dz))
        return dz

    def max_pool(self, x: np.ndarray, kernel: Ints, stride: Ints) -> tuple[np.ndarray, Any]:
        """Return the maxima and their places: 4 to 14."""
        if not self._pools(x, out_extent(x.shape[1:-1], kernel, stride, (1,) * len(kernel))):
            return super().max_pool(x, kernel, stride)
        if len(stride) == 1:
            y, place = self.max_pool(x[:, None], (1, *kernel), (1, *stride))
            return y[:, 0], place
        return pool.max_forward(x, kernel, stride)

    def max_pool_backward(self, dy: np.ndarray, place: Any, extent: Ints, kernel: Ints, stride: Ints) -> np.ndarray:
        """Return the gradient of x: 2 where windows do not overlap, 5 to 14 where they do."""
        if not self._pools(dy, dy.shape[1:-1]):
            return super().max_pool_backward(dy, place, extent, kernel, stride)
        if len(stride) == 1:
            return self.max_pool_backward(dy[:, None], place, (1, *extent), (1, *kernel), (1, *stride))[:, 0]
        return pool.max_backward(dy, place, extent, kernel, stride)

    def max_pool_back_into(self, dx: np.ndarray, dy: np.ndarray, places: Any, kernel: Ints, stride: Ints) -> None:
        """Write the gradient of x into dx: without a copy, where that is whole and strips are of whole images."""
        parts = list(strips(dx, dy, kernel, stride, (1,) * len(kernel), self.strip))
        whole = dx.flags.c_contiguous and all(part.last and not part.rows.start for part in parts)
        whole = whole and isinstance(places, list) and all(positive is None for _, positive in places)
        if not whole or len(stride) == 1 or not self._pools(dy, dy.shape[1:-1]):
            return super().max_pool_back_into(dx, dy, places, kernel, stride)
        for part, (place, _) in zip(parts, places, strict=True):
            pool.max_backward_into(dx[part.samples], dy[part.samples], place, kernel, stride)

    def window_sum(self, x: np.ndarray, kernel: Ints, stride: Ints) -> np.ndarray:
        """Return the sum over every window: 1.2 to 3."""
        out = out_extent(x.shape[1:-1], kernel, stride, (1,) * len(kernel))
        if not (self._pools(x, out) and self._convolves(x, x.shape)):
            return super().window_sum(x, kernel, stride)
        if len(stride) == 1:
            return self.window_sum(x[:, None], (1, *kernel), (1, *stride))[:, 0]
        return pool.window_sum(x, kernel, stride)

    def window_spread(self, dy: np.ndarray, extent: Ints, kernel: Ints, stride: Ints) -> np.ndarray:
        """Return the adjoint of `window_sum`: 1.2 to 3."""
        if len(stride) > 2 or not (self._pools(dy, dy.shape[1:-1]) and self._convolves(dy, dy.shape)):
            return super().window_spread(dy, extent, kernel, stride)
        if len(stride) == 1:
            return self.window_spread(dy[:, None], (1, *extent), (1, *kernel), (1, *stride))[:, 0]
        return pool.window_spread(dy, extent, kernel, stride)

    def separable_filter(self, x: np.ndarray, taps: Taps) -> np.ndarray:
        """Return the valid correlation with the product of `taps`: 2 to 8."""
        kernel = [len(weights) for weights in taps]
        out = out_extent(x.shape[1:-1], kernel, (1,) * len(taps), (1,) * len(taps))
        if len(taps) == 1 or not (self._pools(x, out) and self._convolves(x, x.shape)):
            return super().separable_filter(x, taps)
        return pool.separable_filter(x, taps)

    def separable_spread(self, dy: np.ndarray, extent: Ints, taps: Taps) -> np.ndarray:
        """Return the adjoint of `separable_filter`: 2 to 9."""
        if len(taps) != 2 or not (self._pools(dy, dy.shape[1:-1]) and self._convolves(dy, dy.shape)):
            return super().separable_spread(dy, extent, taps)
        return pool.separable_spread(dy, taps)

    def matmul(self, a: np.ndarray, b: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """Return the matrix product: by torch's threads, because NumPy's would wait for them (both spin).

        With one thread NumPy is 4 times faster where a side is short, such as the classes of a last layer, and takes
        0.7 to 0.9 of the time where the result is to be written over.
        """
        if self.alone and (out is not None or a.size * b.shape[-1] <= self.few_products):
            return super().matmul(a, b, out)
        return torch.matmul(tensor(a), tensor(b), out=None if out is None else tensor(out)).numpy()

    def channel_sum(self, x: np.ndarray) -> np.ndarray:
        """Return the sum over everything but the channels: 2 to 4, with one thread."""
        if x.size < self.small or not self.alone or self.compiled is not None:
            return super().channel_sum(x)
        return tensor(x).flatten(0, -2).sum(0).numpy()

    def _convolves(self, x: np.ndarray, out: Ints) -> bool:
        """Tell whether torch's convolution is faster: oneDNN takes float32; without it, single volumes are slow."""
        return x.dtype == np.float32 and 0 not in (x.size, *out) and (x.ndim < 5 or len(x) > 1 or conv.takes(x))

    def _pools(self, x: np.ndarray, out: Ints) -> bool:
        """Tell whether torch's pooling is the faster."""
        return 0 not in (x.size, *out) and x.shape[-1] >= _FEW and x.ndim > 2


def _gomp_parallel() -> int:
    """Return the address of what starts the threads that PyTorch's kernels use, 0 if there is none.

    They wait for work, turning round, so that others would have to share their cores: after an operation of PyTorch's
    two of Python's threads are as slow as one, and these 1.7 times faster.
    """
    pools = [pool["filepath"] for pool in threadpool_info() if pool["internal_api"] == "openmp"]
    found = [path for path in pools if "torch" in path] or pools
    try:
        return ctypes.cast(ctypes.CDLL(found[0]).GOMP_parallel, ctypes.c_void_p).value or 0
    except (IndexError, OSError, AttributeError):
        return 0
