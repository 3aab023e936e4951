"""Compiled convolutions: 3 x 3 and 5 x 5 of stride 1 (_winograd.h), and of each channel by itself (_depthwise.h)."""

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
_MOST = 9 << 17  # with more weights, transformed ones would take more than 8 MiB of float32
_VECTOR, _TAPS = 32, 512  # of depthwise convolutions: bytes of a cell at least, cells of a window at most
_FORWARD, _WEIGHTS, _INPUT = range(3)
How = tuple[Ints, Ints, int]


class CompiledConvolution(CompiledCells, Kernels):
    """Convolution of NumPy's arrays, written where it is wanted; as the table does it where that is not compiled.

    Windows 3 x 3 and 5 x 5 go by F(2 x 2, k x k) (Lavin and Gray 2016), with 2.25 and 2.78 times fewer products. Sums
    of inputs, and of weights, come before the products. With 3 x 3 errors of float32 are still below oneDNN's (measured
    with 16, 64 and 256 channels: 0.6 to 1 times, those of the weights' gradients 0.3 to 0.9), for sums are short; with
    5 x 5 they are 4 to 8 times those of direct sums, 1e-6 to 2e-6 of the outputs.
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
            if self._direct(_FORWARD, x, weights, y, (stride, dilation, groups), bias):
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
            before = [side for side, _ in sides]
            if self._direct(_INPUT, dy, weights, dx, (stride, dilation, groups), None, before):
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
            if self._direct(_WEIGHTS, x, gradient, dy, (stride, dilation, groups)):
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
        done = done and (bias is None or prod(weights.shape[:-2]) > 1)
        for strip in strips(x, y, weights.shape[:-2], *how, self._conv_strip(x, y, weights, *how)) if done else ():
            part = y[strip.out]
            done = self._direct(_FORWARD, x[strip.view], weights, part, (*how, groups), bias)
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
        biased: bool = True,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the gradients of weights and bias, and write that of x into dx.

        Each row of dx is computed once: a strip begins with the rows of the one before that it still needs.
        """
        how = stride, dilation, groups
        if not (self.transforms(x, weights.shape, *how) and dy.size):
            return super().conv_back_into(dx, x, dy, weights, *how, begin, outside, weighted, clears, biased)
        kernel, sides, step = weights.shape[:-2], outside or ((0, 0),) * len(stride), stride[0]
        by_weights, by_bias = np.zeros(weights.shape, x.dtype), np.zeros(weights.shape[-1], x.dtype)
        inside, part = None if dx is None else clear_sides(dx, sides), np.empty(weights.shape, x.dtype)
        (skipped, _), *columns = sides
        for strip in strips(x, dy, kernel, stride, dilation, self._conv_strip(x, dy, weights, stride, dilation)):
            rows, done = strip.rows, True
            first = max(0, rows.start - dilation[0] * (kernel[0] - 1) // step)
            dz = begin((strip.samples, slice(first, rows.stop)))
            own = dz[:, rows.start - first :]
            if weighted:
                done = self._direct(_WEIGHTS, x[strip.view], part, own, how)
                by_weights += part
            if weighted and biased:
                by_bias += self.channel_sum(own)
            if done and inside is not None:
                lo, hi = (max(0, row * step - skipped) for row in (rows.start, rows.stop))
                at = slice(lo, None if strip.last else hi)
                place = inside[strip.samples, at]
                target = np.empty(place.shape, place.dtype) if clears else place
                before = lo + skipped - first * step, *(side for side, _ in columns)
                done = self._direct(_INPUT, dz, weights, target, how, None, before)
                if done and clears:
                    self.relu_backward(cropped(x, sides)[strip.samples, at], target, place)
            if not done:
                return super().conv_back_into(dx, x, dy, weights, *how, begin, outside, weighted, clears, biased)
        return by_weights, by_bias

    def transforms(self, x: np.ndarray, shape: Ints, stride: Ints, dilation: Ints, groups: int) -> bool:
        """Tell whether a convolution of, or back to, x with weights of such a shape is to go this way."""
        *kernel, inner, outer = shape
        if prod(x.shape[:-1]) < _CELLS or x.ndim < 4:
            return False
        if prod(kernel) == 1 and groups == 1:
            return prod(stride) == 1 and min(inner, outer) >= _CHANNELS
        if not hasattr(self.compiled, "winograd"):
            return False
        if groups > 1:
            return inner == 1 and outer == groups and outer * x.itemsize >= _VECTOR and prod(kernel) <= _TAPS
        return (
            tuple(kernel[-2:]) in ((3, 3), (5, 5))
            and prod(stride) * prod(dilation) == 1
            and min(inner, outer) >= _CHANNELS
            and prod(shape) <= _MOST
        )

    def _direct(
        self,
        what: int,
        x: np.ndarray,
        w: np.ndarray,
        y: np.ndarray,
        how: How,
        bias: Any = None,
        before: Ints = (),
    ) -> bool:
        """Write the convolution of x into y; or the gradient of weights into w; or that of the input, given dy as x.

        False: these are no arrays for it. `before`: how many of the input's first cells y does not have, on each axis.
        """
        stride, dilation, groups = how
        if prod(w.shape[:-2]) * groups == 1:
            return bias is None and not any(before) and self._multiply(what, x, w.reshape(w.shape[-2:]), y)
        ends, done = _three(before, 0), False
        if groups > 1:
            w = w if what == _WEIGHTS else np.ascontiguousarray(w)
            steps = _three(stride, 1), _three(dilation, 1), ends
            done = self.compiled.depthwise(what, x, w, y, bias, *steps, self.threads, self.start)
            return done
        if what == _INPUT:
            w = w[(slice(None, None, -1),) * len(stride)].swapaxes(-1, -2)
            ends = _three([k - 1 - side for k, side in zip(w.shape, before, strict=False)], 0)
        done = self.compiled.winograd(what == _WEIGHTS, x, w, y, bias, ends, self.threads, self.start)
        return done

    def _multiply(self, what: int, x: np.ndarray, matrix: np.ndarray, y: np.ndarray) -> bool:
        """Do what `_direct` does for windows of one cell: a product of matrices."""
        cells = self.contiguous(x).reshape(-1, x.shape[-1])
        if what == _WEIGHTS:
            self.matmul(cells.T, self.contiguous(y).reshape(-1, y.shape[-1]), matrix)
            return True
        target = y if y.flags.c_contiguous else np.empty(y.shape, y.dtype)
        self.matmul(cells, matrix if what == _FORWARD else matrix.T, target.reshape(-1, y.shape[-1]))
        if target is not y:
            self.copy(target, y)
        return True


def _three(numbers: Ints, missing: int) -> tuple[int, ...]:
    """Return those of planes, rows and columns."""
    return *(missing,) * (3 - len(numbers)), *numbers
