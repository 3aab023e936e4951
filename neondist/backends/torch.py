"""PyTorch kernels over NumPy arrays, without copies and without autograd.

PyTorch is imported when one of its kernels is first needed: without PyTorch, a process is 200 MiB smaller.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ..arrays.precision import ComputePrecision
from ..system.threads import default_thread_count
from .allocator import keep_freed_memory, release_cached_memory
from .host import HostKernels
from .kernels import Kernels
from .narrow import HalfPrecisionKernels
from .windows import Sides, output_extent, split_into_strips

Ints = Sequence[int]
Taps = Sequence[Sequence[float]]
_MIN_POOL_CHANNELS = 4  # with fewer, torch's pooling does not fill a vector, and NumPy is at least as fast


class TorchKernelMixin(Kernels):
    """PyTorch's kernels where they are faster than NumPy's; arrays remain NumPy arrays.

    Speed-ups over NumPy are given for float32, one thread and AVX2.
    """

    #: Number of elements, or multiplications, below which the overhead of calling torch exceeds NumPy's time
    min_torch_elements = 1 << 15
    #: Number of multiplications above which torch's threads justify importing torch
    min_threaded_products = 1 << 28

    @cached_property
    def torch_calls(self) -> Any:
        """The `TorchKernelModules`; None if PyTorch cannot be imported."""
        try:
            import torch

            from . import torch_conv, torch_narrow, torch_pool
            from .torch_arrays import matmul
        except Exception as error:  # a broken installation may raise any exception
            warnings.warn(f"PyTorch cannot be imported ({error}): NumPy's slower kernels are used", stacklevel=2)
            return None
        num_threads_before = torch.get_num_threads()
        self._cleanup.callback(torch.set_num_threads, num_threads_before)
        # torch may have been imported before the launcher limited the number of threads
        torch.set_num_threads(min(default_thread_count(), num_threads_before))
        return TorchKernelModules(torch_conv, torch_pool, matmul, torch_narrow)

    def matmul(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """Return the product, by torch if large: NumPy uses one thread if other kernels use several (`HostKernels`)."""
        if a.size * b.shape[-1] < self.min_threaded_products or default_thread_count() == 1 or self.torch_calls is None:
            return super().matmul(a, b)
        return self.torch_calls.matmul(a, b)

    def conv_forward(
        self,
        x: np.ndarray,
        weights: np.ndarray,
        stride: Ints,
        dilation: Ints,
        groups: int,
        bias: np.ndarray | None = None,
        zero_widths: Sides | None = None,
    ) -> np.ndarray:
        """Return the valid convolution plus bias (N, *out, C_out); speed-up 1.3 to 4, depthwise 30."""
        out = output_extent(x.shape[1:-1], weights.shape[:-2], stride, dilation)
        is_small = weights.size * prod(out) * len(x) < self.min_torch_elements
        if is_small or not self._prefers_torch_conv(x, (len(x), *out, weights.shape[-1]), weights.shape[:-2], stride):
            return super().conv_forward(x, weights, stride, dilation, groups, bias, zero_widths)
        sides = zero_widths or ((0, 0),) * len(stride)
        return self.torch_calls.conv.forward(x, weights, stride, dilation, groups, bias, sides)

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
        """Return the gradient of x (N, *extent, C_in), without `crop`; speed-up 1.6 to 3.4, depthwise 37."""
        if not self._prefers_torch_conv(dy, dy.shape, weights.shape[:-2], stride):
            return super().conv_backward_input(dy, weights, extent, stride, dilation, groups, crop)
        sides = crop or ((0, 0),) * len(stride)
        return self.torch_calls.conv.backward_input(dy, weights, extent, stride, dilation, groups, sides)

    def conv_backward_weights(
        self,
        x: np.ndarray,
        dy: np.ndarray,
        kernel: Ints,
        stride: Ints,
        dilation: Ints,
        groups: int,
        zero_widths: Sides | None = None,
    ) -> np.ndarray:
        """Return the gradient of the weights; speed-up 1 to 1.5, with few channels 2 to 4, depthwise 15."""
        is_small = prod(kernel) * x.shape[-1] // groups * dy.size < self.min_torch_elements
        if is_small or not self._prefers_torch_conv(x, dy.shape, kernel, stride):
            return super().conv_backward_weights(x, dy, kernel, stride, dilation, groups, zero_widths)
        sides = zero_widths or ((0, 0),) * len(stride)
        return self.torch_calls.conv.backward_weights(x, dy, kernel, stride, dilation, groups, sides)

    def conv_into(self, y: np.ndarray, x: np.ndarray, weights: np.ndarray, *args: Any) -> None:
        """Write the convolution plus bias into y by `write_output`, with the weights reordered for oneDNN once."""
        super().conv_into(y, x, self._reorder_weights_if_faster(x, weights), *args)

    def conv_backward_into(
        self, dx: np.ndarray | None, x: np.ndarray, dy: np.ndarray, weights: np.ndarray, *args: Any
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the gradients of weights and bias, as the base class does, with the weights reordered once."""
        dweights, dbias = super().conv_backward_into(dx, x, dy, self._reorder_weights_if_faster(x, weights), *args)
        if not dweights.flags.c_contiguous:
            dweights = self.torch_calls.conv.restore_weight_order(dweights)
        return dweights, dbias

    def max_pool(self, x: np.ndarray, kernel: Ints, stride: Ints) -> tuple[np.ndarray, Any]:
        """Return the maxima and their positions; speed-up 4 to 14."""
        if not self._prefers_torch_pool(x, output_extent(x.shape[1:-1], kernel, stride, (1,) * len(kernel))):
            return super().max_pool(x, kernel, stride)
        return self.torch_calls.pool.max_forward(x, kernel, stride)

    def max_pool_backward(
        self, dy: np.ndarray, max_positions: Any, extent: Ints, kernel: Ints, stride: Ints
    ) -> np.ndarray:
        """Return the gradient of x; speed-up 2 if windows do not overlap, 5 to 14 if they do."""
        if not self._prefers_torch_pool(dy, dy.shape[1:-1]):
            return super().max_pool_backward(dy, max_positions, extent, kernel, stride)
        return self.torch_calls.pool.max_backward(dy, max_positions, extent, kernel, stride)

    def max_pool_backward_into(
        self, dx: np.ndarray, dy: np.ndarray, max_positions: Any, kernel: Ints, stride: Ints
    ) -> None:
        """Write the gradient of x into dx: without a copy if dx is contiguous and strips are whole images."""
        strips = list(split_into_strips(dx, dy, kernel, stride, (1,) * len(kernel), self.strip_elements))
        whole = dx.flags.c_contiguous and all(strip.is_last and not strip.output_rows.start for strip in strips)
        whole = whole and isinstance(max_positions, list) and all(positive is None for _, positive in max_positions)
        if not whole or not self._prefers_torch_pool(dy, dy.shape[1:-1]):
            return super().max_pool_backward_into(dx, dy, max_positions, kernel, stride)
        for strip, (positions, _) in zip(strips, max_positions, strict=True):
            self.torch_calls.pool.max_backward_into(dx[strip.samples], dy[strip.samples], positions, kernel, stride)

    def window_sum(self, x: np.ndarray, kernel: Ints, stride: Ints) -> np.ndarray:
        """Return the sum over every window; speed-up 1.2 to 3."""
        out = output_extent(x.shape[1:-1], kernel, stride, (1,) * len(kernel))
        if not (self._prefers_torch_pool(x, out) and self._prefers_torch_conv(x, x.shape, kernel, stride)):
            return super().window_sum(x, kernel, stride)
        return self.torch_calls.pool.window_sum(x, kernel, stride)

    def window_sum_adjoint(self, dy: np.ndarray, extent: Ints, kernel: Ints, stride: Ints) -> np.ndarray:
        """Return the adjoint of `window_sum`; speed-up 1.2 to 3."""
        if len(stride) > 2 or not (
            self._prefers_torch_pool(dy, dy.shape[1:-1]) and self._prefers_torch_conv(dy, dy.shape)
        ):
            return super().window_sum_adjoint(dy, extent, kernel, stride)
        return self.torch_calls.pool.window_sum_adjoint(dy, extent, kernel, stride)

    def separable_filter(self, x: np.ndarray, taps: Taps) -> np.ndarray:
        """Return the valid correlation with the product of `taps`; speed-up 2 to 8."""
        kernel = [len(weights) for weights in taps]
        out = output_extent(x.shape[1:-1], kernel, (1,) * len(taps), (1,) * len(taps))
        if not (self._prefers_torch_pool(x, out) and self._prefers_torch_conv(x, x.shape)):
            return super().separable_filter(x, taps)
        return self.torch_calls.pool.separable_filter(x, taps)

    def separable_filter_adjoint(self, dy: np.ndarray, extent: Ints, taps: Taps) -> np.ndarray:
        """Return the adjoint of `separable_filter`; speed-up 2 to 9."""
        if len(taps) != 2 or not (
            self._prefers_torch_pool(dy, dy.shape[1:-1]) and self._prefers_torch_conv(dy, dy.shape)
        ):
            return super().separable_filter_adjoint(dy, extent, taps)
        return self.torch_calls.pool.separable_filter_adjoint(dy, taps)

    def _reorder_weights_if_faster(self, x: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Return the weights in oneDNN's memory order if this is faster for a view, otherwise unchanged."""
        is_worthwhile = prod(weights.shape[:-2]) > 1 and self._prefers_torch_conv(x, ())
        return self.torch_calls.conv.reorder_for_onednn(weights) if is_worthwhile else weights

    def _prefers_torch_conv(self, x: np.ndarray, out: Ints, kernel: Ints = (), stride: Ints = (1,)) -> bool:
        """Return whether torch's convolution is faster: oneDNN supports float32; single volumes are slow without it.

        The backward pass of strided channels-last kernels of one cell crashes on some processors (PyTorch 2.13).
        """
        if max(stride) > 1 and prod(kernel) == 1:
            return False
        is_supported = x.dtype == np.float32 and x.ndim > 3 and 0 not in (x.size, *out) and self.torch_calls is not None
        return is_supported and (x.ndim < 5 or len(x) > 1 or self.torch_calls.conv.onednn_supports(x))

    def _prefers_torch_pool(self, x: np.ndarray, out_extent: Ints) -> bool:
        """Return whether torch's pooling is faster."""
        is_large = 0 not in (x.size, *out_extent) and x.shape[-1] >= _MIN_POOL_CHANNELS and x.ndim > 3
        return is_large and self.torch_calls is not None


class TorchKernelModules(NamedTuple):
    """Modules of functions that call PyTorch, imported at first use."""

    conv: Any
    pool: Any
    matmul: Any
    half_precision: Any


class TorchKernels(HostKernels, TorchKernelMixin):
    """Compiled kernels, else PyTorch's, else NumPy's."""

    def __init__(self) -> None:
        super().__init__()
        # measured: one thread is as fast with 2^19 as with 2^20 (2^18: 1.2 times slower); two threads gain at most 5 %
        # from 2^22 over 2^20 (six networks), which takes 30 to 100 MiB less
        self.strip_elements = 1 << 19 if self.thread_count == 1 else 1 << 20
        self._cleanup.callback(keep_freed_memory())
        if "torch" in sys.modules:
            _ = self.torch_calls  # limits torch's threads

    def in_precision(self, precision: ComputePrecision) -> Kernels:
        """Return kernels with operands of a precision."""
        if not precision.has_16_bit_operands:
            return self
        self.close()
        return HalfPrecisionTorchKernels(precision)

    def release_cached_memory(self, byte_limit: int) -> None:
        """Return memory cached by malloc to the system."""
        release_cached_memory(byte_limit)


class HalfPrecisionTorchMixin(HalfPrecisionKernels, TorchKernelMixin):
    """Kernels with PyTorch's 16-bit convolutions where these are fast."""

    @cached_property
    def half_precision_calls(self) -> Any:
        """Functions that call PyTorch's 16-bit kernels; None if these are slow here, or PyTorch is missing."""
        half_calls = None if self.torch_calls is None else self.torch_calls.half_precision
        return half_calls if half_calls is not None and self._has_fast_instructions(half_calls) else None

    def conv_forward(
        self,
        x: Any,
        weights: Any,
        stride: Ints,
        dilation: Ints,
        groups: int,
        bias: Any | None = None,
        zero_widths: Sides | None = None,
    ) -> Any:
        """Return the valid convolution plus bias (N, *out, C_out)."""
        if not self._uses_half_precision_conv(x, weights, stride):
            return super().conv_forward(x, weights, stride, dilation, groups, bias, zero_widths)
        return self.half_precision_calls.forward(self.precision.name, x, weights, stride, dilation, groups, bias)

    def conv_backward_input(
        self, dy: Any, weights: Any, extent: Ints, stride: Ints, dilation: Ints, groups: int, crop: Sides | None = None
    ) -> Any:
        """Return the gradient of x (N, *extent, C_in), without `crop`."""
        if not self._uses_half_precision_conv(dy, weights, stride):
            return super().conv_backward_input(dy, weights, extent, stride, dilation, groups, crop)
        return self.half_precision_calls.backward_input(
            self.precision.name, dy, weights, extent, stride, dilation, groups, crop
        )

    def _has_fast_instructions(self, half_calls: Any) -> bool:
        """Return whether this processor or GPU has instructions for the precision."""
        is_fast: bool = half_calls.has_fast_instructions(self.precision.name)
        return is_fast

    def _uses_half_precision_conv(self, x: Any, weights: Any, stride: Ints) -> bool:
        can_use_half = self.precision.has_16_bit_operands and self.half_precision_calls is not None
        return can_use_half and self._prefers_torch_conv(x, weights.shape, weights.shape[:-2], stride)


class HalfPrecisionTorchKernels(HalfPrecisionTorchMixin, TorchKernels):
    """Kernels over NumPy's arrays with 16-bit operands."""

    def __init__(self, precision: ComputePrecision) -> None:
        super().__init__()
        self.precision = precision

    def round_operand(self, x: np.ndarray, precision: ComputePrecision) -> np.ndarray:
        """Return float32 elements rounded to the nearest value in a precision; PyTorch is 10 times as fast as NumPy."""
        if x.size < self.min_torch_elements or x.dtype != np.float32 or self.torch_calls is None:
            return super().round_operand(x, precision)
        result: np.ndarray = self.torch_calls.half_precision.round_to_dtype(precision.name, x)
        return result
