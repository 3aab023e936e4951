"""Base class of kernels, written once for any array namespace; backends override methods with faster kernels.

Kernels work on views, so every convolution and pooling is 'valid': views include padding and halo. Activations are
channels-last (N, *spatial, C), weights (*kernel, C_in / groups, C_out). Extents may be zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ..arrays.precision import ComputePrecision
from ..errors import ConfigError
from ..system.memory import free_bytes_per_rank
from .cells import CellKernels
from .conv import ConvolutionKernels
from .pool import PoolingKernels
from .windows import (
    Sides,
    StripAccumulator,
    crop_borders,
    split_into_strips,
    strided_index,
    zero_borders,
    zero_cells_between_strides,
)

Ints = Sequence[int]


class CapturedCudaGraph(NamedTuple):
    """Captured launches that a device replays together.

    Attributes
    ----------
    library_graph : the library's graph
    kept_arrays : arrays that the launches read, kept alive with the graph
    """

    library_graph: Any
    kept_arrays: Sequence[Any]

    def replay(self) -> None:
        """Start the launches on the device's current stream."""
        self.library_graph.replay()


class Kernels(CellKernels, ConvolutionKernels, PoolingKernels):
    """Kernels used by layers.

    Parameters
    ----------
    xp : module
        Array namespace with NumPy's functions.
    """

    #: Elements of a strip: smaller strips overlap more, larger strips exceed the cache
    strip_elements = 1 << 16
    #: Whether many small copies cost more than one, so that messages are packed and unpacked together
    packs_copies = False
    #: Whether convolutions support TF32 operands
    tf32: bool = False
    #: Exceptions raised when an array cannot be allocated
    memory_errors: tuple[type[Exception], ...] = (MemoryError,)
    #: Whether launches can be captured in a graph and replayed
    supports_capture = False

    def __init__(self, xp: Any = np) -> None:
        self.xp = xp
        self._cleanup = ExitStack()

    def close(self) -> None:
        """Undo the kernels' changes to this process, such as the number of threads."""
        self._cleanup.close()

    def available_memory(self, ranks: int) -> int | None:
        """Return the bytes that each of `ranks` ranks on this machine may still allocate; None if unknown."""
        return free_bytes_per_rank(ranks)

    def in_precision(self, precision: ComputePrecision) -> Kernels:
        """Return kernels for products with operands of a precision; these kernels are closed if replaced.

        Raises
        ------
        ConfigError
            If this backend does not support the precision.
        """
        if precision.has_16_bit_operands:
            raise ConfigError(
                f"precision: {precision.name} is unsupported by this backend; use backend: auto, or precision: float32"
            )
        return self

    def round_operand(self, x: Any, precision: ComputePrecision) -> Any:
        """Return float32 elements rounded to the nearest operands of a precision, as a new contiguous array."""
        return precision.round_to_operands(x)

    @property
    def exact(self) -> Kernels:
        """The kernels with operands of the arrays' own dtype."""
        return self

    def product(self, a: Any, b: Any) -> Any:
        """Return the product of two matrices, or stacks of them, rounded to operands of the precision."""
        return self.matmul(a, b)

    def release_cached_memory(self, byte_limit: int) -> None:
        """Return cached memory to the system, if this process holds more bytes than a limit."""

    def capture_graph(
        self, function: Callable[[], Any], pool_graph: CapturedCudaGraph | None = None
    ) -> tuple[Any, CapturedCudaGraph]:
        """Return a function's result and a graph of its launches, which run only in `replay`.

        Arrays that the function reads must stay in place while the graph exists; numbers keep their captured values.
        Waiting for the device, or reading an array in host memory, raises an exception.

        Parameters
        ----------
        pool_graph : CapturedCudaGraph, optional
            Graph that is always replayed before this one; both share memory.
        """
        raise NotImplementedError

    def conv_into(
        self,
        y: Any,
        x: Any,
        weights: Any,
        stride: Ints,
        dilation: Ints,
        groups: int,
        bias: Any | None,
        write_output: Callable[[Any, Any], None],
        zero_widths: Sides | None = None,
    ) -> None:
        """Write the valid convolution of x plus bias into y by `write_output`, strip by strip.

        Parameters
        ----------
        y : array (N, *out, C_out)
            Array with any strides.
        write_output : callable
            `write_output(z, y)` writes the result for a strip z into that strip of y; it may overwrite z, which may be
            y itself.
        zero_widths : (before, after) for every axis, optional
            Cells at the ends of x that are zero.
        """
        kernel = weights.shape[:-2]
        if prod(kernel) == 1 < prod(stride):
            x, stride, zero_widths = x[strided_index(stride)], (1,) * len(stride), None
        conv_args = stride, dilation, groups
        row_zeros, *column_zeros = zero_widths or ((0, 0),) * len(kernel)
        for strip in split_into_strips(
            x, y, kernel, stride, dilation, self._conv_strip_size(x, y, weights, stride, dilation)
        ):
            strip_zeros = strip.zero_row_counts(row_zeros, x), *column_zeros
            strip_output = self.conv_forward(x[strip.index_in_view], weights, *conv_args, bias, strip_zeros)
            write_output(strip_output, y[strip.output_index])

    def conv_backward_into(
        self,
        dx: Any | None,
        x: Any,
        dy: Any,
        weights: Any,
        stride: Ints,
        dilation: Ints,
        groups: int,
        output_gradient: Callable[[tuple], Any],
        zero_widths: Sides | None = None,
        needs_weights: bool = True,
        fused_relu: bool = False,
        needs_bias: bool = True,
    ) -> tuple[Any, Any]:
        """Return the gradients of weights and bias, and write the gradient of x into dx, strip by strip.

        Parameters
        ----------
        dx : array (N, *extent, C_in) or None
            Array with any strides; may be x itself. None: the gradient of x is not needed.
        dy : array (N, *out, C_out)
            Only its shape is used.
        output_gradient : callable
            `output_gradient(index)` returns the gradient of a strip of the convolution, contiguous; strips may overlap.
        zero_widths : (before, after) for every axis, optional
            Cells at the ends of x that are zero; their values in dx are unspecified.
        needs_weights : bool
            False: the gradients of weights and bias are not needed; zeros are returned.
        fused_relu : bool
            Whether dx is set to zero where x is not positive.
        needs_bias : bool
            False: the gradient of the bias is not needed; zeros are returned.
        """
        kernel, dx_and_stride = weights.shape[:-2], None
        if prod(kernel) == 1 < prod(stride):
            cells, dx_and_stride = strided_index(stride), dx if dx is None else (dx, stride)
            dx, x, stride, zero_widths = None if dx is None else dx[cells], x[cells], (1,) * len(stride), None
        row_zeros, *columns = zero_widths or ((0, 0),) * len(kernel)
        dweights, dbias = None, self.xp.zeros(weights.shape[-1:], x.dtype)
        inner_dx = None if dx is None else zero_borders(dx, (row_zeros, *columns))
        accumulator = None
        if inner_dx is not None:
            write = self._relu_gradient_writer(inner_dx, crop_borders(x, (row_zeros, *columns)) if fused_relu else None)
            accumulator = StripAccumulator(inner_dx, dy, write, stride[0], row_zeros[0])
        for strip in split_into_strips(
            x, dy, kernel, stride, dilation, self._conv_strip_size(x, dy, weights, stride, dilation)
        ):
            dz, x_strip = output_gradient(strip.output_index), x[strip.index_in_view]
            conv_args = stride, dilation, groups
            zeros = strip.zero_row_counts(row_zeros, x), *columns
            if needs_weights:
                partial = self.conv_backward_weights(x_strip, dz, kernel, *conv_args, zeros)
                dweights = partial if dweights is None else self.xp.add(dweights, partial, out=dweights)
            if needs_weights and needs_bias:
                dbias += self.channel_sum(dz)
            if accumulator is not None:
                accumulator.add(strip, self.conv_backward_input(dz, weights, x_strip.shape[1:-1], *conv_args, zeros))
        if dx_and_stride is not None:
            zero_cells_between_strides(*dx_and_stride)
        return self.xp.zeros(weights.shape, x.dtype) if dweights is None else dweights, dbias

    def _relu_gradient_writer(self, dx: Any, x: Any | None = None) -> Callable[[Any, tuple], None]:
        """Return a function that writes a part of a gradient into dx; if x is given, zero where x is not positive."""
        if x is None:
            return lambda part, index: self.copy(part, dx[index])
        return lambda part, index: self.relu_backward(x[index], part, dx[index])

    def _conv_strip_size(self, x: Any, y: Any, weights: Any, stride: Ints, dilation: Ints) -> int:
        """Return the elements of a strip: more if the overlap, or the cost of weights per strip, is significant."""
        step, span = stride[0], dilation[0] * (weights.shape[0] - 1) + 1
        row = max(prod(y.shape[2:]), min(step, span) * prod(x.shape[2:]))
        return max(self.strip_elements, min(4 * self.strip_elements, max(4 * (span - step) * row, 8 * weights.size)))

    def max_pool_into(self, y: Any, x: Any, kernel: Ints, stride: Ints, fused_relu: bool = False) -> Any:
        """Write the maxima into y, of any strides, strip by strip; return their positions per strip.

        Parameters
        ----------
        fused_relu : bool
            Whether the backward pass drops the gradients of maxima that are not positive.
        """
        positions = []
        for strip in split_into_strips(x, y, kernel, stride, (1,) * len(kernel), self.strip_elements):
            maxima, strip_positions = self.max_pool(x[strip.index_in_view], kernel, stride)
            self.copy(maxima, y[strip.output_index])
            positions.append((strip_positions, maxima > 0 if fused_relu else None))
        return positions

    def max_pool_backward_into(self, dx: Any, dy: Any, max_positions: Any, kernel: Ints, stride: Ints) -> None:
        """Write the gradient of x into dx (N, *extent, C), of any strides, strip by strip."""
        accumulator = StripAccumulator(dx, dy, self._relu_gradient_writer(dx), stride[0])
        strips = split_into_strips(dx, dy, kernel, stride, (1,) * len(kernel), self.strip_elements)
        for strip, (positions, positive) in zip(strips, max_positions, strict=True):
            strip_extent, dy_strip = dx[strip.index_in_view].shape[1:-1], dy[strip.output_index]
            dy_strip = dy_strip if positive is None else dy_strip * positive
            accumulator.add(strip, self.max_pool_backward(dy_strip, positions, strip_extent, kernel, stride))
