"""Pooling: the maximum or the mean of each window, and unpooling."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

from ...geometry import Place
from ..ir.graph import Value
from ..ir.layout import axes_of, local_shape
from ..ir.registry import rule
from ..lowering.lowering import Lowering
from .window import Size, spatial_ndim, window_of, window_view

_MAX_POOL_BY_NDIM = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}


@rule("aten.max_pool1d.default", "aten.max_pool2d.default", "aten.max_pool3d.default",
      "aten.max_pool1d_with_indices.default", "aten.max_pool2d_with_indices.default",
      "aten.max_pool3d_with_indices.default")  # fmt: skip
def max_pool(
    lowering: Lowering, x: Value, kernel_size: Size, stride: Size, padding: Size, dilation: Size, ceil_mode: bool
) -> Value | tuple[Value, Value]:
    """Pool after a halo exchange, with padding -inf; indices refer to the global image."""
    n = spatial_ndim(lowering)
    fake_values, *fake_indices = pytree.tree_leaves(lowering.fake_out)
    window = window_of(n, kernel_size, stride or kernel_size, padding, dilation)
    view, remaining_padding, atoms = window_view(lowering, x, window, fake_values.shape[-n:], fill=-torch.inf)
    run = _MAX_POOL_BY_NDIM[n]
    layout = (*x.layout[:-n], *((atom,) for atom in atoms))
    pool_args = window.kernel, window.stride, remaining_padding, window.dilation, ceil_mode
    maxima = lowering.local(lambda a: run(a, *pool_args), [view], layout, fake_values.dtype)
    if not fake_indices:
        return maxima
    extents = x.shape[-n:]

    def first_cells(place: Place) -> list[int]:
        axes = zip(atoms, window.stride, window.padding, strict=True)
        return [0 if a.axis is None else a.range(place)[0] * step - before for a, step, (before, _) in axes]

    def global_indices(first_cell: Sequence[int], a: torch.Tensor) -> torch.Tensor:
        _, index = run(a.detach(), *pool_args, return_indices=True)
        flat_index, size = torch.zeros_like(index), 1
        for dim in reversed(range(n)):
            pos, step = index % a.shape[dim - n] + first_cell[dim], window.dilation[dim]
            pos = pos + (step - 1 - pos).clamp(min=0) // step * step  # before the image only where all cells are -inf
            flat_index, index, size = flat_index + pos * size, index // a.shape[dim - n], size * extents[dim]
        return flat_index

    return maxima, lowering.local(global_indices, [view], layout, torch.int64, at=first_cells)


@rule("aten.max_unpool2d.default", "aten.max_unpool3d.default")
def max_unpool(lowering: Lowering, x: Value, indices: Value, output_size: Sequence[int], **_: object) -> Value:
    """Gather values and indices; each rank scatters those of its own cells."""
    n = len(output_size)
    dims = range(len(x.shape) - n, len(x.shape))
    axes = [lowering.axis_of(lowering.gather_into_single_atoms(x, dims), dim) for dim in dims]
    atoms = [lowering.mesh.even_atom(extent, axis) for extent, axis in zip(output_size, axes, strict=True)]
    x, indices = (lowering.gather(value, dims) for value in (x, indices))
    other_dims = lowering.pointwise_layout([value.layout[:-n] for value in (x, indices)])
    layout = (*other_dims, *((atom,) for atom in atoms))
    args = [lowering.align_for_broadcast(v, (*other_dims, *v.layout[-n:]), axes_of(layout)) for v in (x, indices)]

    def run(place: Place, a: torch.Tensor, flat_indices: torch.Tensor) -> torch.Tensor:
        a, flat_indices = a.flatten(-n), flat_indices.flatten(-n)
        own_indices, is_own, size = torch.zeros_like(flat_indices), torch.ones_like(flat_indices, dtype=torch.bool), 1
        for extent, atom in zip(reversed(output_size), reversed(atoms), strict=True):
            coordinates, flat_indices, (lo, hi) = flat_indices % extent, flat_indices // extent, atom.range(place)
            is_own &= (coordinates >= lo) & (coordinates < hi)
            own_indices, size = own_indices + (coordinates - lo) * size, size * (hi - lo)
        cells = a.new_zeros((*a.shape[:-1], size + 1)).scatter(-1, own_indices.where(is_own, size), a)
        return cells[..., :size].reshape(local_shape(layout, place))

    return lowering.local(run, args, layout, at=lambda place: place)


@rule("aten.avg_pool1d.default", "aten.avg_pool2d.default", "aten.avg_pool3d.default")
def avg_pool(
    lowering: Lowering, x: Value, kernel_size: Size, stride: Size, padding: Size, ceil_mode: bool,
    count_include_pad: bool, divisor_override: int | None = None,
) -> Value:  # fmt: skip
    """Pool after a halo exchange; divisors count cells of the global image."""
    n = spatial_ndim(lowering)
    window = window_of(n, kernel_size, stride or kernel_size, padding)
    view, _, atoms = window_view(lowering, x, window, lowering.fake_out.shape[-n:], pad_unpartitioned_dims=True)

    def local_divisors(place: Place) -> int | torch.Tensor:
        if divisor_override is not None:
            return divisor_override
        axes = zip(atoms, x.shape[-n:], window.kernel, window.stride, window.padding, strict=True)
        counts = []
        for atom, cells, kernel, step, (pad, _) in axes:
            first_cells, margin = (i * step - pad for i in range(*atom.range(place))), pad * count_include_pad
            counts.append([min(first + kernel, cells + margin) - max(first, -margin) for first in first_cells])
        if all(len(set(each)) <= 1 for each in counts):
            return prod(each[0] for each in counts if each)
        divisor = torch.ones(())
        for each in counts:
            divisor = divisor.unsqueeze(-1) * torch.tensor(each, dtype=torch.float64)
        return divisor

    def run(divisor: int | torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        if n == 1:
            y = F.avg_pool2d(a.unsqueeze(-2), (1, *window.kernel), (1, *window.stride), divisor_override=1).squeeze(-2)
        else:
            y = (F.avg_pool2d if n == 2 else F.avg_pool3d)(a, window.kernel, window.stride, divisor_override=1)
        return y / (divisor if isinstance(divisor, int) else divisor.to(y.device, y.dtype))

    layout = (*x.layout[:-n], *((atom,) for atom in atoms))
    return lowering.local(run, [view], layout, lowering.fake_out.dtype, at=local_divisors)
