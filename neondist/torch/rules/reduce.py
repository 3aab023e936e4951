"""Reductions along dimensions; along partitioned ones, ranks exchange partial results."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any

import torch

from ...geometry import Atom
from ..ir.errors import UnsupportedOperator
from ..ir.graph import Value
from ..ir.layout import Layout, axes_of, shape_of
from ..ir.registry import rule
from ..lowering.lower import Lowering


def dims_of(x: Value, dim: int | Sequence[int] | None) -> list[int]:
    """Return dimensions as sorted non-negative integers; None or an empty list: all."""
    rank = len(x.shape)
    dims = [dim] if isinstance(dim, int) else dim
    return sorted(d % rank for d in dims) if dims and rank else list(range(rank))


def without(x: Value, dims: Sequence[int], keepdim: bool) -> Layout:
    """Return the layout after a reduction over dimensions."""
    kept = ((Atom(1),) if at in dims else dim for at, dim in enumerate(x.layout))
    return tuple(dim for at, dim in enumerate(kept) if keepdim or at not in dims)


def axes_along(x: Value, dims: Iterable[int]) -> frozenset[int]:
    """Return the mesh axes that partition these dimensions."""
    return axes_of(x.layout[dim] for dim in dims)


def total(
    lowering: Lowering,
    run: Callable[..., Any],
    args: Sequence[Any],
    dims: Sequence[int],
    keepdim: bool = True,
    dtype: torch.dtype | None = None,
) -> Any:
    """Return the sum of run(*tensors, dims, keepdim) over dimensions of its first argument."""
    x = args[0]
    return lowering.reduced(
        lambda *t: run(*t, list(dims), keepdim), args, axes_along(x, dims), without(x, dims, keepdim), dtype
    )


def _summed(a: torch.Tensor, dims: list[int], keepdim: bool) -> torch.Tensor:
    return a.sum(dims, keepdim) if dims else a


@rule("aten.sum.dim_IntList", "aten.sum.default", "aten.mean.dim", "aten.mean.default", "aten.nansum.default")
def sums(
    lowering: Lowering,
    x: Value,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> Any:
    """Reduction: partial sums."""
    name = str(lowering.target)
    if "nansum" in name:
        x = lowering.local(lambda a: torch.where(a.isnan(), 0, a), [x], x.layout)
    dims = dims_of(x, dim)
    number = prod(x.shape[d] for d in dims) if "mean" in name else 1
    if dtype is not None or not (x.dtype.is_floating_point or x.dtype.is_complex):
        wanted = lowering.out.dtype
        x = lowering.local(lambda a: a.to(wanted), [x], x.layout, wanted)
    summed = total(lowering, _summed, [x], dims, keepdim)
    return summed if number == 1 else lowering.local(lambda a: a / number, [summed], summed.layout)


@rule("aten.var.correction", "aten.std.correction", "aten.var_mean.correction", "aten.var.dim", "aten.std.dim",
      "aten.var_mean.dim", "aten.var.default", "aten.std.default", "aten.std_mean.correction", "aten.std_mean.dim",
      "aten.std_mean.default", "aten.var_mean.default")  # fmt: skip
def variance(
    lowering: Lowering,
    x: Value,
    dim: int | Sequence[int] | None = None,
    correction: Any = None,
    keepdim: bool = False,
    unbiased: bool = True,
) -> Any:
    """Reduction: the mean, then squared differences from it."""
    name = str(lowering.target)
    dims = dims_of(x, dim)
    less = float(correction) if correction is not None else float(unbiased)
    mean, squares, _ = moments(lowering, x, dims)
    number = prod(x.shape[d] for d in dims)
    result = lowering.local(
        lambda s: s / max(0.0, number - less) if number > less else s * torch.nan, [squares], squares.layout
    )
    if "std" in name:
        result = lowering.local(_root, [result], result.layout)
    layout = without(x, dims, keepdim)
    result, mean = lowering.shaped(result, layout), lowering.shaped(mean, layout)
    return (result, mean) if "_mean" in name else result


def _root(v: torch.Tensor, order: float = 2) -> torch.Tensor:
    """Return the root with derivative 0 at 0, as in PyTorch's standard deviations and norms."""
    return v.where(v != 0, 1).pow(1 / order).where(v != 0, 0)


def moments(lowering: Lowering, x: Value, dims: Sequence[int]) -> tuple[Any, Any, Any]:
    """Return the mean over dimensions, the sum of squared differences from it, and the differences."""
    number = prod(x.shape[d] for d in dims)
    summed = total(lowering, _summed, [x], dims)
    mean = lowering.local(lambda s: s / number, [summed], summed.layout)
    apart = lowering.local(torch.sub, [x, lowering.enter(mean, x.axes)], x.layout)
    squares = total(lowering, lambda a, d, k: _square(a).sum(d, k), [apart], dims, dtype=x.dtype.to_real())
    return mean, squares, apart


def _square(a: torch.Tensor) -> torch.Tensor:
    """Return the squares of absolute values."""
    return (a * a.conj()).real if a.is_complex() else a * a


@rule("aten.linalg_vector_norm.default")
def vector_norm(
    lowering: Lowering,
    x: Value,
    ord: float = 2,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> Any:
    """Reduction: sums of powers; infinite orders by extrema; for orders below 1, dimensions are gathered."""
    dims = dims_of(x, dim)
    if ord < 1 and ord not in (0, -torch.inf):  # taken apart, their gradient at 0 would be another one
        x = lowering.gathered(x, dims)
    if not 1 <= ord < torch.inf or dtype is not None or all(lowering.is_whole(x, d) for d in dims):
        return along(lowering, x, dim, keepdim, ord=ord, dtype=dtype)
    summed = total(lowering, lambda a, d, k: a.abs().pow(ord).sum(d, k), [x], dims, keepdim, x.dtype.to_real())
    return lowering.local(lambda s: _root(s, ord), [summed], summed.layout, lowering.out.dtype)


@rule("aten.amax.default", "aten.amin.default", "aten.max.default", "aten.min.default")
def extreme(lowering: Lowering, x: Value, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> Any:
    """Reduction: extrema over tiles; equal elements share the gradient."""
    dims = dims_of(x, dim)
    low = "min" in str(lowering.target)
    if not x.dtype.is_floating_point:
        return _whole_extreme(lowering, x, dims, keepdim, low)
    greatest = _greatest(lowering, lambda a: -a if low else a, x, dims)
    here = lowering.enter(greatest, x.axes)
    mask = lowering.local(lambda a, m: ((-a if low else a) == m).to(a.dtype), [x, here], x.layout)
    mask.kind = "constant"
    count = total(lowering, _summed, [mask], dims)
    picked = total(lowering, lambda a, m, d, k: torch.where(m > 0, a, 0).sum(d, k), [x, mask], dims)

    def shared(p: torch.Tensor, c: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        p = p / c
        return (-m if low else m) + (p - p.detach()).nan_to_num()

    extremum = lowering.local(shared, [picked, count, greatest], picked.layout)
    return lowering.shaped(extremum, without(x, dims, keepdim))


def _greatest(
    lowering: Lowering, run: Callable[..., Any], x: Value, dims: list[int], dtype: torch.dtype | None = None
) -> Any:
    """Return the maximum of run(x) over dimensions, keeping them; it has no gradient."""

    def most(a: torch.Tensor) -> torch.Tensor:
        a = run(a.detach())
        if a.numel():
            return a.amax(dims, True)
        least = -torch.inf if a.is_floating_point() else torch.iinfo(a.dtype).min
        return a.new_full([1 if d in dims else n for d, n in enumerate(a.shape)], least)

    return lowering.reduced(most, [x], axes_along(x, dims), without(x, dims, True), dtype, op="max")


def _whole_extreme(lowering: Lowering, x: Value, dims: list[int], keepdim: bool, low: bool) -> Any:
    """Return the minimum or maximum of integers, which has no gradient."""
    dtype, sign = x.dtype, -1 if low else 1
    greatest = _greatest(lowering, lambda a: a.to(torch.int64) * sign, x, dims, torch.int64)
    extremum = lowering.local(lambda a: (a * sign).to(dtype), [greatest], greatest.layout, dtype)
    return lowering.shaped(extremum, without(x, dims, keepdim))


@rule("aten.softmax.int", "aten._softmax.default", "aten.log_softmax.int", "aten._log_softmax.default",
      "aten._safe_softmax.default")  # fmt: skip
def softmax(
    lowering: Lowering, x: Value, dim: int, dtype: torch.dtype | None = None, half_to_float: bool = False
) -> Any:
    """Reduction: maximum and sum along a partitioned dimension."""
    dims, name = dims_of(x, dim), str(lowering.target)
    logarithm, safe = "log" in name, "safe" in name  # safe: zeros, where all is -inf
    if dtype is not None and dtype != x.dtype:
        x = lowering.local(lambda a: a.to(dtype), [x], x.layout, dtype)
    if not axes_along(x, dims):
        run = torch.ops.aten._safe_softmax if safe else torch.log_softmax if logarithm else torch.softmax
        return lowering.local(lambda a: run(a, dims[0]), [x], x.layout)
    greatest = _greatest(lowering, lambda a: a.clamp(min=torch.finfo(a.dtype).min), x, dims)
    less = lowering.local(torch.sub, [x, greatest], x.layout)
    summed = total(lowering, lambda a, d, k: a.exp().sum(d, k), [less], dims)
    if logarithm:
        return lowering.local(lambda a, s: a - s.log(), [less, summed], x.layout)
    if safe:
        summed = lowering.local(lambda s: s.where(s != 0, 1), [summed], summed.layout)
    return lowering.local(lambda a, s: a.exp() / s, [less, summed], x.layout)


@rule("aten.cumsum.default")
def cumsum(lowering: Lowering, x: Value, dim: int, dtype: torch.dtype | None = None) -> Any:
    """Reduction: sums of the preceding tiles."""
    dim, wanted = dim % len(x.shape) if x.shape else 0, lowering.out.dtype
    if lowering.is_whole(x, dim):
        return lowering.local(lambda a: a.cumsum(dim, dtype=dtype), [x], x.layout, wanted)
    if len(x.layout[dim]) > 1:
        return along(lowering, x, dim, dtype=dtype)
    axis = lowering.cut(x, dim)
    assert axis is not None
    at, parts = lowering.place[axis], lowering.mesh.parts[axis]

    def later(a: torch.Tensor) -> torch.Tensor:
        """Return this part's sum for each later part."""
        there = torch.arange(parts, device=a.device) > at
        return a.sum(dim, dtype=dtype).unsqueeze(-1) * there

    before = lowering.reduced(later, [x], [axis], (*x.layout[:dim], *x.layout[dim + 1 :], (Atom(parts),)), wanted)

    def run(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a.cumsum(dim, dtype=dtype) + b.select(-1, at).unsqueeze(dim)

    return lowering.local(run, [x, before], x.layout, wanted)


@rule("aten.median.default", "aten.nanmedian.default", "aten.nanmedian.dim", "aten.mode.default",
      "aten.quantile.scalar", "aten.nanquantile.scalar", "aten.quantile.default",
      "aten.nanquantile.default")  # fmt: skip
def ranked(
    lowering: Lowering, x: Value, dim: int | Sequence[int] | None = None, keepdim: bool = False, q: Any = None, **_: Any
) -> Any:
    """Redistribution: the dimension is gathered."""
    dims, outs = dims_of(x, dim), lowering.out
    several = isinstance(outs, (tuple, list))
    values, run = lowering.tensors()
    args = [lowering.gathered(x, dims), *(lowering.gathered(value) for value in values[1:])]
    layout = without(args[0], dims, keepdim)
    if len(values) > 1 and q.shape:
        layout = ((Atom(q.shape[0]),), *layout)
    if several:
        return lowering.locals(run, args, outs, [layout for _ in outs])
    return lowering.local(run, args, layout)


@rule("aten.cumprod.default", "aten.cummax.default", "aten.cummin.default", "aten.logcumsumexp.default",
      "aten.argmax.default", "aten.argmin.default",
      "aten.topk.default", "aten.sort.default", "aten.sort.stable", "aten.max.dim", "aten.min.dim", "aten.glu.default",
      "aten.prod.dim_int", "aten.any.dim", "aten.all.dim",
      "aten.logsumexp.default", "aten.median.dim", "aten.kthvalue.default", "aten.argsort.default",
      "aten.normalize.default")  # fmt: skip
def along(
    lowering: Lowering, x: Value, dim: int | Sequence[int] | None = None, keepdim: bool = False, **more: Any
) -> Any:
    """Local along dimensions that are not partitioned; otherwise decomposed, or the dimension is gathered."""
    target, outs, was = lowering.target, lowering.out, None
    dims = dims_of(x, dim)
    if any(not lowering.is_whole(x, d) for d in dims):
        with contextlib.suppress(UnsupportedOperator):
            inner = lowering.apart()
            if inner is not None:
                return inner
        was, x = x.layout, lowering.gathered(x, dims)
    several = isinstance(outs, (tuple, list))
    layouts = []
    for out in outs if several else [outs]:
        if len(out.shape) == len(x.shape):
            layouts.append(tuple((Atom(out.shape[at]),) if at in dims else cut for at, cut in enumerate(x.layout)))
        else:
            layouts.append(without(x, dims, False))
    names = [a.name for a in target._schema.arguments]
    given = {name: more[name] for name in names if name in more}
    if any(hasattr(value, "layout_or_none") for value in more.values()):
        lowering.refuse("an index is a tensor")
    given |= {"dim": dim} if "dim" in names else {}
    given |= {"keepdim": keepdim} if "keepdim" in names else {}
    keyword = {a.name for a in target._schema.arguments if a.kwarg_only}
    first = [n for n in names[1:] if n not in keyword]

    def run(a: torch.Tensor) -> Any:
        return target(a, *(given[n] for n in first), **{n: given[n] for n in keyword})

    if several:
        return lowering.locals(run, [x], outs, layouts)
    result = lowering.local(run, [x], layouts[0], outs.dtype)
    return result if was is None or result.shape != shape_of(was) else lowering.cut_as(result, was)
