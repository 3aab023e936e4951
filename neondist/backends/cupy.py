"""Kernels over CuPy's arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod
from typing import Any

from ..arrays.precision import FLOAT32, ComputePrecision
from .cells import Normalisation
from .device_kernels import (
    ADD_BOXES,
    BATCH_NORM_GRADIENT_FACTORS,
    BATCH_NORM_SCALE_SHIFT,
    C_TYPE_BY_ITEMSIZE,
    C_TYPES,
    CELL_SUMS,
    COPY_EACH,
    DEPTHWISE,
    DEPTHWISE_BACK,
    FOLD_SUMS,
    GRADIENTS_KIND,
    LAST_MOMENTS,
    LAST_SUMS,
    MAX_POOL,
    MAX_POOL_BACK,
    MOMENTS_KIND,
    NORMALISE,
    NORMALISE_BACK,
    ROUND_BFLOAT16,
    SUMS_KIND,
    specialise_source,
)
from .device_tables import boxes_table, coalesced_strides_table, copy_each_table, depthwise_table, pool_geometry_table
from .kernels import CapturedCudaGraph, Kernels
from .narrow import HalfPrecisionKernels
from .windows import Sides, crop_borders, output_extent

Ints = Sequence[int]

_THREADS_PER_BLOCK, _MAX_BLOCKS_PER_LAUNCH = 256, 4096
_MAX_CACHED_DEVICE_TABLES = 1024
_MAX_LANES, _LANES_PER_THREAD, _MAX_LAST_LANES = 1 << 18, 32, 64
"""maximum number of partial sums of a reduction; number that one thread adds; maximum number in the last step"""


class CupyKernels(Kernels):
    """Kernels over CuPy's arrays.

    Parameters
    ----------
    cupy : module
        CuPy, with this rank's GPU as the current device.
    precision : ComputePrecision
        Precision of convolution and matrix product operands.
    """

    packs_copies = True
    # a launch costs as much as processing a million elements, so blocks are large (plans do not count their memory)
    strip_elements, block_elements, unshared_block_elements, sum_block_elements = 1 << 24, 1 << 24, 1 << 24, 1 << 20
    #: Number of elements from which indices have 64 bits
    int64_threshold = 1 << 30

    def __init__(self, cupy: Any, precision: ComputePrecision = FLOAT32) -> None:
        super().__init__(cupy)
        self.precision = precision
        self._compiled_kernels: dict[tuple[str, str, str], Any] = {}
        self._cached_upload = lru_cache(_MAX_CACHED_DEVICE_TABLES)(self._upload_table)
        self._captured_tables: list[list[Any]] = []  # tables of the graphs being captured

    def in_precision(self, precision: ComputePrecision) -> Kernels:
        """Return kernels with operands of a precision; without PyTorch's kernels, TF32 is replaced by float32."""
        return HalfPrecisionCupyKernels(self.xp, precision) if precision.has_16_bit_operands else self

    def copy_each(self, sources: Sequence[Any], targets: Sequence[Any]) -> None:
        """Copy the values of each source into its target, in one launch if all have the same dtype."""
        pairs = [(source, target) for source, target in zip(sources, targets, strict=True) if target.size]
        if not pairs:
            return
        same_shapes = all(source.shape == target.shape for source, target in pairs)
        if not same_shapes or len({array.dtype for pair in pairs for array in pair}) > 1:
            super().copy_each(sources, targets)
            return
        shapes, size = [target.shape for _, target in pairs], pairs[0][0].itemsize
        ends = [(source.data.ptr, target.data.ptr) for source, target in pairs]
        rank = max(map(len, shapes))
        table = copy_each_table(ends, shapes, [(_strides(source), _strides(target)) for source, target in pairs], rank)
        self._launch(
            COPY_EACH, C_TYPE_BY_ITEMSIZE[size], "copy_each", sum(map(prod, shapes)), self._cached_table(table), rank
        )

    def add_boxes(self, array: Any, boxes: Sequence[tuple[slice, ...]], parts: Sequence[Any]) -> None:
        """Add each part to its box of an array, all in one launch."""
        pairs = [(box, self.xp.ascontiguousarray(part)) for box, part in zip(boxes, parts, strict=True) if part.size]
        if not pairs:
            return
        if str(array.dtype) not in C_TYPES or any(part.dtype != array.dtype for _, part in pairs):
            super().add_boxes(array, boxes, parts)
            return
        shapes = [part.shape for _, part in pairs]
        table = boxes_table(_strides(array), [part.data.ptr for _, part in pairs], [box for box, _ in pairs], shapes)
        arguments = array, self._cached_table(table), len(pairs)
        self._launch(ADD_BOXES, C_TYPES[str(array.dtype)], "add_boxes", sum(map(prod, shapes)), *arguments, array.ndim)

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
        """Return the valid convolution of x, plus bias; depthwise in one launch, plus one launch for the bias."""
        kernel, channels = weights.shape[:-2], weights.shape[-1]
        shape = len(x), *output_extent(x.shape[1:-1], kernel, stride, dilation), channels
        if groups != x.shape[-1] or groups == 1 or not self._has_window_kernel(x.dtype, kernel, shape):
            return super().conv_forward(x, weights, stride, dilation, groups, bias, zero_widths)
        y, pool = (self.xp.empty(shape, x.dtype), (x.shape[1:-1], shape[1:-1], kernel, stride, groups, _strides(x)))
        table, index_type = self._device_table(depthwise_table(pool_geometry_table(*pool), dilation, channels), x, y)
        arguments = x, self.xp.ascontiguousarray(weights), y, table
        self._launch(DEPTHWISE, C_TYPES[str(x.dtype)], "depthwise", y.size, *arguments, index_type=index_type)
        return y if bias is None else self.xp.add(y, bias, out=y)

    def conv_backward_input(
        self, dy: Any, weights: Any, extent: Ints, stride: Ints, dilation: Ints, groups: int, crop: Sides | None = None
    ) -> Any:
        """Return the gradient of x (N, *extent, C_in), without the cells of `crop`: depthwise in one launch."""
        kernel, shape = weights.shape[:-2], (len(dy), *extent, groups * weights.shape[-2])
        if groups != shape[-1] or groups == 1 or not self._has_window_kernel(dy.dtype, kernel, (*shape, dy.size)):
            return super().conv_backward_input(dy, weights, extent, stride, dilation, groups, crop)
        dx = self.xp.empty(shape, dy.dtype)
        pool = pool_geometry_table(extent, dy.shape[1:-1], kernel, stride, groups, _strides(dx))
        table, index_type = self._device_table(depthwise_table(pool, dilation, dy.shape[-1]), dx, dy)
        arguments, c_type = (*map(self.xp.ascontiguousarray, (dy, weights)), dx, table), C_TYPES[str(dy.dtype)]
        self._launch(DEPTHWISE_BACK, c_type, "depthwise_back", dx.size, *arguments, index_type=index_type)
        return crop_borders(dx, crop)

    def max_pool(self, x: Any, kernel: Ints, stride: Ints) -> tuple[Any, Any]:
        """Return the maxima and their positions, in one launch."""
        out_extent, xp = output_extent(x.shape[1:-1], kernel, stride, (1,) * len(kernel)), self.xp
        if not self._has_window_kernel(x.dtype, kernel, (len(x), *out_extent, x.shape[-1])):
            return super().max_pool(x, kernel, stride)
        maxima, positions = (xp.empty((len(x), *out_extent, x.shape[-1]), dtype) for dtype in (x.dtype, xp.uint8))
        pool = pool_geometry_table(x.shape[1:-1], out_extent, kernel, stride, x.shape[-1], _strides(x))
        table, index_type = self._device_table(pool, x, maxima)
        arguments, c_type = (x, maxima, positions, table), C_TYPES[str(x.dtype)]
        self._launch(MAX_POOL, c_type, "max_pool", maxima.size, *arguments, index_type=index_type)
        return maxima, positions

    def max_pool_backward(self, dy: Any, max_positions: Any, extent: Ints, kernel: Ints, stride: Ints) -> Any:
        """Return the gradient of x, in one launch; deterministic: one thread sums all contributions to a cell."""
        shape = len(dy), *extent, dy.shape[-1]
        if not self._has_window_kernel(dy.dtype, kernel, (*shape, dy.size)):
            return super().max_pool_backward(dy, max_positions, extent, kernel, stride)
        dx, dy = self.xp.empty(shape, dy.dtype), self.xp.ascontiguousarray(dy)
        pool = pool_geometry_table(extent, dy.shape[1:-1], kernel, stride, dy.shape[-1], _strides(dx))
        table, index_type = self._device_table(pool, dx, dy)
        arguments, c_type = (dy, max_positions, dx, table), C_TYPES[str(dy.dtype)]
        self._launch(MAX_POOL_BACK, c_type, "max_pool_back", dx.size, *arguments, index_type=index_type)
        return dx

    def normalise(self, x: Any, norm: Normalisation, y: Any) -> None:
        """Write the normalised cells into y, in one launch."""
        if not self._has_cell_kernel(x, y):
            super().normalise(x, norm, y)
            return
        by_channel = self._contiguous_by_channel(norm[:3], x)
        thread_ranges, threads, index_type = self._thread_ranges((x, y), len(norm.mean))
        arguments = x, *by_channel, y, *thread_ranges, int(norm.fused_relu)
        self._launch(NORMALISE, C_TYPES[str(x.dtype)], "normalise", threads, *arguments, index_type=index_type)

    def normalise_backward(self, x: Any, dy: Any, norm: Normalisation, coefficients: Sequence[Any], dx: Any) -> None:
        """Write a * dz + b * (x - mean) + c into dx, in one launch."""
        if not self._has_cell_kernel(x, dy, dx):
            super().normalise_backward(x, dy, norm, coefficients, dx)
            return
        by_channel = self._contiguous_by_channel((*norm[:3], *coefficients), x)
        thread_ranges, threads, index_type = self._thread_ranges((x, dy, dx), len(norm.mean))
        arguments, c_type = (x, dy, *by_channel, dx, *thread_ranges, int(norm.fused_relu)), C_TYPES[str(x.dtype)]
        self._launch(NORMALISE_BACK, c_type, "normalise_back", threads, *arguments, index_type=index_type)

    def channel_sum(self, x: Any) -> Any:
        """Return the sum over all axes but the channels, (C,)."""
        return self._reduce_sums(SUMS_KIND, x)[0, 0] if self._has_cell_kernel(x) else super().channel_sum(x)

    def sample_sum(self, x: Any) -> Any:
        """Return each sample's sum over its cells, (N, C)."""
        return self._reduce_sums(SUMS_KIND, x, by_sample=True)[0] if self._has_cell_kernel(x) else super().sample_sum(x)

    def moments(self, x: Any, by_sample: bool = False) -> tuple[Any, Any]:
        """Return means, and sums of squared differences from the means."""
        if not self._has_cell_kernel(x):
            return super().moments(x, by_sample)
        mean, squares = self._reduce_sums(MOMENTS_KIND, x, by_sample=by_sample)
        return mean, squares

    def normalise_backward_sums(self, x: Any, dy: Any, norm: Normalisation) -> tuple[Any, Any]:
        """Return the sums of dz and of dz * (x - mean) for each group."""
        if not self._has_cell_kernel(x, dy):
            return super().normalise_backward_sums(x, dy, norm)
        by_channel = self._contiguous_by_channel(norm[:3], x)
        first, second = self._reduce_sums(GRADIENTS_KIND, x, by_channel, dy, len(norm.mean) != 1, clip=norm.fused_relu)
        return first, second

    def batch_scale_and_shift(
        self, moments: Any, running_stats: tuple[Any, Any], affine: tuple[Any, Any], momentum: float, eps: float
    ) -> tuple[Any, Any, Any, Any]:
        """Return the `scale_and_shift` of a batch, and update the running mean and variance, in one launch."""
        if not self._has_cell_kernel(moments, *running_stats, *affine):
            return super().batch_scale_and_shift(moments, running_stats, affine, momentum, eps)
        factors, scalars = self.xp.empty((4, len(affine[0])), moments.dtype), map(self.xp.float64, (momentum, eps))
        arguments, c_type = (moments, *running_stats, *affine, factors, *scalars), C_TYPES[str(moments.dtype)]
        self._launch(BATCH_NORM_SCALE_SHIFT, c_type, "batch_scale_shift", factors[0].size, *arguments)
        return factors[0], factors[1], factors[2], factors[3]

    def batch_gradient_factors(self, sums: Any, count: Any, gamma: Any, inverse_std: Any) -> tuple[Any, Any, Any]:
        """Return the coefficients of `normalise_backward`, in one launch."""
        if not self._has_cell_kernel(sums, count, gamma, inverse_std):
            return super().batch_gradient_factors(sums, count, gamma, inverse_std)
        factors = self.xp.empty((3, len(gamma)), sums.dtype)
        arguments, c_type = (sums, count, gamma, inverse_std, factors), C_TYPES[str(sums.dtype)]
        self._launch(BATCH_NORM_GRADIENT_FACTORS, c_type, "batch_gradient_factors", factors[0].size, *arguments)
        return factors[0], factors[1], factors[2]

    def _reduce_sums(
        self,
        kind: int,
        x: Any,
        by_channel: Sequence[Any] = (),
        dy: Any = None,
        by_sample: bool = False,
        clip: bool = False,
    ) -> Any:
        """Return sums (1 or 2, groups, C), computed deterministically by as many threads as possible.

        Parameters
        ----------
        kind : SUMS_KIND, MOMENTS_KIND or GRADIENTS_KIND
        by_channel : mean, scale and shift, contiguous, if the kind needs them
        """
        num_groups, num_sums = len(x) if by_sample else 1, 1 if kind == SUMS_KIND else 2
        arrays = x, x if dy is None else dy
        thread_ranges, threads, index_type = self._thread_ranges(arrays, num_groups)
        (table, num_axes, _, lanes), width, c_type = thread_ranges, num_groups * x.shape[-1], C_TYPES[str(x.dtype)]
        sums = self.xp.empty((num_sums, lanes, width), "f8")
        arguments = *arrays, *(*by_channel, x, x, x)[:3], sums, *thread_ranges, kind, int(clip)
        self._launch(CELL_SUMS, c_type, "cell_sums", threads, *arguments, index_type=index_type)
        while lanes > _MAX_LAST_LANES:
            num_folded = -(-lanes // _LANES_PER_THREAD)
            folded = self.xp.empty((num_sums, num_folded, width), "f8")
            arguments = sums, folded, lanes, num_folded, width
            self._launch(FOLD_SUMS, c_type, "fold_sums", folded.size, *arguments, index_type=index_type)
            sums, lanes = folded, num_folded
        result = self.xp.empty((num_sums, num_groups, x.shape[-1]), x.dtype)
        if kind == MOMENTS_KIND:
            arguments = sums, x, result, table, num_axes, lanes, x.size // width
            self._launch(LAST_MOMENTS, c_type, "last_moments", width, *arguments, index_type=index_type)
        else:
            self._launch(LAST_SUMS, c_type, "last_sums", result.size, sums, result, lanes, width, index_type=index_type)
        return result

    def round_operand(self, x: Any, precision: ComputePrecision) -> Any:
        """Return float32 elements rounded to the nearest value in a precision; for bfloat16, in one launch."""
        if precision.name != "bfloat16" or str(x.dtype) != "float32" or not x.size:
            return super().round_operand(x, precision)
        y = self.xp.empty(x.shape, x.dtype)
        ranges, threads, index = self._thread_ranges((x, y), 1)
        self._launch(ROUND_BFLOAT16, "float", "round_bfloat16", threads, x, y, *ranges, index_type=index)
        return y

    def _has_window_kernel(self, dtype: Any, kernel: Ints, extents: Ints) -> bool:
        """Return whether the kernels over windows support these windows and arrays, none of which may be empty."""
        return str(dtype) in C_TYPES and len(kernel) < 4 and prod(kernel) <= 256 and 0 not in extents

    def _has_cell_kernel(self, *arrays: Any) -> bool:
        dtype_names = {str(array.dtype) for array in arrays}
        return len(dtype_names) == 1 and dtype_names <= C_TYPES.keys() and arrays[0].size > 0

    def _contiguous_by_channel(self, arrays: Sequence[Any], like: Any) -> list[Any]:
        """Return arrays (groups, C) as contiguous arrays with the dtype of `like`."""
        shape = len(arrays[0]), like.shape[-1]
        ready = [array.shape == shape and array.dtype == like.dtype and array.flags.c_contiguous for array in arrays]
        return [
            array if is_ready else self.xp.ascontiguousarray(self.xp.broadcast_to(array, shape), like.dtype)
            for array, is_ready in zip(arrays, ready, strict=True)
        ]

    def _thread_ranges(self, arrays: Sequence[Any], groups: int) -> tuple[tuple[Any, int, int, int], int, str]:
        """Divide the cells of arrays of one shape among threads.

        Return (table, numbers of axes, groups and lanes), the number of threads, and the C type of the table.
        """
        like = arrays[0]
        table_values = coalesced_strides_table(like.shape, list(map(_strides, arrays)), groups > 1)
        table, index = self._device_table(table_values, *arrays)
        width = groups * like.shape[-1]
        lanes = max(1, min(like.size, _MAX_LANES) // width)
        return (table, len(table_values) // (1 + len(arrays)), groups, lanes), lanes * width, index

    def _device_table(self, table: tuple[int, ...], *arrays: Any) -> tuple[Any, str]:
        """Return a table on the device, and its type in C, wide enough for indices into these arrays."""
        address_spans = [sum((n - 1) * abs(step) for n, step in zip(a.shape, _strides(a), strict=True)) for a in arrays]
        index = "int" if max(address_spans) < self.int64_threshold else "long long"
        return self._cached_table(table, index), index

    def _launch(
        self, source: str, c_type: str, name: str, total: int, *args: Any, index_type: str = "long long"
    ) -> None:
        """Launch a kernel; `total`, its element count, becomes the last argument."""
        kernel = self._compiled_kernels.get((name, c_type, index_type))
        if kernel is None:
            kernel = self.xp.RawKernel(specialise_source(source, c_type, index_type), name)
            self._compiled_kernels[name, c_type, index_type] = kernel
        arguments = [self.xp.int64(argument) if isinstance(argument, int) else argument for argument in (*args, total)]
        kernel((min(-(-total // _THREADS_PER_BLOCK), _MAX_BLOCKS_PER_LAUNCH),), (_THREADS_PER_BLOCK,), tuple(arguments))

    def capture_graph(
        self, function: Callable[[], Any], pool_graph: CapturedCudaGraph | None = None
    ) -> tuple[Any, CapturedCudaGraph]:
        """Return a function's result and a graph of its launches, which keeps alive the tables that they read."""
        self._captured_tables.append([])
        try:
            result, launches = self._capture_launches(function, pool_graph)
        finally:
            tables = self._captured_tables.pop()
        return result, CapturedCudaGraph(launches, tables)

    def _capture_launches(self, function: Callable[[], Any], pool_graph: CapturedCudaGraph | None) -> tuple[Any, Any]:
        """Return a function's result, and an object with `replay`."""
        raise NotImplementedError

    def _cached_table(self, table: tuple[int, ...], index_type: str = "long long") -> Any:
        """Return a table on the device; tables are cached, since the launches of every step need the same tables."""
        device_table = self._cached_upload(table, index_type)
        for tables in self._captured_tables:
            tables.append(device_table)
        return device_table

    def _upload_table(self, table: tuple[int, ...], index_type: str) -> Any:
        return self.xp.array(table, self.xp.int32 if index_type == "int" else self.xp.int64)

    def available_memory(self, ranks: int) -> int | None:
        """Return the bytes that each of `ranks` ranks on this machine may still allocate on its GPU."""
        runtime, pool = self.xp.cuda.runtime, self.xp.get_default_memory_pool()
        free_bytes, _ = runtime.memGetInfo()
        ranks_per_gpu = -(-ranks // runtime.getDeviceCount())
        return int(free_bytes) // ranks_per_gpu + int(pool.free_bytes())

    def release_cached_memory(self, byte_limit: int) -> None:
        """Free the cached blocks of CuPy's pool if it exceeds `byte_limit`, for other ranks on the same GPU."""
        pool = self.xp.get_default_memory_pool()
        if pool.total_bytes() > byte_limit:
            pool.free_all_blocks()


def _strides(array: Any) -> list[int]:
    """Return an array's strides in elements."""
    return [stride // array.itemsize for stride in array.strides]


class HalfPrecisionCupyKernels(HalfPrecisionKernels, CupyKernels):
    """CuPy kernels with operands rounded to 16 bits and float32 products."""
