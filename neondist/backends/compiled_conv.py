"""Compiled convolutions: 3 x 3 and 5 x 5 of stride 1 (_winograd.h), depthwise (_depthwise.h), and others."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from .rows import VECTOR_BYTES, ConvArgs, RowKernels, as_triple

Ints = Sequence[int]
_MIN_WINOGRAD_CHANNELS, _MIN_WINOGRAD_CELLS = 8, 128  # measured: the smallest numbers for which Winograd is faster
_MAX_WINOGRAD_WEIGHTS = 9 << 17  # with more, the transformed weights would take more than 8 MiB of float32
_MAX_DEPTHWISE_TAPS = 512  # maximum number of cells in a depthwise convolution's window
FORWARD, WEIGHT_GRADIENT, INPUT_GRADIENT = range(3)


class CompiledConvolution(RowKernels):
    """Convolution of NumPy's arrays into a given array; falls back to the base class where no compiled kernel applies.

    Windows 3 x 3 and 5 x 5 use F(2 x 2, k x k) (Lavin and Gray 2016), with 2.25 and 2.78 times fewer products. Sums
    of inputs and of weights are computed before the products. For 3 x 3, float32 errors are still not above oneDNN's,
    since sums are short (measured with 16, 64 and 256 channels: 0.6 to 1 times oneDNN's, for gradients of the weights
    0.3 to 0.9 times); for 5 x 5 they are 4 to 8 times the errors of direct sums, 1e-6 to 2e-6 of the outputs.
    """

    def has_compiled_kernel(self, x: np.ndarray, shape: Ints, groups: int) -> bool:
        """Return whether a compiled kernel applies to x (an input, or an output gradient) and weights of this shape."""
        return super().has_compiled_kernel(x, shape, groups) or self.uses_depthwise_kernel(x, shape, groups)

    def uses_depthwise_kernel(self, x: np.ndarray, shape: Ints, groups: int) -> bool:
        """Return whether the depthwise kernel applies."""
        *kernel, in_channels, out_channels = shape
        return (
            in_channels == 1 < groups == out_channels
            and out_channels * x.itemsize >= VECTOR_BYTES
            and prod(kernel) <= _MAX_DEPTHWISE_TAPS
            and x.ndim > 3
            and prod(x.shape[:-1]) >= _MIN_WINOGRAD_CELLS
            and hasattr(self.compiled, "depthwise")
        )

    def uses_winograd_kernel(self, x: np.ndarray, shape: Ints, args: ConvArgs) -> bool:
        """Return whether the Winograd kernel applies."""
        (*kernel, in_channels, out_channels), (stride, dilation, groups) = shape, args
        return (
            tuple(kernel[-2:]) in ((3, 3), (5, 5))
            and prod(stride) * prod(dilation) * groups == 1
            and min(in_channels, out_channels) >= _MIN_WINOGRAD_CHANNELS
            and prod(shape) <= _MAX_WINOGRAD_WEIGHTS
            and prod(x.shape[:-1]) >= _MIN_WINOGRAD_CELLS
            and hasattr(self.compiled, "winograd")
        )

    def filter_with_shared_window(
        self, pass_kind: int, x: np.ndarray, window: np.ndarray, stride: Ints, out_extent: Ints
    ) -> np.ndarray | None:
        """Return every channel's convolution with one window (*kernel), or the gradient of its input, given dy as x.

        Parameters
        ----------
        pass_kind : FORWARD or INPUT_GRADIENT
        out_extent : extent of the result

        Returns
        -------
        array (N, *out, C); None if no compiled kernel applies
        """
        channels = x.shape[-1]
        weights, y = np.empty((*window.shape, 1, channels), x.dtype), np.empty((len(x), *out_extent, channels), x.dtype)
        weights[...] = window[..., None, None]
        args = stride, (1,) * len(stride), channels
        done = hasattr(self.compiled, "depthwise") and self._try_depthwise(pass_kind, x, weights, y, None, args)
        return y if done else None

    def _try_convolve(
        self, x: np.ndarray, weights: np.ndarray, y: np.ndarray, bias: np.ndarray | None, args: ConvArgs, pad: Ints = ()
    ) -> bool:
        if args[2] > 1:
            return self._try_depthwise(FORWARD, x, np.ascontiguousarray(weights), y, bias, args)
        uses_winograd = self.uses_winograd_kernel(x, weights.shape, args)
        if uses_winograd and self._try_winograd(False, x, weights, y, bias, pad):
            return True
        return super()._try_convolve(x, weights, y, bias, args, pad)

    def _try_grad_input(self, dy: np.ndarray, weights: np.ndarray, dx: np.ndarray, args: ConvArgs, crop: Ints) -> bool:
        if args[2] > 1:
            return self._try_depthwise(INPUT_GRADIENT, dy, np.ascontiguousarray(weights), dx, None, args, crop)
        return super()._try_grad_input(dy, weights, dx, args, crop)

    def _try_grad_weights(self, x: np.ndarray, dy: np.ndarray, gradient: np.ndarray, args: ConvArgs) -> bool:
        if args[2] > 1:
            return bool(dy.size) and self._try_depthwise(WEIGHT_GRADIENT, x, gradient, dy, None, args)
        if self.uses_winograd_kernel(x, gradient.shape, args) and dy.size and self._try_winograd(True, x, gradient, dy):
            return True
        return super()._try_grad_weights(x, dy, gradient, args)

    def _try_winograd(
        self, backward: bool, x: np.ndarray, weights: np.ndarray, y: np.ndarray, bias: Any = None, pad: Ints = ()
    ) -> bool:
        pad_triple = as_triple(pad, 0)
        done: bool = self.compiled.winograd(backward, x, weights, y, bias, pad_triple, self.threads, self.gomp_address)
        return done

    def _try_depthwise(
        self, pass_kind: int, x: np.ndarray, w: np.ndarray, y: np.ndarray, bias: Any, args: ConvArgs, pad: Ints = ()
    ) -> bool:
        """Write the convolution of x into y, the weights' gradient into w, or, given dy as x, the input's into y."""
        kernel_args = as_triple(args[0], 1), as_triple(args[1], 1), as_triple(pad, 0)
        done: bool = self.compiled.depthwise(pass_kind, x, w, y, bias, *kernel_args, self.threads, self.gomp_address)
        return done
