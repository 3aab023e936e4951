"""Kernels over NumPy's arrays, compiled where a C compiler was when neondist was installed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .compiled_conv import CompiledConvolution
from .windows import Sides

Ints = Sequence[int]
_ROW = 16  # outputs: sums over fewer would be written as often as they are added to


class HostKernels(CompiledConvolution):
    """Kernels over NumPy's arrays."""

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
        """Return the gradient of the weights, by rows where that is faster."""
        found = self.weights_by_rows(x, dy, kernel, stride, dilation, groups)
        return super().conv_backward_weights(x, dy, kernel, stride, dilation, groups, zeros) if found is None else found

    def weights_by_rows(
        self, x: np.ndarray, dy: np.ndarray, kernel: Ints, stride: Ints, dilation: Ints, groups: int
    ) -> np.ndarray | None:
        """Return the gradient of the weights: of what the windows of a row of outputs see, nothing is gathered.

        None where it is not to be computed so, or cannot be.
        """
        if not self.goes_by_rows(x, dy, kernel, stride, dilation, groups):
            return None
        gradient, ones = np.empty((*kernel, x.shape[-1], dy.shape[-1]), x.dtype), (1,) * (3 - len(kernel))
        how = (*ones, *stride), (*ones, *dilation), self.threads, self.start
        return gradient if self.compiled.weights(x, dy, gradient, *how) else None

    def goes_by_rows(
        self, x: np.ndarray, dy: np.ndarray, kernel: Ints, stride: Ints, dilation: Ints, groups: int
    ) -> bool:
        """Tell whether the gradient of weights is to be computed so."""
        return (
            hasattr(self.compiled, "weights")
            and groups == dilation[-1] == 1 < x.ndim - 2
            and dy.shape[-2] >= _ROW
            and dy.shape[-1] * dy.itemsize % 32 == 0
            and x.strides[-2:] == (x.shape[-1] * x.itemsize, x.itemsize)
            and dy.strides[-1] == dy.itemsize
            and not self.transforms(x, (*kernel, x.shape[-1], dy.shape[-1]), stride, dilation, groups)
        )

    def max_pool_into(self, y: np.ndarray, x: np.ndarray, kernel: Ints, stride: Ints, clears: bool = False) -> Any:
        """Write the maxima into y; return the places: one byte each if this is compiled."""
        places = np.empty(y.shape, np.uint8)
        done = self._max_pool(False, x, y, places, kernel, stride, clears)
        return places if done else super().max_pool_into(y, x, kernel, stride, clears)

    def max_pool_back_into(self, dx: np.ndarray, dy: np.ndarray, places: Any, kernel: Ints, stride: Ints) -> None:
        """Write the gradient of x into dx, as `max_pool_into` has gone."""
        if isinstance(places, list):
            super().max_pool_back_into(dx, dy, places, kernel, stride)
        elif not self._max_pool(True, dx, dy, places, kernel, stride):  # their cells are not in one piece
            whole = np.empty(dx.shape, dx.dtype)
            self._max_pool(True, whole, np.ascontiguousarray(dy, dx.dtype), places, kernel, stride)
            self.copy(whole, dx)

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
