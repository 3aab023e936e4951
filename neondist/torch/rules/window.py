"""Convolution and unfolding: operators on a bounded neighbourhood."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ...geometry import Atom, Box, GradientWindow, Place, Window, same_padding
from ..ir.graph import Value
from ..ir.layout import Layout, Shape, local_shape, replace_dim
from ..ir.reach import Reach
from ..ir.registry import rule
from ..kernels import volumes
from ..kernels.convolution import conv as convolved
from ..lowering.lowering import Lowering
from .channels import ChannelOperands, partition_channel_operands

Ints = Sequence[int]
Size = int | Ints
"""One number for all spatial axes, or one for each."""
_CONV_TRANSPOSE_BY_NDIM: dict[int, Any] = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: volumes.conv_transpose3d}


def spatial_ndim(lowering: Lowering) -> int:
    """Return the number of spatial dimensions of the current operator, such as 2 for aten.max_pool2d."""
    return next(n for n in (1, 2, 3) if f"{n}d" in str(lowering.target))


def value_per_axis(value: int | Sequence[Any], ndim: int) -> list[Any]:
    """Return a value for each of ndim spatial axes."""
    values = [value] if isinstance(value, int) else list(value)
    return values * ndim if len(values) == 1 else values


def window_of(ndim: int, kernel: Size, stride: Size, padding: int | Sequence[Any], dilation: Size = 1) -> Window:
    """Return the window of an operator along ndim spatial axes."""
    sizes = [tuple(value_per_axis(size, ndim)) for size in (kernel, stride, padding, dilation)]
    return Window(sizes[0], sizes[1], sizes[2], sizes[3])


def window_view(
    lowering: Lowering, x: Value, window: Window, extents: Sequence[int], fill: float = 0.0,
    pad_unpartitioned_dims: bool | Sequence[bool] = False,
) -> tuple[Value, list[int], list[Atom]]:  # fmt: skip
    """Return the view for windows along the last dimensions, the padding that it lacks, and the atoms of the results.

    Parameters
    ----------
    extents : sequence of int
        Extents of the results along these dimensions.
    fill : float
        Value of cells outside the image.
    pad_unpartitioned_dims : bool or sequence of bool
        Whether dimensions that are not partitioned are also padded.
    """
    dims = range(len(x.shape) - window.ndim, len(x.shape))
    x = lowering.gather_into_single_atoms(x, dims)
    atoms = [lowering.mesh.even_atom(n, lowering.axis_of(x, dim)) for dim, n in zip(dims, extents, strict=True)]
    pad_unpartitioned_dims = value_per_axis(pad_unpartitioned_dims, window.ndim)
    is_padded = [pads or atom.axis is not None for pads, atom in zip(pad_unpartitioned_dims, atoms, strict=True)]
    axes = enumerate(zip(dims, atoms, is_padded, strict=True))
    reaches = {dim: Reach(atom, window.axis_window(axis), pads) for axis, (dim, atom, pads) in axes}
    remaining_padding = [0 if pads else before for pads, (before, _) in zip(is_padded, window.padding, strict=True)]
    return lowering.view(x, reaches, None, fill, has_sliding_windows=True), remaining_padding, atoms


def image_layout(x: Value, channels: int, atoms: Sequence[Atom]) -> Layout:
    """Return the layout of results: batch as in x, all channels, the given spatial atoms."""
    batch = x.layout[: len(x.layout) - len(atoms) - 1]
    return (*batch, (Atom(channels),), *((atom,) for atom in atoms))


@rule("aten.conv1d.default", "aten.conv2d.default", "aten.conv3d.default",
      "aten.conv1d.padding", "aten.conv2d.padding", "aten.conv3d.padding", whole=("weight", "bias"))  # fmt: skip
def conv(
    lowering: Lowering, x: Value, weight: Value, bias: Value | None, stride: Size, padding: str | int | Sequence[Any],
    dilation: Size, groups: int,
) -> Value:  # fmt: skip
    """Convolve after a halo exchange, with any kernel size, stride, dilation, padding and groups."""
    n = len(weight.shape) - 2
    if isinstance(padding, str):
        same = same_padding(x.shape[-n:], weight.shape[2:], value_per_axis(stride, n), value_per_axis(dilation, n))
        padding = same if padding == "same" else 0
    window = window_of(n, weight.shape[2:], stride, padding, dilation)
    if lowering.partitions_channels:
        operands = partition_channel_operands(lowering, x, weight, bias, groups)
    else:
        operands = ChannelOperands(lowering.gather(x, [-n - 1]), weight, bias, (Atom(weight.shape[0]),))
    x, weight, bias, channels, reduced_mesh_axes = operands
    is_view = not all(lowering.is_whole(x, dim) for dim in range(-n, 0))
    is_uneven = any(before != after for before, after in window.padding)
    # kernels cannot pad unevenly, and would copy a view again in order to pad it
    pad_unpartitioned_dims = [(is_view or is_uneven) and any(sides) for sides in window.padding]
    extents, dtype = lowering.fake_out.shape[-n:], lowering.fake_out.dtype
    view, remaining_padding, atoms = window_view(
        lowering, x, window, extents, pad_unpartitioned_dims=pad_unpartitioned_dims
    )
    run = _slice_instead_of_stride(convolved) if max(window.stride) > prod(window.kernel) == 1 else convolved
    layout = replace_dim(image_layout(x, weight.shape[0], atoms), -n - 1, *channels)

    def convolve(a: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
        local_groups = 1 if groups == 1 else a.shape[-n - 1] // w.shape[1]
        return run(a, w, b, window.stride, remaining_padding, window.dilation, local_groups)

    if not reduced_mesh_axes:
        return lowering.local(convolve, [view, weight, bias], layout, dtype)
    y = lowering.allreduce_local_result(convolve, [view, weight], reduced_mesh_axes, layout, dtype)
    return y if bias is None else lowering.local(lambda a, b: a + b.view(-1, *[1] * n), [y, bias], layout, dtype)


def _slice_instead_of_stride(run: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a function that computes a strided 1 x 1 convolution by slicing its input.

    PyTorch 2.13's backward of strided 1 x 1 convolutions crashes for some channels-last shapes, on some processors.
    """

    def conv_on_subgrid(
        a: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, stride: Ints, pads: Ints, dilation: Ints, groups: int
    ) -> torch.Tensor:
        padded = F.pad(a, [pad for pad in reversed(pads) for _ in range(2)]) if any(pads) else a
        ones = [1] * len(stride)
        strided_slices: Any = (..., *(slice(None, None, s) for s in stride))
        return run(padded[strided_slices], w, b, ones, [0] * len(stride), ones, groups)

    return conv_on_subgrid


def _zeros_instead_of_stride(run: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return the transposed counterpart of `_slice_instead_of_stride`: results `stride` apart, zeros between."""

    def conv_transpose_to_subgrid(
        a: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, stride: Ints, pads: Ints, extras: Ints, groups: int,
        dilation: Ints,
    ) -> torch.Tensor:  # fmt: skip
        ones, zeros = [1] * len(stride), [0] * len(stride)
        y = run(a, w, None, ones, zeros, zeros, groups, ones)
        strided_ends = [(n - 1) * s + 1 for n, s in zip(y.shape[-len(stride) :], stride, strict=True)]
        sizes = [end + extra for end, extra in zip(strided_ends, extras, strict=True)]
        result = y.new_zeros((*y.shape[: -len(stride)], *sizes))
        strided_slices: Any = (..., *(slice(None, end, s) for end, s in zip(strided_ends, stride, strict=True)))
        inner_slices: Any = (..., *(slice(p, n - p) for p, n in zip(pads, sizes, strict=True)))
        result[strided_slices] = y
        return result[inner_slices] if b is None else result[inner_slices] + b.view(-1, *ones)

    return conv_transpose_to_subgrid


@rule("aten.convolution.default", whole=("weight", "bias"))
def convolution(
    lowering: Lowering, x: Value, weight: Value, bias: Value | None, stride: Size, padding: Size, dilation: Size,
    transposed: bool, output_padding: Size, groups: int,
) -> Value:  # fmt: skip
    """Apply a convolution or a transposed convolution after a halo exchange."""
    if transposed:
        return conv_transpose(lowering, x, weight, bias, stride, padding, output_padding, groups, dilation)
    return conv(lowering, x, weight, bias, stride, padding, dilation, groups)


@rule("aten.conv_transpose1d.default", "aten.conv_transpose2d.input", "aten.conv_transpose3d.input",
      whole=("weight", "bias"))  # fmt: skip
def conv_transpose(
    lowering: Lowering, x: Value, weight: Value, bias: Value | None, stride: Size, padding: Size, output_padding: Size,
    groups: int, dilation: Size,
) -> Value:  # fmt: skip
    """Exchange halos such that each rank computes its own results from all contributing inputs."""
    n = len(weight.shape) - 2
    x = lowering.gather(x, [-n - 1])
    window = window_of(n, weight.shape[2:], stride, padding, dilation)
    view, pads, atoms, local_crops = _transposed_window_view(lowering, x, window, lowering.fake_out.shape[-n:])
    extras = value_per_axis(output_padding, n)
    extras = [extra if atom.axis is None else 0 for atom, extra in zip(atoms, extras, strict=True)]
    conv_args = pads, extras, groups, window.dilation
    run = _CONV_TRANSPOSE_BY_NDIM[n]
    run = _zeros_instead_of_stride(run) if max(window.stride) > prod(window.kernel) == 1 else run
    layout = image_layout(x, weight.shape[1] * groups, atoms)

    def convolve(own_crops: _LocalCrops, a: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
        if all(full for *_, full in own_crops.crops):
            # PyTorch 2.13's 16-bit gradients for processors with AMX are wrong for strides along single cells
            sizes = zip(window.stride, a.shape[-n:], extras, strict=True)
            strides = [1 if size == 1 and not extra else stride for stride, size, extra in sizes]
            y = _crop_results(run(a, w, None, strides, *conv_args), own_crops.crops)
        else:  # no input contributes to these results
            y = a.sum() * 0 + w.sum() * 0 + a.new_zeros(own_crops.shape)
        return y if b is None else y + b.view(-1, *[1] * n)

    args = [view, weight, bias]
    return lowering.local(convolve, args, layout, lowering.fake_out.dtype, at=partial(local_crops, layout))


_ResultCrop = tuple[int, int, int, bool]
"""Crop of the result of transposed windows: dimension, first index, length, and whether any input contributes."""


class _LocalCrops(NamedTuple):
    shape: Shape
    crops: Sequence[_ResultCrop]


def _transposed_window_view(
    lowering: Lowering, x: Value, window: Window, extents: Sequence[int]
) -> tuple[Value, list[int], list[Atom], Callable[[Layout, Ints], _LocalCrops]]:
    """Return the view of the cells that contribute to this rank's results of transposed windows.

    Also return the padding to remove along whole dimensions, the results' atoms, and crops along other dimensions.
    """
    reaches, remaining_padding, atoms = dict[int, Reach](), [], []
    gradient_window, first_dim = GradientWindow(window, extents), len(x.shape) - window.ndim
    x = lowering.gather_into_single_atoms(x, range(first_dim, len(x.shape)))
    for axis, extent in enumerate(extents):
        source_atom, (pad, _) = lowering.single_atom(x, first_dim + axis), window.padding[axis]
        out_atom = lowering.mesh.even_atom(extent, source_atom.axis)
        atoms.append(out_atom)
        reaches[first_dim + axis] = Reach(out_atom, gradient_window.axis_window(axis))
        remaining_padding.append(pad if out_atom.axis is None else 0)

    def local_crops(layout: Layout, place: Place) -> _LocalCrops:
        crops = []
        for axis, (reach, (pad, _)) in enumerate(zip(reaches.values(), window.padding, strict=True)):
            if reach.out_partition.axis is not None:
                lo, hi = reach.out_partition.range(place)
                ((start, end),) = reach.view(lo, hi, x.shape[first_dim + axis]).ranges
                crops.append((axis - window.ndim, lo - (start * window.stride[axis] - pad), hi - lo, start < end))
        return _LocalCrops(local_shape(layout, place), crops)

    return lowering.view(x, reaches, has_sliding_windows=True), remaining_padding, atoms, local_crops


def _crop_results(y: torch.Tensor, crops: Sequence[_ResultCrop]) -> torch.Tensor:
    for dim, start, length, _ in crops:
        before, after = max(0, -start), max(0, start + length - y.shape[dim])
        if before or after:
            y = F.pad(y, [0, 0] * (-dim - 1) + [before, after])
        y = y.narrow(dim, start + before, length)
    return y


@rule("aten.im2col.default")
def im2col(lowering: Lowering, x: Value, kernel_size: Size, dilation: Size, padding: Size, stride: Size) -> Value:
    """Unfold after a halo exchange, with rows and columns merged into the last dimension."""
    window = window_of(2, kernel_size, stride, padding, dilation)
    x = lowering.gather(x, [-3])
    view, remaining_padding, atoms = window_view(lowering, x, window, window.output_extent(x.shape[-2:]))
    unfold_args = window.kernel, window.dilation, tuple(remaining_padding), window.stride
    layout = (*x.layout[:-3], (Atom(lowering.fake_out.shape[-2]),), tuple(atoms))
    return lowering.local(lambda a: F.unfold(a, *unfold_args), [view], layout, lowering.fake_out.dtype)


@rule("aten.col2im.default")
def col2im(
    lowering: Lowering, x: Value, output_size: Size, kernel_size: Size, dilation: Size, padding: Size, stride: Size
) -> Value:
    """Exchange halos such that each rank sums all contributions to its own cells."""
    window, extents = window_of(2, kernel_size, stride, padding, dilation), value_per_axis(output_size, 2)
    rows, columns = window.output_extent(extents)
    x = lowering.gather(lowering.reshape(x, (*x.shape[:-1], rows, columns)), [-3])
    view, remaining_padding, atoms, local_crops = _transposed_window_view(lowering, x, window, extents)
    layout = image_layout(x, x.shape[-3] // prod(window.kernel), atoms)
    is_partitioned = [atom.axis is not None for atom in atoms]
    fold_args = window.kernel, window.dilation, tuple(remaining_padding), window.stride

    def run(own_crops: _LocalCrops, a: torch.Tensor) -> torch.Tensor:
        if not all(full for *_, full in own_crops.crops):  # no input contributes to these results
            return a.sum() * 0 + a.new_zeros(own_crops.shape)
        covered_extents = window.needs(Box.of(a.shape[-2:])).shape
        axes = zip(covered_extents, is_partitioned, extents, strict=True)
        size = tuple(n if partitioned else extent for n, partitioned, extent in axes)
        return _crop_results(F.fold(a.flatten(-2), size, *fold_args), own_crops.crops)

    return lowering.local(run, [view], layout, lowering.fake_out.dtype, at=partial(local_crops, layout))


@rule("aten.unfold.default")
def unfold(lowering: Lowering, x: Value, dimension: int, size: int, step: int) -> Value:
    """Unfold one dimension after a halo exchange, with the cells of windows in a new last dimension."""
    dim = dimension % len(x.shape)
    x = lowering.gather_into_single_atoms(x, [dim])
    out_atom = lowering.mesh.even_atom(lowering.fake_out.shape[dim], lowering.axis_of(x, dim))
    view = lowering.view(x, {dim: Reach(out_atom, Window(size, step, 0, ndim=1))})
    layout = (*replace_dim(x.layout, dim, out_atom), (Atom(size),))
    return lowering.local(lambda a: a.unfold(dim, size, step).clone(), [view], layout)
