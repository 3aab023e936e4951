"""Kernels over NumPy's arrays, compiled if a C compiler was available when neondist was installed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..arrays.precision import ComputePrecision
from ..system.threads import count_threads
from .compiled_conv import FORWARD, INPUT, CompiledConvolution
from .gomp import gomp_parallel
from .kernels import Kernels
from .narrow import NarrowProducts
from .windows import boxes, out_extent

Ints = Sequence[int]
Taps = Sequence[Sequence[float]]
Window = tuple[np.ndarray, Ints]
"""numbers (*kernel), stride"""


class HostKernels(CompiledConvolution):
    """Kernels over NumPy's arrays."""

    def __init__(self) -> None:
        super().__init__()
        self.cores = count_threads()
        if self.cores > 1 and self.compiled is not None:
            from threadpoolctl import threadpool_limits

            self.threads, self.start = self.cores, gomp_parallel()
            # BLAS threads would compete with those of the other kernels: both spin
            self._closing.callback(threadpool_limits(1, user_api="blas").restore_original_limits)

    def in_precision(self, precision: ComputePrecision) -> Kernels:
        """Return kernels with operands of a precision; TF32 exists on GPUs only, and is float32 here."""
        if not precision.narrow:
            return self
        self.close()
        return NarrowHostKernels(precision)

    def max_pool_into(self, y: np.ndarray, x: np.ndarray, kernel: Ints, stride: Ints, clears: bool = False) -> Any:
        """Write the maxima into y; return the places: one byte each if compiled."""
        places = np.empty(y.shape, np.uint8)
        done = self._max_pool(False, x, y, places, kernel, stride, clears)
        return places if done else super().max_pool_into(y, x, kernel, stride, clears)

    def max_pool_back_into(self, dx: np.ndarray, dy: np.ndarray, places: Any, kernel: Ints, stride: Ints) -> None:
        """Write the gradient of x into dx, from the places of `max_pool_into`."""
        if isinstance(places, list):
            super().max_pool_back_into(dx, dy, places, kernel, stride)
        elif not self._max_pool(True, dx, dy, places, kernel, stride):  # not contiguous
            whole = np.empty(dx.shape, dx.dtype)
            self._max_pool(True, whole, np.ascontiguousarray(dy, dx.dtype), places, kernel, stride)
            self.copy(whole, dx)

    def window_sum(self, x: np.ndarray, kernel: Ints, stride: Ints) -> np.ndarray:
        """Return the sum over every window."""
        y = self._filtered(x, _boxes(kernel, stride))
        return super().window_sum(x, kernel, stride) if y is None else y

    def window_spread(self, dy: np.ndarray, extent: Ints, kernel: Ints, stride: Ints) -> np.ndarray:
        """Return the adjoint of `window_sum`."""
        dx = self._spread(dy, extent, _boxes(kernel, stride))
        return super().window_spread(dy, extent, kernel, stride) if dx is None else dx

    def separable_filter(self, x: np.ndarray, taps: Taps) -> np.ndarray:
        """Return the valid correlation of every channel with the product of `taps`."""
        y = self._filtered(x, _lines(taps))
        return super().separable_filter(x, taps) if y is None else y

    def separable_spread(self, dy: np.ndarray, extent: Ints, taps: Taps) -> np.ndarray:
        """Return the adjoint of `separable_filter`."""
        dx = self._spread(dy, extent, _lines(taps))
        return super().separable_spread(dy, extent, taps) if dx is None else dx

    def _filtered(self, x: np.ndarray, windows: Sequence[Window]) -> np.ndarray | None:
        """Return the valid correlation of every channel with one window after the other, None if it is not compiled."""
        for window, stride in windows:
            out = out_extent(x.shape[1:-1], window.shape, stride, (1,) * len(stride))
            y = self.filter_each(FORWARD, x, window, stride, out)
            if y is None:
                return None
            x = y
        return x

    def _spread(self, dy: np.ndarray, extent: Ints, windows: Sequence[Window]) -> np.ndarray | None:
        """Return the adjoint of `_filtered`, None if it is not compiled."""
        extents = [extent]
        for window, stride in windows[:-1]:
            extents.append(out_extent(extents[-1], window.shape, stride, (1,) * len(stride)))
        for (window, stride), seen in zip(reversed(windows), reversed(extents), strict=True):
            dx = self.filter_each(INPUT, dy, window, stride, seen)
            if dx is None:
                return None
            dy = dx
        return dy

    def _max_pool(
        self,
        back: bool,
        x: np.ndarray,
        y: np.ndarray,
        places: np.ndarray,
        kernel: Ints,
        stride: Ints,
        clears: bool = False,
    ) -> bool:
        if self.compiled is None:
            return False
        sizes = tuple(kernel), tuple(stride)
        done: bool = self.compiled.max_pool(back, clears, x, y, places, *sizes, self.threads, self.start)
        return done


class NarrowHostKernels(NarrowProducts, HostKernels):
    """Kernels over NumPy's arrays with operands of 16 bits."""

    def __init__(self, precision: ComputePrecision) -> None:
        super().__init__()
        self.precision = precision


def _boxes(kernel: Ints, stride: Ints) -> list[Window]:
    return [(np.ones(box), step) for box, step in boxes(kernel, stride)]


def _lines(taps: Taps) -> list[Window]:
    """Return each axis' taps as a window over all axes."""
    one = (1,) * len(taps)
    return [(np.reshape(weights, (*one[:axis], -1, *one[axis + 1 :])), one) for axis, weights in enumerate(taps)]
