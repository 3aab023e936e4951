"""Compiled convolutions as products of matrices whose rows stay in place, without im2col (_rows.h)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from math import prod

import numpy as np

from .cells import CompiledCells
from .kernels import Kernels
from .windows import Sides, crop_borders, output_extent, split_into_strips, zero_borders

Ints = Sequence[int]
ConvArgs = tuple[Ints, Ints, int]
"""stride, dilation and groups of a convolution"""
_MAX_WINDOW_PIECES = 128  # maximum number of pieces of a window, as in _rows.h
VECTOR_BYTES = 32  # products with fewer bytes per row leave vector lanes idle
_MAX_SECOND_FACTOR_ELEMENTS = 1 << 20  # reordering a larger second matrix of a product takes too long
_MIN_OUTPUTS_PER_SUM = 16  # sums over fewer outputs would be written as often as they are added to


class RowKernels(CompiledCells, Kernels):
    """Compiled convolutions of any stride and dilation, and matrix products; the base class is the fallback.

    A row of a window is contiguous in memory, so a row of outputs is a product of matrices. Strided gradients of the
    input are convolutions of stride 1, one for each phase of the stride, with part of the weights.
    """

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
        """Return the valid convolution plus bias (N, *out, C_out)."""
        if len(stride) == 1:
            sides = zero_widths and ((0, 0), *zero_widths)
            return self.conv_forward(x[:, None], weights[None], (1, *stride), (1, *dilation), groups, bias, sides)[:, 0]
        if self.has_compiled_kernel(x, weights.shape, groups):
            out_extent = output_extent(x.shape[1:-1], weights.shape[:-2], stride, dilation)
            y = np.empty((len(x), *out_extent, weights.shape[-1]), x.dtype)
            if self._try_convolve(x, weights, y, bias, (stride, dilation, groups)):
                return y
        return super().conv_forward(x, weights, stride, dilation, groups, bias, zero_widths)

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
        if len(stride) == 1:
            args = (1, *extent), (1, *stride), (1, *dilation), groups, crop and ((0, 0), *crop)
            return self.conv_backward_input(dy[:, None], weights[None], *args)[:, 0]
        if self.has_compiled_kernel(dy, weights.shape, groups):
            sides = crop or ((0, 0),) * len(stride)
            inner_extent = [max(0, n - sum(ends)) for n, ends in zip(extent, sides, strict=True)]
            dx = np.empty((len(dy), *inner_extent, weights.shape[-2] * groups), dy.dtype)
            if self._try_grad_input(dy, weights, dx, (stride, dilation, groups), [before for before, _ in sides]):
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
        zero_widths: Sides | None = None,
    ) -> np.ndarray:
        """Return the gradient of the weights (*kernel, C_in / groups, C_out)."""
        if len(stride) == 1:
            args = (1, *kernel), (1, *stride), (1, *dilation), groups, zero_widths and ((0, 0), *zero_widths)
            return self.conv_backward_weights(x[:, None], dy[:, None], *args)[0]
        shape = *kernel, x.shape[-1] // groups, dy.shape[-1]
        if self.has_compiled_kernel(x, shape, groups):
            gradient = np.empty(shape, x.dtype)
            if self._try_grad_weights(x, dy, gradient, (stride, dilation, groups)):
                return gradient
        return super().conv_backward_weights(x, dy, kernel, stride, dilation, groups, zero_widths)

    def conv_into(
        self,
        y: np.ndarray,
        x: np.ndarray,
        weights: np.ndarray,
        stride: Ints,
        dilation: Ints,
        groups: int,
        bias: np.ndarray | None,
        write_output: Callable[[np.ndarray, np.ndarray], None],
        zero_widths: Sides | None = None,
    ) -> None:
        """Write the convolution plus bias into y by `write_output`, in place."""
        is_compiled, args = self.has_compiled_kernel(x, weights.shape, groups), (stride, dilation)
        strip_size = self._conv_strip_size(x, y, weights, *args)
        for strip in split_into_strips(x, y, weights.shape[:-2], *args, strip_size) if is_compiled else ():
            y_strip = y[strip.output_index]
            is_compiled = self._try_convolve(x[strip.index_in_view], weights, y_strip, bias, (*args, groups))
            if not is_compiled:
                break
            write_output(y_strip, y_strip)
        if not is_compiled:
            super().conv_into(y, x, weights, stride, dilation, groups, bias, write_output, zero_widths)

    def conv_backward_into(
        self,
        dx: np.ndarray | None,
        x: np.ndarray,
        dy: np.ndarray,
        weights: np.ndarray,
        stride: Ints,
        dilation: Ints,
        groups: int,
        output_gradient: Callable[[tuple], np.ndarray],
        zero_widths: Sides | None = None,
        needs_weights: bool = True,
        fused_relu: bool = False,
        needs_bias: bool = True,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the gradients of weights and bias, and write the gradient of x into dx.

        Each row of dx is computed once: a strip includes the previous output gradients on which its rows depend.
        """
        kernel, args = weights.shape[:-2], (stride, dilation, groups)
        is_pointwise = prod(kernel) == 1 < prod(stride)  # which the base class turns into stride 1
        if is_pointwise or not (self.has_compiled_kernel(x, weights.shape, groups) and dy.size):
            return super().conv_backward_into(
                dx, x, dy, weights, *args, output_gradient, zero_widths, needs_weights, fused_relu, needs_bias
            )
        sides, row_stride, row_reach = zero_widths or ((0, 0),) * len(stride), stride[0], (kernel[0] - 1) * dilation[0]
        dweights, dbias = np.zeros(weights.shape, x.dtype), np.zeros(weights.shape[-1], x.dtype)
        inner_dx = None if dx is None else zero_borders(dx, sides)
        (num_skipped_rows, _), *column_sides = sides
        for strip in split_into_strips(x, dy, kernel, *args[:2], self._conv_strip_size(x, dy, weights, *args[:2])):
            rows, done = strip.output_rows, True
            first_dy_row = max(0, rows.start - row_reach // row_stride) if inner_dx is not None else rows.start
            dz = output_gradient((strip.samples, slice(first_dy_row, rows.stop)))
            if needs_weights:
                own_dz = dz[:, rows.start - first_dy_row :]
                dweights += self.conv_backward_weights(x[strip.index_in_view], own_dz, kernel, *args)
                dbias += self.channel_sum(own_dz) if needs_bias else 0
            if inner_dx is not None:
                stop_row = None if strip.is_last else max(0, rows.stop * row_stride - num_skipped_rows)
                rows = slice(max(0, rows.start * row_stride - num_skipped_rows), stop_row)
                dx_rows = inner_dx[strip.samples, rows]
                dx_target = np.empty(dx_rows.shape, dx_rows.dtype) if fused_relu else dx_rows
                crop = rows.start + num_skipped_rows - first_dy_row * row_stride, *(side for side, _ in column_sides)
                done = self._try_grad_input(dz, weights, dx_target, args, crop)
                if done and fused_relu:
                    self.relu_backward(crop_borders(x, sides)[strip.samples, rows], dx_target, dx_rows)
            if not done:
                return super().conv_backward_into(
                    dx, x, dy, weights, *args, output_gradient, zero_widths, needs_weights, fused_relu, needs_bias
                )
        return dweights, dbias

    def matmul(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """Return the matrix product, on the convolutions' threads, with which NumPy's would compete (both spin)."""
        use_threads = self.gomp_address and a.ndim == b.ndim == 2 and len(b) and b.size <= _MAX_SECOND_FACTOR_ELEMENTS
        result = self._try_product(a, b) if use_threads and hasattr(self.compiled, "convolve") else None
        return super().matmul(a, b) if result is None else result

    def _try_product(self, a: np.ndarray, b: np.ndarray) -> np.ndarray | None:
        transposed = a.strides[0] == a.itemsize < a.strides[1]
        num_rows = len(b) if transposed else len(a)
        num_shares = next((count for count in range(4 * self.threads, 0, -1) if num_rows % count == 0), 1)
        if (
            num_rows < _MIN_OUTPUTS_PER_SUM
            or b.shape[1] * b.itemsize < VECTOR_BYTES
            or not (transposed or a.strides[1] == a.itemsize)
        ):
            return None
        args, cut = ((1, 1), (1, 1), 1), (num_shares, 1, num_rows // num_shares)
        y = np.empty((a.shape[0], b.shape[1]), a.dtype)
        if transposed:
            done = self._try_grad_weights(a.T.reshape(*cut, len(a)), b.reshape(*cut, b.shape[1]), y[None, None], args)
        else:
            done = self._try_convolve(a.reshape(*cut, len(b)), b[None, None], y.reshape(*cut, b.shape[1]), None, args)
        return y if done else None

    def has_compiled_kernel(self, x: np.ndarray, shape: Ints, groups: int) -> bool:
        """Return whether a compiled kernel applies to x (an input, or an output gradient) and weights of this shape."""
        return groups == 1 and x.ndim > 3 and x.strides[-1] == x.itemsize and hasattr(self.compiled, "convolve")

    def _try_convolve(
        self, x: np.ndarray, weights: np.ndarray, y: np.ndarray, bias: np.ndarray | None, args: ConvArgs, pad: Ints = ()
    ) -> bool:
        """Write a convolution into y; the first window begins `pad` zero cells before x.

        Return False if these arrays are not supported.
        """
        kernel_args = (as_triple(args[0], 1), as_triple(args[1], 1), as_triple(pad, 0), self.threads, self.gomp_address)
        done: bool = self.compiled.convolve(x, weights, y, bias, *kernel_args)
        return done

    def _try_grad_input(self, dy: np.ndarray, weights: np.ndarray, dx: np.ndarray, args: ConvArgs, crop: Ints) -> bool:
        """Write the gradient of x, without its first `crop` cells, into dx; return False if unsupported."""
        stride, dilation, _ = args
        joined = dilation[-1] == 1 and dy.strides[-2] == dy.shape[-1] * dy.itemsize
        many = prod(weights.shape[: -3 if joined else -2]) > _MAX_WINDOW_PIECES  # checked before anything is written
        if many or any(s > 1 < d for s, d in zip(stride, dilation, strict=True)):
            return False
        axis_args = zip(dx.shape[1:-1], weights.shape[:-2], stride, dilation, crop, strict=True)
        transposed = weights.swapaxes(-1, -2)
        for phase in product(*(_stride_phases(*axis) for axis in axis_args)):
            dx_cells, weight_cells, dy_offset = zip(*phase, strict=True)
            dx_part, part_weights = dx[(slice(None), *dx_cells)], transposed[weight_cells]
            if 0 in part_weights.shape:
                dx_part[...] = 0
            elif not self._try_convolve(dy, part_weights, dx_part, None, ((1,) * len(stride), dilation, 1), dy_offset):
                return False
        return True

    def _try_grad_weights(self, x: np.ndarray, dy: np.ndarray, gradient: np.ndarray, args: ConvArgs) -> bool:
        """Write the gradient of the weights; return False if another kernel is faster, or arrays are not supported."""
        (*kernel, in_channels, out_channels), (stride, dilation, _) = gradient.shape, args
        if prod(kernel) * prod(stride) == 1:
            if has_vector_aligned_channels(x) and not has_vector_aligned_channels(dy):
                transposed = np.empty((*kernel, out_channels, in_channels), x.dtype)
                done = self._try_grad_weights(dy, x, transposed, args)
                gradient[...] = transposed.swapaxes(-1, -2)
                return done
            if x.flags.c_contiguous and dy.flags.c_contiguous:  # rows as long as possible
                x, dy = (cells.reshape(len(cells), 1, prod(cells.shape[1:-1]), cells.shape[-1]) for cells in (x, dy))
                gradient, stride, dilation = gradient.reshape(1, 1, in_channels, out_channels), (1, 1), (1, 1)
        if not (
            hasattr(self.compiled, "weights")
            and dy.shape[-2] >= _MIN_OUTPUTS_PER_SUM
            and has_vector_aligned_channels(dy)
            and x.strides[-1] == x.itemsize
        ):
            return False
        kernel_args = as_triple(stride, 1), as_triple((*dilation[:-1], 1), 1), self.threads, self.gomp_address
        if kernel[-1] == 1 or (dilation[-1] == 1 and x.strides[-2] == in_channels * x.itemsize):
            return bool(self.compiled.weights(x, dy, gradient, *kernel_args))
        dcolumn = np.empty((*kernel[:-1], 1, in_channels, out_channels), x.dtype)  # a window's row is not contiguous
        for at in range(kernel[-1]):
            if not self.compiled.weights(x[..., at * dilation[-1] :, :], dy, dcolumn, *kernel_args):
                return False
            gradient[..., at : at + 1, :, :] = dcolumn
        return True


def as_triple(values: Ints, default: int) -> tuple[int, ...]:
    """Return numbers for planes, rows and columns, `default` for absent axes."""
    return *(default,) * (3 - len(values)), *values


def has_vector_aligned_channels(cells: np.ndarray) -> bool:
    """Return whether the channels are contiguous and a multiple of the vector length."""
    return cells.shape[-1] * cells.itemsize % VECTOR_BYTES == 0 and cells.strides[-1] == cells.itemsize


def _stride_phases(extent: int, kernel: int, step: int, dilation: int, crop: int) -> Iterator[tuple[slice, slice, int]]:
    """Yield, for each phase of the stride, its cells of dx, the kernel cells that see them, and the offset in dy."""
    for phase in range(min(step, extent)):
        num_skipped, first_tap = divmod(phase + crop, step)
        num_taps = len(range(first_tap, kernel, step))
        last_tap = first_tap + (num_taps - 1) * step
        seen = slice(last_tap, first_tap - step if first_tap >= step else None, -step) if num_taps else slice(0, 0)
        yield slice(phase, None, step), seen, (num_taps - 1) * dilation - num_skipped
