"""Kernels over NumPy's arrays, compiled where a C compiler was when neondist was installed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..threads import count_threads
from .compiled_conv import CompiledConvolution
from .gomp import gomp_parallel

Ints = Sequence[int]


class HostKernels(CompiledConvolution):
    """Kernels over NumPy's arrays."""

    def __init__(self) -> None:
        super().__init__()
        self.cores = count_threads()
        if self.cores > 1 and self.compiled is not None:
            from threadpoolctl import threadpool_limits

            self.threads, self.start = self.cores, gomp_parallel()
            # its own threads would wait for those of the other kernels: both spin
            self._closing.callback(threadpool_limits(1, user_api="blas").restore_original_limits)

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
