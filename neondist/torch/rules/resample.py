"""Interpolation and adaptive pooling, one axis at a time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain
from math import ceil, floor
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ...geometry import Atom, IndexMap, Place
from ..ir.graph import Value
from ..ir.layout import axes_of, replaced
from ..ir.reach import Reach
from ..ir.registry import rule
from ..lowering.lower import Lowering
from .window import spatial_rank


class Taps(NamedTuple):
    """Cells that contribute to each result, and their weights, both of shape (results, taps)."""

    cells: torch.Tensor
    weights: torch.Tensor | None

    @property
    def window(self) -> IndexMap:
        """The cells that contribute to the results, by their indices."""
        cells = self.cells.tolist()
        return IndexMap(lambda lo, hi: chain(*cells[lo:hi]))


def interpolate(lowering: Lowering, x: Value, taps: dict[int, Taps], axes: dict[int, Any]) -> Any:
    """Return x resampled along dimensions; `axes` are the mesh axes that partition the results."""
    reaches = {dim: Reach(lowering.mesh.atom(len(tap.cells), axes[dim]), tap.window) for dim, tap in taps.items()}
    context = x.axes | axes_of((reach.out,) for reach in reaches.values())
    view = lowering.view(x, reaches, context, window=True)
    atoms = {dim: lowering.atom(x, dim) for dim in taps}

    def at(place: Place) -> list[tuple[int, torch.Tensor, torch.Tensor | None]]:
        plans = []
        for dim, tap in taps.items():
            lo, hi = reaches[dim].out.range(place)
            index = tap.cells[lo:hi] - reaches[dim].first(atoms[dim], place)
            plans.append((dim, index, None if tap.weights is None else tap.weights[lo:hi]))
        return plans

    def run(plans: Sequence[tuple[int, torch.Tensor, torch.Tensor | None]], a: torch.Tensor) -> torch.Tensor:
        for dim, index, weights in plans:
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

    layout = tuple((reaches[dim].out,) if dim in reaches else cut for dim, cut in enumerate(x.layout))
    return lowering.local(run, [view], layout, lowering.out.dtype, at=at)


def spatial(lowering: Lowering, x: Value, n: int) -> tuple[list[int], dict[int, Any]]:
    """Return the last n dimensions, and the mesh axes that partition the results along them.

    An unpartitioned input becomes partitioned if the mesh has as many axes: a few cells grow to an image here.
    """
    dims = list(range(len(x.shape) - n, len(x.shape)))
    axes = {dim: lowering.cut(x, dim) for dim in dims}
    if n == lowering.mesh.spatial and not x.axes - {0}:
        axes = {dim: at for at, dim in enumerate(dims, start=1)}
    return dims, axes


def _scale(n: int, m: int, factor: float | None, align: bool) -> float:
    if align:
        return (n - 1) / (m - 1) if m > 1 else 0.0
    return 1.0 / factor if factor is not None and factor > 0 else n / m


def _places(n: int, m: int, factor: float | None, align: bool, dtype: torch.dtype) -> torch.Tensor:
    """Return source coordinates of the results, as in ATen's UpSample.h: in the dtype, with one rounding.

    In float32 the place of result 9000 of 9001 is off by 1e-3 of a cell, and PyTorch's numbers are those of that place.
    """
    i = torch.arange(m, dtype=torch.float64)
    scale = torch.tensor(_scale(n, m, factor, align), dtype=dtype).double()
    return (scale * i if align else scale * (i + 0.5) - 0.5).to(dtype)


def linear(n: int, m: int, factor: float | None, align: bool, dtype: torch.dtype) -> Taps:
    """Return the taps of linear interpolation from n cells to m."""
    at = _places(n, m, factor, align, dtype).clamp(min=0)
    first = at.to(torch.int64).clamp(max=n - 1)
    share = (at - first).clamp(0, 1)
    return Taps(torch.stack([first, (first + 1).clamp(max=n - 1)], 1), torch.stack([1 - share, share], 1))


def cubic(n: int, m: int, factor: float | None, align: bool, dtype: torch.dtype) -> Taps:
    """Return the taps of cubic interpolation (A = -0.75)."""
    at, a = _places(n, m, factor, align, dtype), -0.75
    first = at.floor()
    t = at - first

    def near(x: torch.Tensor) -> torch.Tensor:
        return ((a + 2) * x - (a + 3)) * x * x + 1

    def far(x: torch.Tensor) -> torch.Tensor:
        return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a

    cells = (first.to(torch.int64)[:, None] + torch.arange(-1, 3)).clamp(0, n - 1)
    return Taps(cells, torch.stack([far(t + 1), near(t), near(1 - t), far(2 - t)], 1))


def smoothed(n: int, m: int, scale: float, dtype: torch.dtype, cubic: bool) -> Taps:
    """Return the taps of interpolation with antialias=True, with filters as wide as a result's share of the image.

    As in ATen's UpSampleKernel.cpp: in the dtype, triangles, or cubic ones with A = -0.5.
    """
    width, reach = torch.tensor(max(scale, 1.0), dtype=dtype), 2 if cubic else 1
    centres = torch.tensor(scale, dtype=dtype) * (torch.arange(m, dtype=dtype) + 0.5)
    first = (centres - reach * width + 0.5).to(torch.int64).clamp(min=0)
    last = (centres + reach * width + 0.5).to(torch.int64).clamp(max=n)
    cells = first[:, None] + torch.arange(int((last - first).max()))
    x = ((cells - centres[:, None] + 0.5) / width).abs()
    if cubic:
        near, far = (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
        weights = torch.where(x < 1, near, far * (x < 2))
    else:
        weights = (1 - x).clamp(min=0)
    weights = weights * (cells < last[:, None])
    return Taps(torch.minimum(cells, last[:, None] - 1), weights / weights.sum(1, keepdim=True))


def nearest(n: int, m: int, factor: float | None, exact: bool) -> Taps:
    """Return the taps of nearest interpolation, computed in float32 as in PyTorch."""
    scale = torch.tensor(1.0 / factor if factor else n / m, dtype=torch.float32)
    at = torch.arange(m, dtype=torch.float32)
    cells = ((at + 0.5) * scale if exact else at * scale).floor().to(torch.int64).clamp(max=n - 1)
    return Taps(cells[:, None], None)


@rule("aten.upsample_nearest1d.vec", "aten.upsample_nearest2d.vec", "aten.upsample_nearest3d.vec",
      "aten.upsample_linear1d.vec", "aten.upsample_bilinear2d.vec", "aten.upsample_trilinear3d.vec",
      "aten.upsample_bicubic2d.vec", "aten._upsample_nearest_exact1d.vec", "aten._upsample_nearest_exact2d.vec",
      "aten._upsample_nearest_exact3d.vec", "aten.upsample_nearest1d.default", "aten.upsample_nearest2d.default",
      "aten.upsample_nearest3d.default", "aten.upsample_linear1d.default", "aten.upsample_bilinear2d.default",
      "aten.upsample_trilinear3d.default", "aten.upsample_bicubic2d.default", "aten._upsample_bilinear2d_aa.vec",
      "aten._upsample_bicubic2d_aa.vec", always=True)  # fmt: skip
def upsample(
    lowering: Lowering, x: Value, output_size: int | Sequence[int] | None = None, align_corners: bool = False,
    scale_factors: Any = None,
    scales: Any = None, scales_d: Any = None, scales_h: Any = None, scales_w: Any = None,
) -> Any:  # fmt: skip
    """Window at a position that depends on the result: cells around its source coordinates."""
    if not lowering.mesh.axes:
        return lowering.alike()
    name, n = str(lowering.target), spatial_rank(lowering)
    several = [dim for dim in range(len(x.shape) - n, len(x.shape)) if len(x.layout[dim]) > 1]
    if x.axes == axes_of(x.layout[dim] for dim in several) and sum(lowering.out.shape[-n:]) <= sum(x.shape[-n:]):
        return lowering.alike()
    x = lowering.gathered(x, several)
    dims, axes = spatial(lowering, x, n)
    smooth = "_aa" in name
    if smooth and lowering.out.shape[-1] == 1 and lowering.out.shape[-2] != x.shape[-2]:
        lowering.refuse(
            "antialias to a single column returns identical rows in PyTorch 2.13; resize rows and columns separately"
        )
    given = scale_factors or list((scales_d, scales_h, scales_w)[3 - n :])
    if scales is not None:
        given = [scales]
    factors = list(given) if given else [None] * n
    taps, dtype = dict[int, Taps](), torch.promote_types(lowering.out.dtype, torch.float32)
    for dim, m, factor in zip(dims, lowering.out.shape[-n:], factors, strict=True):
        if "nearest" in name:
            taps[dim] = nearest(x.shape[dim], m, factor, "exact" in name)
        elif smooth:
            scale = _scale(x.shape[dim], m, factor, align_corners)
            if m == x.shape[dim] and scale != 1:
                lowering.refuse(f"PyTorch 2.13 leaves {m} cells unchanged, but not their gradient, for the factor"
                                f" {factor}; give the size instead")  # fmt: skip
            taps[dim] = smoothed(x.shape[dim], m, scale, dtype, "cubic" in name)
        else:
            kind = cubic if "cubic" in name else linear
            taps[dim] = kind(x.shape[dim], m, factor, align_corners, dtype)
    return interpolate(lowering, x, taps, axes)


@rule("aten.adaptive_avg_pool1d.default", "aten.adaptive_avg_pool2d.default", "aten.adaptive_avg_pool3d.default",
      "aten._adaptive_avg_pool2d.default", "aten._adaptive_avg_pool3d.default")  # fmt: skip
def adaptive_avg_pool(lowering: Lowering, x: Value, output_size: int | Sequence[int]) -> Any:
    """Reduction: partial sums of each tile; results are replicated, or partitioned if there are many."""
    n = spatial_rank(lowering)
    dims = list(range(len(x.shape) - n, len(x.shape)))
    for dim, m in zip(dims, lowering.out.shape[-n:], strict=True):
        x = _averaged(lowering, lowering.single(x, dim), dim, m)
    return x


def _bins(n: int, m: int) -> list[range]:
    return [range(floor(i * n / m), ceil((i + 1) * n / m)) for i in range(m)]


def _reach(out: Atom, bins: Sequence[range]) -> Reach:
    """Return the reach of results, each of which depends on the cells of a bin."""
    return Reach(out, IndexMap(lambda lo, hi: range(bins[lo].start, bins[hi - 1].stop)))


def _averaged(lowering: Lowering, x: Value, dim: int, m: int) -> Any:
    atom = lowering.atom(x, dim)
    n, axis, bins = atom.extent, atom.axis, _bins(atom.extent, m)
    if axis is not None and m >= 2 * lowering.mesh.parts[axis] and m * 2 >= n:
        out = lowering.mesh.atom(m, axis)
        reach = _reach(out, bins)
        view = lowering.view(x, {dim: reach})

        def at(place: Place) -> torch.Tensor:
            lo, hi = out.range(place)
            return _matrix(bins[lo:hi], *reach.view(lo, hi, n).ranges[0])

        return lowering.local(partial(_applied, dim), [view], replaced(x.layout, dim, out), at=at)
    lo, hi = atom.range(lowering.place)
    matrix = _matrix(bins, lo, hi)
    layout = replaced(x.layout, dim, Atom(m))
    return lowering.reduced(partial(_applied, dim, matrix), [x], [axis] if axis is not None else [], layout)


def _matrix(bins: Sequence[range], first: int, last: int) -> torch.Tensor:
    """Return the weights (results, cells) of the cells [first, last)."""
    weights = torch.zeros(len(bins), max(0, last - first), dtype=torch.float64)
    for i, cells in enumerate(bins):
        a, b = max(cells.start, first), min(cells.stop, last)
        if a < b:
            weights[i, a - first : b - first] = 1.0 / len(cells)
    return weights


def _applied(dim: int, matrix: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    weights = matrix.to(a.device, a.dtype)
    return torch.tensordot(a, weights, ([dim], [1])).movedim(-1, dim)


@rule("aten.adaptive_max_pool1d.default", "aten.adaptive_max_pool2d.default", "aten.adaptive_max_pool3d.default")
def adaptive_max_pool(lowering: Lowering, x: Value, output_size: int | Sequence[int]) -> Any:
    """Window at a position that depends on the result; indices are not supported."""
    n = spatial_rank(lowering)
    values, _ = lowering.out
    dims = list(range(len(x.shape) - n, len(x.shape)))
    for dim in dims:
        x = lowering.single(x, dim)
    bins = {dim: _bins(x.shape[dim], m) for dim, m in zip(dims, values.shape[-n:], strict=True)}
    reaches = {dim: _reach(lowering.mesh.atom(len(bins[dim]), lowering.cut(x, dim)), bins[dim]) for dim in dims}
    view = lowering.view(x, reaches)
    pool = {1: F.adaptive_max_pool1d, 2: F.adaptive_max_pool2d, 3: F.adaptive_max_pool3d}[n]

    def at(place: Place) -> list[list[tuple[int, int]]]:
        mine = []
        for dim in dims:
            lo, hi = reaches[dim].out.range(place)
            mine.append([(cells.start - bins[dim][lo].start, len(cells)) for cells in bins[dim][lo:hi]])
        return mine

    def run(mine: Sequence[list[tuple[int, int]]], part: torch.Tensor) -> torch.Tensor:
        if not mine:
            return pool(part, 1)
        dim, (first, *others) = dims[n - len(mine)], mine
        return torch.cat([run(others, part.narrow(dim, *cells)) for cells in first], dim)

    layout = tuple((reaches[dim].out,) if dim in reaches else cut for dim, cut in enumerate(x.layout))
    return lowering.local(run, [view], layout, values.dtype, at=at), None
