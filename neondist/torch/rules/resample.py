"""Interpolation and adaptive pooling, one axis at a time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain
from math import ceil, floor, prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ...geometry import Atom, IndexMap, Place
from ..ir.graph import ACCUMULATION_DTYPES, Value
from ..ir.layout import axes_of, replace_dim
from ..ir.reach import Reach
from ..ir.registry import rule
from ..lowering.lowering import Lowering
from .window import spatial_ndim


class Taps(NamedTuple):
    """Indices of the cells that contribute to each result, and weights (None: 1), both of shape (results, taps)."""

    indices: torch.Tensor
    weights: torch.Tensor | None

    @property
    def window(self) -> IndexMap:
        """The cells that contribute to the results, by their indices."""
        indices = self.indices.tolist()
        return IndexMap(lambda lo, hi: chain(*indices[lo:hi]))


def resample(lowering: Lowering, x: Value, taps_by_dim: dict[int, Taps], axis_by_dim: dict[int, int | None]) -> Value:
    """Return x resampled along dimensions; the result is partitioned along the mesh axes `axis_by_dim`."""
    out_atoms = {dim: lowering.mesh.even_atom(len(taps.indices), axis_by_dim[dim]) for dim, taps in taps_by_dim.items()}
    reaches = {dim: Reach(out, taps_by_dim[dim].window) for dim, out in out_atoms.items()}
    axes = x.axes | axes_of((reach.out_partition,) for reach in reaches.values())
    view = lowering.view(x, reaches, axes, has_sliding_windows=True)
    input_atoms = {dim: lowering.single_atom(x, dim) for dim in taps_by_dim}

    def local_taps(place: Place) -> list[tuple[int, torch.Tensor, torch.Tensor | None]]:
        own_taps = []
        for dim, (indices, weights) in taps_by_dim.items():
            lo, hi = reaches[dim].out_partition.range(place)
            index = indices[lo:hi] - reaches[dim].first_index(input_atoms[dim], place)
            own_taps.append((dim, index, None if weights is None else weights[lo:hi]))
        return own_taps

    def run(own_taps: Sequence[tuple[int, torch.Tensor, torch.Tensor | None]], a: torch.Tensor) -> torch.Tensor:
        for dim, index, weights in own_taps:
            if weights is None:
                a = a.index_select(dim, index[:, 0].to(a.device))
                continue
            shape = [-1 if d == dim else 1 for d in range(a.dim())]
            total: Any = None
            for k in range(index.shape[1]):
                weight = weights[:, k].to(a.device, a.dtype).view(shape)
                cells = a.index_select(dim, index[:, k].to(a.device))
                total = cells.mul_(weight) if total is None else total.addcmul_(cells, weight)
            a = total
        return a

    layout = tuple((reaches[dim].out_partition,) if dim in reaches else atoms for dim, atoms in enumerate(x.layout))
    return lowering.local(run, [view], layout, lowering.fake_out.dtype, at=local_taps)


def spatial_dims_and_result_axes(lowering: Lowering, x: Value, ndim: int) -> tuple[list[int], dict[int, int | None]]:
    """Return the last ndim dimensions, and the mesh axes that partition the results along them.

    The result of an unpartitioned input is partitioned if the mesh has ndim axes: it may be an upsampled full image.
    """
    dims = list(range(len(x.shape) - ndim, len(x.shape)))
    axes = {dim: lowering.axis_of(x, dim) for dim in dims}
    if ndim == lowering.mesh.spatial_ndim and not x.axes - {0}:
        axes = {dim: at for at, dim in enumerate(dims, start=1)}
    return dims, axes


def _cells_per_result(n_in: int, n_out: int, factor: float | None, align: bool) -> float:
    if align:
        return (n_in - 1) / (n_out - 1) if n_out > 1 else 0.0
    return 1.0 / factor if factor is not None and factor > 0 else n_in / n_out


def _source_coordinates(n_in: int, n_out: int, factor: float | None, align: bool, dtype: torch.dtype) -> torch.Tensor:
    """Return source coordinates of the results, as in ATen's UpSample.h: computed in `dtype`, rounded once.

    In float32 the coordinate of result 9000 of 9001 is off by 1e-3 of a cell, and PyTorch's results have this error.
    """
    i = torch.arange(n_out, dtype=torch.float64)
    scale = torch.tensor(_cells_per_result(n_in, n_out, factor, align), dtype=dtype).double()
    return (scale * i if align else scale * (i + 0.5) - 0.5).to(dtype)


def linear_taps(n_in: int, n_out: int, factor: float | None, align: bool, dtype: torch.dtype) -> Taps:
    """Return the taps of linear interpolation from n_in cells to n_out."""
    coords = _source_coordinates(n_in, n_out, factor, align, dtype).clamp(min=0)
    first = coords.to(torch.int64).clamp(max=n_in - 1)
    weight = (coords - first).clamp(0, 1)
    return Taps(torch.stack([first, (first + 1).clamp(max=n_in - 1)], 1), torch.stack([1 - weight, weight], 1))


def cubic_taps(n_in: int, n_out: int, factor: float | None, align: bool, dtype: torch.dtype) -> Taps:
    """Return the taps of cubic interpolation (A = -0.75)."""
    coords, a = _source_coordinates(n_in, n_out, factor, align, dtype), -0.75
    first = coords.floor()
    t = coords - first

    def inner_tap_weight(x: torch.Tensor) -> torch.Tensor:
        return ((a + 2) * x - (a + 3)) * x * x + 1

    def outer_tap_weight(x: torch.Tensor) -> torch.Tensor:
        return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a

    cells = (first.to(torch.int64)[:, None] + torch.arange(-1, 3)).clamp(0, n_in - 1)
    weights = [outer_tap_weight(t + 1), inner_tap_weight(t), inner_tap_weight(1 - t), outer_tap_weight(2 - t)]
    return Taps(cells, torch.stack(weights, 1))


def antialiased_taps(n_in: int, n_out: int, scale: float, dtype: torch.dtype, cubic: bool) -> Taps:
    """Return the taps of interpolation with antialias=True: filters as wide as the source region of one result.

    The filters are triangular or cubic (A = -0.5), and computed in `dtype`, as in ATen's UpSampleKernel.cpp.
    """
    filter_scale, filter_radius = torch.tensor(max(scale, 1.0), dtype=dtype), 2 if cubic else 1
    centres = torch.tensor(scale, dtype=dtype) * (torch.arange(n_out, dtype=dtype) + 0.5)
    first = (centres - filter_radius * filter_scale + 0.5).to(torch.int64).clamp(min=0)
    stop = (centres + filter_radius * filter_scale + 0.5).to(torch.int64).clamp(max=n_in)
    cells = first[:, None] + torch.arange(int((stop - first).max()))
    x = ((cells - centres[:, None] + 0.5) / filter_scale).abs()
    if cubic:
        inner_weights, outer_weights = (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
        weights = torch.where(x < 1, inner_weights, outer_weights * (x < 2))
    else:
        weights = (1 - x).clamp(min=0)
    weights = weights * (cells < stop[:, None])
    weights /= weights.sum(1, keepdim=True)
    last = stop[:, None] - 1
    is_last = cells >= last  # shorter filters repeat their last cell: a weight of 0 would turn infinity into NaN
    weights = torch.where(is_last, weights.gather(1, last - first[:, None]) / is_last.sum(1, keepdim=True), weights)
    return Taps(torch.minimum(cells, last), weights)


def nearest_taps(n_in: int, n_out: int, factor: float | None, exact: bool) -> Taps:
    """Return the taps of nearest interpolation, computed in float32 as in PyTorch."""
    scale = torch.tensor(1.0 / factor if factor else n_in / n_out, dtype=torch.float32)
    i = torch.arange(n_out, dtype=torch.float32)
    cells = ((i + 0.5) * scale if exact else i * scale).floor().to(torch.int64).clamp(max=n_in - 1)
    return Taps(cells[:, None], None)


@rule("aten.upsample_nearest1d.vec", "aten.upsample_nearest2d.vec", "aten.upsample_nearest3d.vec",
      "aten.upsample_linear1d.vec", "aten.upsample_bilinear2d.vec", "aten.upsample_trilinear3d.vec",
      "aten.upsample_bicubic2d.vec", "aten._upsample_nearest_exact1d.vec", "aten._upsample_nearest_exact2d.vec",
      "aten._upsample_nearest_exact3d.vec", "aten.upsample_nearest1d.default", "aten.upsample_nearest2d.default",
      "aten.upsample_nearest3d.default", "aten.upsample_linear1d.default", "aten.upsample_bilinear2d.default",
      "aten.upsample_trilinear3d.default", "aten.upsample_bicubic2d.default", "aten._upsample_bilinear2d_aa.vec",
      "aten._upsample_bicubic2d_aa.vec", applies_if_replicated=True)  # fmt: skip
def upsample(
    lowering: Lowering, x: Value, align_corners: bool = False, scale_factors: Sequence[float] | None = None,
    scales: float | None = None, scales_d: float | None = None, scales_h: float | None = None,
    scales_w: float | None = None, **_: object,
) -> Value:  # fmt: skip
    """Interpolate after a halo exchange of the cells around the source coordinates of the results."""
    if not lowering.mesh.axes:
        return lowering.compute_replicated()
    name, ndim = str(lowering.target), spatial_ndim(lowering)
    multi_atom_dims = [dim for dim in range(len(x.shape) - ndim, len(x.shape)) if len(x.layout[dim]) > 1]
    if x.axes == axes_of(x.layout[dim] for dim in multi_atom_dims) and sum(lowering.fake_out.shape[-ndim:]) <= sum(
        x.shape[-ndim:]
    ):
        return lowering.compute_replicated()
    x = lowering.gather(x, multi_atom_dims)
    dims, axes = spatial_dims_and_result_axes(lowering, x, ndim)
    antialias = "_aa" in name
    if antialias and lowering.fake_out.shape[-1] == 1 and lowering.fake_out.shape[-2] != x.shape[-2]:
        lowering.refuse(
            "antialias to a single column returns identical rows in PyTorch 2.13; resize rows and columns separately"
        )
    scale_by_dim = (scales_d, scales_h, scales_w)[3 - ndim :]
    factors: Sequence[float | None] = [scales] if scales is not None else scale_factors or scale_by_dim
    taps_by_dim, dtype = dict[int, Taps](), torch.promote_types(lowering.fake_out.dtype, torch.float32)
    for dim, n_out, factor in zip(dims, lowering.fake_out.shape[-ndim:], factors, strict=True):
        if "nearest" in name:
            taps_by_dim[dim] = nearest_taps(x.shape[dim], n_out, factor, "exact" in name)
        elif antialias:
            scale = _cells_per_result(x.shape[dim], n_out, factor, align_corners)
            if n_out == x.shape[dim] and scale != 1:
                lowering.refuse(
                    f"with factor {factor}, PyTorch 2.13 copies the input but rescales its gradient; pass size instead"
                )
            taps_by_dim[dim] = antialiased_taps(x.shape[dim], n_out, scale, dtype, "cubic" in name)
        else:
            compute_taps = cubic_taps if "cubic" in name else linear_taps
            taps_by_dim[dim] = compute_taps(x.shape[dim], n_out, factor, align_corners, dtype)
    return resample(lowering, x, taps_by_dim, axes)


@rule("aten.adaptive_avg_pool1d.default", "aten.adaptive_avg_pool2d.default", "aten.adaptive_avg_pool3d.default",
      "aten._adaptive_avg_pool2d.default", "aten._adaptive_avg_pool3d.default")  # fmt: skip
def adaptive_avg_pool(lowering: Lowering, x: Value, output_size: int | Sequence[int]) -> Value:
    """Sum over tiles, for replicated results; if there are many, partition them after a halo exchange."""
    ndim = spatial_ndim(lowering)
    dims = list(range(len(x.shape) - ndim, len(x.shape)))
    x = lowering.gather_into_single_atoms(x, dims)
    averaged_dims = [dim for dim in dims if lowering.fake_out.shape[dim] == 1]
    if averaged_dims:
        x = _average_dims(lowering, x, averaged_dims)
    for dim in sorted({*dims} - {*averaged_dims}):
        x = _average_pool_dim(lowering, x, dim, lowering.fake_out.shape[dim])
    return x


def _average_dims(lowering: Lowering, x: Value, dims: Sequence[int]) -> Value:
    """Return the mean over dimensions, as dimensions of extent 1."""
    axes, layout = axes_of(x.layout[dim] for dim in dims), x.layout
    for dim in dims:
        layout = replace_dim(layout, dim, Atom(1))
    factor, averaged_dims = 1 / prod(x.shape[dim] for dim in dims), tuple(dims)

    def run(a: torch.Tensor) -> torch.Tensor:
        total = a.sum(averaged_dims, keepdim=True, dtype=ACCUMULATION_DTYPES.get(a.dtype))
        return (total * factor).to(a.dtype)

    return lowering.allreduce_local_result(run, [x], axes, layout)


def _adaptive_bins(n_in: int, n_out: int) -> list[range]:
    return [range(floor(i * n_in / n_out), ceil((i + 1) * n_in / n_out)) for i in range(n_out)]


def _reach_of_bins(out_atom: Atom, bins: Sequence[range]) -> Reach:
    """Return the reach of results, each of which depends on the cells of a bin."""
    return Reach(out_atom, IndexMap(lambda lo, hi: range(bins[lo].start, bins[hi - 1].stop)))


def _average_pool_dim(lowering: Lowering, x: Value, dim: int, n_out: int) -> Value:
    atom = lowering.single_atom(x, dim)
    n_in, axis, bins = atom.extent, atom.axis, _adaptive_bins(atom.extent, n_out)
    if axis is not None and n_out >= 2 * lowering.mesh.parts[axis] and n_out * 2 >= n_in:
        out_atom = lowering.mesh.even_atom(n_out, axis)
        reach = _reach_of_bins(out_atom, bins)
        view = lowering.view(x, {dim: reach})

        def cells_at(place: Place) -> tuple[torch.Tensor, torch.Tensor]:
            lo, hi = out_atom.range(place)
            return _local_cells_of_bins(bins[lo:hi], *reach.view(lo, hi, n_in).ranges[0])

        return lowering.local(partial(_average_bins, dim), [view], replace_dim(x.layout, dim, out_atom), at=cells_at)
    axes, layout = [] if axis is None else [axis], replace_dim(x.layout, dim, Atom(n_out))
    run = partial(_average_bins, dim)
    return lowering.allreduce_local_result(
        run, [x], axes, layout, at=lambda place: _local_cells_of_bins(bins, *atom.range(place))
    )


def _local_cells_of_bins(bins: Sequence[range], first_cell: int, end_cell: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return local indices of each bin's cells in [first_cell, end_cell), padded with their number, and bin sizes."""
    num_cells, max_bin_size = max(0, end_cell - first_cell), max(map(len, bins), default=0)
    local_indices = torch.full((len(bins), max_bin_size), num_cells)
    for cells, row in zip(bins, local_indices, strict=True):
        indices = torch.tensor([at - first_cell for at in cells if first_cell <= at < end_cell], dtype=torch.int64)
        row[: len(indices)] = indices
    return local_indices, torch.tensor([len(cells) for cells in bins], dtype=torch.float64)


def _average_bins(dim: int, index_and_sizes: tuple[torch.Tensor, torch.Tensor], a: torch.Tensor) -> torch.Tensor:
    """Return the sum of each bin's local cells, divided by its size; other cells do not contribute, even NaN."""
    index, sizes = (tensor.to(a.device) for tensor in index_and_sizes)
    shape = [1 if at == dim else n for at, n in enumerate(a.shape)]
    cells = torch.cat([a, a.new_zeros(shape)], dim).index_select(dim, index.flatten())
    total = cells.unflatten(dim, index.shape).sum(dim + 1, dtype=ACCUMULATION_DTYPES.get(a.dtype))
    return (total / sizes.to(total.dtype).view([-1 if at == dim else 1 for at in range(a.dim())])).to(a.dtype)


@rule("aten.adaptive_max_pool1d.default", "aten.adaptive_max_pool2d.default", "aten.adaptive_max_pool3d.default")
def adaptive_max_pool(lowering: Lowering, x: Value, output_size: int | Sequence[int]) -> tuple[Value, None]:
    """Pool over bins after a halo exchange; indices are not supported."""
    ndim = spatial_ndim(lowering)
    out, _ = lowering.fake_out
    dims = list(range(len(x.shape) - ndim, len(x.shape)))
    x = lowering.gather_into_single_atoms(x, dims)
    bins = {dim: _adaptive_bins(x.shape[dim], n_out) for dim, n_out in zip(dims, out.shape[-ndim:], strict=True)}
    reaches = {
        dim: _reach_of_bins(lowering.mesh.even_atom(len(bins[dim]), lowering.axis_of(x, dim)), bins[dim])
        for dim in dims
    }
    view = lowering.view(x, reaches)
    pool_function = {1: F.adaptive_max_pool1d, 2: F.adaptive_max_pool2d, 3: F.adaptive_max_pool3d}[ndim]

    def local_bins(place: Place) -> list[list[tuple[int, int]]]:
        own_bins = []
        for dim in dims:
            lo, hi = reaches[dim].out_partition.range(place)
            own_bins.append([(cells.start - bins[dim][lo].start, len(cells)) for cells in bins[dim][lo:hi]])
        return own_bins

    def run(remaining_bins: Sequence[list[tuple[int, int]]], a: torch.Tensor) -> torch.Tensor:
        if not remaining_bins:
            return pool_function(a, 1)
        dim, (dim_bins, *other_bins) = dims[ndim - len(remaining_bins)], remaining_bins
        return torch.cat([run(other_bins, a.narrow(dim, *cells)) for cells in dim_bins], dim)

    layout = tuple((reaches[dim].out_partition,) if dim in reaches else atoms for dim, atoms in enumerate(x.layout))
    return lowering.local(run, [view], layout, out.dtype, at=local_bins), None
