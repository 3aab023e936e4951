"""Convolutions 3 x 3 and 5 x 5 of stride 1 with 2.25 and 2.78 times fewer products, compiled (_winograd.h)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np

from .cells import CompiledCells
from .kernels import Kernels
from .windows import Sides, clear_sides, cropped, out_extent, strips

Ints = Sequence[int]
_CHANNELS, _CELLS = 8, 128  # measured: the fewest that gain by it
_WEIGHTS = 9 << 17  # with more, transformed ones would take more than 8 MiB of float32


class Winograd(CompiledCells, Kernels):
    """Convolution of NumPy's arrays by F(2 x 2, k x k) (Lavin and Gray 2016), k 3 or 5, else as the table does it.

    Sums of inputs, and of weights, come before the products. With 3 x 3 errors of float32 are still below oneDNN's
    (measured with 16, 64 and 256 channels: 0.6 to 1 times, those of the weights' gradients 0.3 to 0.9), for sums are
    short; with 5 x 5 they are 4 to 8 times those of direct sums, 1e-6 to 2e-6 of the outputs.
    """

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
        """Return the valid convolution plus bias (N, *out, C_out)."""
        if self.transforms(x, weights.shape, stride, dilation, groups):
            out = out_extent(x.shape[1:-1], weights.shape[:-2], stride, dilation)
            y = np.empty((len(x), *out, weights.shape[-1]), x.dtype)
            if self._transform(False, x, weights, y, bias):
                return y
        return super().conv_forward(x, weights, stride, dilation, groups, bias, zeros)

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
        """Return the gradient of x (N, *extent, C_in), without `crop`."""
        if self.transforms(dy, weights.shape, stride, dilation, groups):
            sides = crop or ((0, 0),) * len(stride)
            inside = [max(0, n - sum(ends)) for n, ends in zip(extent, sides, strict=True)]
            dx = np.empty((len(dy), *inside, weights.shape[-2]), dy.dtype)
            if self._transform_back(dy, weights, dx, sides):
                return dx
        return super().conv_backward_input(dy, weights, extent, stride, dilation, groups, crop)

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
        """Return the gradient of the weights (*kernel, C_in / groups, C_out)."""
        shape = *kernel, x.shape[-1] // groups, dy.shape[-1]
        if self.transforms(x, shape, stride, dilation, groups) and dy.size:
            gradient = np.empty(shape, x.dtype)
            if self._transform(True, x, gradient, dy):
                return gradient
        return super().conv_backward_weights(x, dy, kernel, stride, dilation, groups, zeros)

    def conv_into(
        self,
        y: np.ndarray,
        x: np.ndarray,
        weights: np.ndarray,
        stride: Ints,
        dilation: Ints,
        groups: int,
        bias: np.ndarray | None,
        finish: Callable[[np.ndarray, np.ndarray], None],
        outside: Sides | None = None,
    ) -> None:
        """Write finish(convolution plus bias) into y, in place."""
        done, how = self.transforms(x, weights.shape, stride, dilation, groups), (stride, dilation)
        for strip in strips(x, y, weights.shape[:-2], *how, self._conv_strip(x, y, weights, *how)) if done else ():
            part = y[strip.out]
            done = self._transform(False, x[strip.view], weights, part, bias)
            if not done:
                break
            finish(part, part)
        if not done:
            super().conv_into(y, x, weights, stride, dilation, groups, bias, finish, outside)

    def conv_back_into(
        self,
        dx: np.ndarray | None,
        x: np.ndarray,
        dy: np.ndarray,
        weights: np.ndarray,
        stride: Ints,
        dilation: Ints,
        groups: int,
        begin: Callable[[tuple], np.ndarray],
        outside: Sides | None = None,
        weighted: bool = True,
        clears: bool = False,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the gradients of weights and bias, and write that of x into dx.

        Each row of dx is computed once: a strip begins with the rows of the one before that it still needs.
        """
        how = stride, dilation, groups
        if not (self.transforms(x, weights.shape, *how) and dy.size):
            return super().conv_back_into(dx, x, dy, weights, *how, begin, outside, weighted, clears)
        kernel, sides = weights.shape[:-2], outside or ((0, 0),) * len(stride)
        by_weights, by_bias = np.zeros(weights.shape, x.dtype), np.zeros(weights.shape[-1], x.dtype)
        inside, part = None if dx is None else clear_sides(dx, sides), np.empty(weights.shape, x.dtype)
        (skipped, _), *columns = sides
        for strip in strips(x, dy, kernel, stride, dilation, self._conv_strip(x, dy, weights, stride, dilation)):
            rows, done = strip.rows, True
            first = max(0, rows.start - kernel[0] + 1)
            dz = begin((strip.samples, slice(first, rows.stop)))
            if weighted:
                own = dz[:, rows.start - first :]
                done = self._transform(True, x[strip.view], part, own)
                by_weights += part
                by_bias += self.channel_sum(own)
            if done and inside is not None:
                rows = slice(max(0, rows.start - skipped), None if strip.last else max(0, rows.stop - skipped))
                ends = (rows.start + skipped - first, 0), *columns
                place = inside[strip.samples, rows]
                target = np.empty(place.shape, place.dtype) if clears else place
                done = self._transform_back(dz, weights, target, ends)
                if done and clears:
                    self.relu_backward(cropped(x, sides)[strip.samples, rows], target, place)
            if not done:
                return super().conv_back_into(dx, x, dy, weights, *how, begin, outside, weighted, clears)
        return by_weights, by_bias

    def transforms(self, x: np.ndarray, shape: Ints, stride: Ints, dilation: Ints, groups: int) -> bool:
        """Tell whether a convolution of, or back to, x with weights of such a shape is to go this way."""
        *kernel, inner, outer = shape
        return (
            tuple(kernel[-2:]) in ((3, 3), (5, 5))
            and prod(stride) * prod(dilation) * groups == 1
            and min(inner, outer) >= _CHANNELS
            and prod(shape) <= _WEIGHTS
            and prod(x.shape[:-1]) >= _CELLS
            and hasattr(self.compiled, "winograd")
        )

    def _transform_back(self, dy: np.ndarray, weights: np.ndarray, dx: np.ndarray, crop: Sides) -> bool:
        """Write the gradient of x without `crop` into dx; False: these are no arrays for it."""
        axes = len(crop)
        turned = weights[(slice(None, None, -1),) * axes].swapaxes(-1, -2)
        before = [k - 1 - side for k, (side, _) in zip(weights.shape, crop, strict=False)]
        return self._transform(False, dy, turned, dx, None, before)

    def _transform(
        self,
        back: bool,
        x: np.ndarray,
        weights: np.ndarray,
        y: np.ndarray,
        bias: Any = None,
        before: Ints = (),
    ) -> bool:
        ends = (*(0,) * (3 - len(before)), *before)
        done: bool = self.compiled.winograd(back, x, weights, y, bias, ends, self.threads, self.start)
        return done
