"""What a backend offers: arrays and kernels.

Kernels work on views, so every convolution and pooling is 'valid': padding and halo are there already. Activations are
channels-last (N, *spatial, C), weights (*kernel, C_in / groups, C_out). Extents may be zero.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .strips import Gatherer, Sides, clear_sides, strips

Ints = Sequence[int]


class Backend(ABC):
    """Arrays and kernels of one library; a backend overrides only what it does better."""

    name: str
    #: Numbers of a strip: smaller ones compute more overlap, larger ones leave the cache
    strip: int

    def close(self) -> None:  # noqa: B027 - most change nothing
        """Take back what the backend has changed in this process, such as numbers of threads."""

    @abstractmethod
    def full(self, shape: Ints, value: float, dtype: np.dtype) -> Any:
        """Return a new array filled with `value`."""

    @abstractmethod
    def empty(self, shape: Ints, dtype: np.dtype) -> Any:
        """Return a new array with any values."""

    @abstractmethod
    def asarray(self, array: Any, dtype: np.dtype) -> Any:
        """Return a new contiguous array of this backend with the values of `array`."""

    @abstractmethod
    def to_numpy(self, array: Any) -> np.ndarray:
        """Return the values as a NumPy array."""

    def zeros(self, shape: Ints, dtype: np.dtype) -> Any:
        """Return a new array of zeros."""
        return self.full(shape, 0.0, dtype)

    def matmul(self, a: Any, b: Any) -> Any:
        """Return the product of two matrices, or stacks of them."""
        return a @ b

    @abstractmethod
    def conv_forward(
        self, x: Any, weights: Any, stride: Ints, dilation: Ints, groups: int, bias: Any | None = None
    ) -> Any:
        """Return the valid convolution (cross-correlation) of x with the weights, plus bias, (N, *out, C_out)."""

    @abstractmethod
    def conv_backward_input(
        self,
        dy: Any,
        weights: Any,
        extent: Ints,
        stride: Ints,
        dilation: Ints,
        groups: int,
        crop: Sides | None = None,
    ) -> Any:
        """Return the gradient of x (N, *extent, C_in), without the cells of `crop` at the ends of every axis."""

    @abstractmethod
    def conv_backward_weights(
        self,
        x: Any,
        dy: Any,
        kernel: Ints,
        stride: Ints,
        dilation: Ints,
        groups: int,
        zeros: Sides | None = None,
    ) -> Any:
        """Return the gradient of the weights (*kernel, C_in / groups, C_out).

        `zeros` tells how many cells at the ends of every axis of x are zero: they need no products.
        """

    def conv_into(
        self,
        y: Any,
        x: Any,
        weights: Any,
        stride: Ints,
        dilation: Ints,
        groups: int,
        bias: Any | None,
        finish: Callable[[Any, Any], None],
    ) -> None:
        """Write finish(valid convolution of x plus bias) into y, strip by strip.

        Parameters
        ----------
        y : array (N, *out, C_out)
            Of any strides.
        finish : callable
            `finish(z, y)` writes what shall be kept of a strip z into that strip of y; it may overwrite z.
        """
        for strip in strips(x, y, weights.shape[:-2], stride, dilation, self.strip):
            finish(self.conv_forward(x[strip.view], weights, stride, dilation, groups, bias), y[strip.out])

    def conv_back_into(
        self,
        dx: Any | None,
        x: Any,
        dy: Any,
        weights: Any,
        stride: Ints,
        dilation: Ints,
        groups: int,
        begin: Callable[[tuple], Any],
        outside: Sides | None = None,
    ) -> tuple[Any, Any]:
        """Return the gradients of weights and bias, and write that of x into dx, strip by strip.

        Parameters
        ----------
        dx : array (N, *extent, C_in) or None
            Of any strides; None: it is not wanted.
        dy : array (N, *out, C_out)
            Only its shape is used.
        begin : callable
            `begin(index)` returns the gradient of a strip of the convolution, contiguous.
        outside : (before, after) for every axis, optional
            Cells at the ends of x that are zero; in dx, where nobody wants them, they are whatever is quickest.
        """
        kernel = weights.shape[:-2]
        rows, *columns = outside or ((0, 0),) * len(kernel)
        by_weights, by_bias = self.zeros(weights.shape, x.dtype), self.zeros(weights.shape[-1:], x.dtype)
        gatherer = None if dx is None else Gatherer(clear_sides(dx, columns), dy, self.copy)
        for strip in strips(x, dy, kernel, stride, dilation, self.strip):
            dz, seen = begin(strip.out), x[strip.view]
            how = stride, dilation, groups
            by_weights += self.conv_backward_weights(seen, dz, kernel, *how, (strip.outside(rows, x), *columns))
            by_bias += self.channel_sum(dz)
            if gatherer is not None:
                gatherer.add(strip, self.conv_backward_input(dz, weights, seen.shape[1:-1], *how, ((0, 0), *columns)))
        return by_weights, by_bias

    @abstractmethod
    def copy(self, source: Any, target: Any) -> None:
        """Copy the values of `source` into `target`, both of any strides."""

    @abstractmethod
    def rectify(self, z: Any, y: Any) -> None:
        """Write max(z, 0) into y, both of any strides."""

    @abstractmethod
    def rectify_back(self, y: Any, dy: Any) -> Any:
        """Return dy where y is positive and 0 elsewhere: a new, contiguous array."""

    @abstractmethod
    def local_forward(self, x: Any, weights: Any, stride: Ints) -> Any:
        """Return the unshared convolution (N, *out, C_out); weights (*out, *kernel, C_in, C_out)."""

    @abstractmethod
    def local_backward_input(self, dy: Any, weights: Any, extent: Ints, stride: Ints) -> Any:
        """Return the gradient of x (N, *extent, C_in)."""

    @abstractmethod
    def local_backward_weights(self, x: Any, dy: Any, weights: Any, stride: Ints) -> Any:
        """Return the gradient of the unshared weights, of the shape of `weights`."""

    @abstractmethod
    def max_pool(self, x: Any, kernel: Ints, stride: Ints) -> tuple[Any, Any]:
        """Return the maxima and, for the way back, the place of each window's first maximum in row-major order.

        What a place is, the backend alone knows.
        """

    @abstractmethod
    def max_pool_backward(self, dy: Any, place: Any, extent: Ints, kernel: Ints, stride: Ints) -> Any:
        """Return the gradient of x (N, *extent, C)."""

    def max_pool_into(self, y: Any, x: Any, kernel: Ints, stride: Ints) -> list[Any]:
        """Write the maxima into y, of any strides, strip by strip; return the places of each strip."""
        places = []
        for strip in strips(x, y, kernel, stride, (1,) * len(kernel), self.strip):
            best, place = self.max_pool(x[strip.view], kernel, stride)
            self.copy(best, y[strip.out])
            places.append(place)
        return places

    def max_pool_back_into(self, dx: Any, dy: Any, places: Sequence[Any], kernel: Ints, stride: Ints) -> None:
        """Write the gradient of x into dx (N, *extent, C), of any strides, strip by strip."""
        gatherer = Gatherer(dx, dy, self.copy)
        for strip, place in zip(strips(dx, dy, kernel, stride, (1,) * len(kernel), self.strip), places, strict=True):
            extent = dx[strip.view].shape[1:-1]
            gatherer.add(strip, self.max_pool_backward(dy[strip.out], place, extent, kernel, stride))

    @abstractmethod
    def window_sum(self, x: Any, kernel: Ints, stride: Ints) -> Any:
        """Return the sum over every window."""

    @abstractmethod
    def window_spread(self, dy: Any, extent: Ints, kernel: Ints, stride: Ints) -> Any:
        """Return the adjoint of `window_sum`: every window's value added to each of its cells."""

    @abstractmethod
    def separable_filter(self, x: Any, taps: Sequence[Sequence[float]]) -> Any:
        """Return the valid correlation of every channel with the product of `taps`, a vector for each spatial axis."""

    @abstractmethod
    def separable_spread(self, dy: Any, extent: Ints, taps: Sequence[Sequence[float]]) -> Any:
        """Return the adjoint of `separable_filter`, (N, *extent, C)."""

    @abstractmethod
    def channel_sum(self, x: Any) -> Any:
        """Return the sum over everything but the channels, (C,)."""

    @abstractmethod
    def sample_sum(self, x: Any) -> Any:
        """Return each sample's sum over its cells, (N, C)."""
