"""Kernels over NumPy's arrays, compiled if a C compiler was available when neondist was installed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..arrays.precision import ComputePrecision
from ..system.threads import default_thread_count
from .compiled_conv import FORWARD, INPUT_GRADIENT, CompiledConvolution
from .gomp import gomp_parallel_address
from .kernels import Kernels
from .narrow import HalfPrecisionKernels
from .windows import factor_box_window, output_extent

Ints = Sequence[int]
Taps = Sequence[Sequence[float]]
FilterWindow = tuple[np.ndarray, Ints]
"""weights (*kernel), stride"""


class HostKernels(CompiledConvolution):
    """Kernels over NumPy's arrays."""

    def __init__(self) -> None:
        super().__init__()
        self.thread_count = default_thread_count()
        if self.thread_count > 1 and self.compiled is not None:
            from threadpoolctl import threadpool_limits

            self.threads, self.gomp_address = self.thread_count, gomp_parallel_address()
            # BLAS threads would compete with the threads of the other kernels, since both spin
            self._cleanup.callback(threadpool_limits(1, user_api="blas").restore_original_limits)

    def in_precision(self, precision: ComputePrecision) -> Kernels:
        """Return kernels with operands of a precision; TF32 exists only on GPUs, and is replaced by float32."""
        if not precision.has_16_bit_operands:
            return self
        self.close()
        return HalfPrecisionHostKernels(precision)

    def max_pool_into(self, y: np.ndarray, x: np.ndarray, kernel: Ints, stride: Ints, fused_relu: bool = False) -> Any:
        """Write the maxima into y; return their positions, one byte each if the kernel is compiled."""
        positions = np.empty(y.shape, np.uint8)
        done = self._try_max_pool(False, x, y, positions, kernel, stride, fused_relu)
        return positions if done else super().max_pool_into(y, x, kernel, stride, fused_relu)

    def max_pool_backward_into(
        self, dx: np.ndarray, dy: np.ndarray, max_positions: Any, kernel: Ints, stride: Ints
    ) -> None:
        """Write the gradient of x into dx, from the positions returned by `max_pool_into`."""
        if isinstance(max_positions, list):
            super().max_pool_backward_into(dx, dy, max_positions, kernel, stride)
        elif not self._try_max_pool(True, dx, dy, max_positions, kernel, stride):  # not contiguous
            contiguous_dx = np.empty(dx.shape, dx.dtype)
            self._try_max_pool(True, contiguous_dx, np.ascontiguousarray(dy, dx.dtype), max_positions, kernel, stride)
            self.copy(contiguous_dx, dx)

    def window_sum(self, x: np.ndarray, kernel: Ints, stride: Ints) -> np.ndarray:
        """Return the sum over every window."""
        y = self._try_filter(x, _box_windows(kernel, stride))
        return super().window_sum(x, kernel, stride) if y is None else y

    def window_sum_adjoint(self, dy: np.ndarray, extent: Ints, kernel: Ints, stride: Ints) -> np.ndarray:
        """Return the adjoint of `window_sum`."""
        dx = self._try_filter_adjoint(dy, extent, _box_windows(kernel, stride))
        return super().window_sum_adjoint(dy, extent, kernel, stride) if dx is None else dx

    def separable_filter(self, x: np.ndarray, taps: Taps) -> np.ndarray:
        """Return the valid correlation of every channel with the product of `taps`."""
        y = self._try_filter(x, _axis_windows(taps))
        return super().separable_filter(x, taps) if y is None else y

    def separable_filter_adjoint(self, dy: np.ndarray, extent: Ints, taps: Taps) -> np.ndarray:
        """Return the adjoint of `separable_filter`."""
        dx = self._try_filter_adjoint(dy, extent, _axis_windows(taps))
        return super().separable_filter_adjoint(dy, extent, taps) if dx is None else dx

    def _try_filter(self, x: np.ndarray, windows: Sequence[FilterWindow]) -> np.ndarray | None:
        """Return the successive valid correlations of every channel with the windows; None if no kernel applies."""
        for window, stride in windows:
            out_extent = output_extent(x.shape[1:-1], window.shape, stride, (1,) * len(stride))
            y = self.filter_with_shared_window(FORWARD, x, window, stride, out_extent)
            if y is None:
                return None
            x = y
        return x

    def _try_filter_adjoint(self, dy: np.ndarray, extent: Ints, windows: Sequence[FilterWindow]) -> np.ndarray | None:
        """Return the adjoint of `_try_filter`; None if no compiled kernel applies."""
        extents = [extent]
        for window, stride in windows[:-1]:
            extents.append(output_extent(extents[-1], window.shape, stride, (1,) * len(stride)))
        for (window, stride), seen in zip(reversed(windows), reversed(extents), strict=True):
            dx = self.filter_with_shared_window(INPUT_GRADIENT, dy, window, stride, seen)
            if dx is None:
                return None
            dy = dx
        return dy

    def _try_max_pool(
        self,
        backward: bool,
        x: np.ndarray,
        y: np.ndarray,
        max_positions: np.ndarray,
        kernel: Ints,
        stride: Ints,
        fused_relu: bool = False,
    ) -> bool:
        if self.compiled is None:
            return False
        kernel_and_stride = tuple(kernel), tuple(stride)
        done: bool = self.compiled.max_pool(
            backward, fused_relu, x, y, max_positions, *kernel_and_stride, self.threads, self.gomp_address
        )
        return done


class HalfPrecisionHostKernels(HalfPrecisionKernels, HostKernels):
    """Kernels over NumPy's arrays with 16-bit operands."""

    def __init__(self, precision: ComputePrecision) -> None:
        super().__init__()
        self.precision = precision


def _box_windows(kernel: Ints, stride: Ints) -> list[FilterWindow]:
    return [(np.ones(box), step) for box, step in factor_box_window(kernel, stride)]


def _axis_windows(taps: Taps) -> list[FilterWindow]:
    """Return the taps of each axis as a window over all axes."""
    one = (1,) * len(taps)
    return [(np.reshape(weights, (*one[:axis], -1, *one[axis + 1 :])), one) for axis, weights in enumerate(taps)]
