"""Reductions along dimensions; along partitioned dimensions, ranks exchange partial results."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from math import prod
from operator import itemgetter
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch.utils import _pytree as pytree

from ...geometry import Atom, index_of
from ..ir.errors import UnsupportedOperator
from ..ir.graph import ACCUMULATION_DTYPES, Value
from ..ir.layout import Layout, axes_of, shape_of
from ..ir.once_differentiable import once_differentiable
from ..ir.registry import rule
from ..lowering.lowering import Lowering

Dims = int | Sequence[int] | None


def nonnegative_dims(x: Value, dim: Dims) -> list[int]:
    """Return dimensions as sorted non-negative integers; None and empty lists stand for all dimensions."""
    ndim = len(x.shape)
    dims = [dim] if isinstance(dim, int) else dim
    return sorted(d % ndim for d in dims) if dims and ndim else list(range(ndim))


def layout_after_reduction(x: Value, dims: Sequence[int], keepdim: bool) -> Layout:
    """Return the layout after a reduction over dimensions."""
    keepdim_layout = ((Atom(1),) if at in dims else dim for at, dim in enumerate(x.layout))
    return tuple(dim for at, dim in enumerate(keepdim_layout) if keepdim or at not in dims)


def axes_of_dims(x: Value, dims: Iterable[int]) -> frozenset[int]:
    """Return the mesh axes that partition these dimensions."""
    return axes_of(x.layout[dim] for dim in dims)


def sum_over_dims(
    lowering: Lowering, run: Callable[..., torch.Tensor], args: Sequence[Value], dims: Sequence[int],
    keepdim: bool = True, dtype: torch.dtype | None = None,
) -> Value:  # fmt: skip
    """Return run(*tensors, dims, keepdim), summed over the ranks that partition `dims` of the first argument."""
    x = args[0]
    layout = layout_after_reduction(x, dims, keepdim)
    return lowering.allreduce_local_result(
        lambda *t: run(*t, list(dims), keepdim), args, axes_of_dims(x, dims), layout, dtype
    )


def total(lowering: Lowering, x: Value, dims: Sequence[int], keepdim: bool = True) -> Value:
    """Return the sum over dimensions, in float32 for 16-bit numbers: a mean may be finite where the sum overflows."""
    return sum_over_dims(lowering, _sum_dims, [x], dims, keepdim, ACCUMULATION_DTYPES.get(x.dtype))


def _sum_dims(a: torch.Tensor, dims: list[int], keepdim: bool) -> torch.Tensor:
    dtype = ACCUMULATION_DTYPES.get(a.dtype, a.dtype)
    return a.sum(dims, keepdim, dtype=dtype) if dims else a.to(dtype)


@rule("aten.sum.dim_IntList", "aten.sum.default", "aten.mean.dim", "aten.mean.default", "aten.nansum.default")
def sum_or_mean(
    lowering: Lowering, x: Value, dim: Dims = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> Any:
    """Sum over the dimensions, and over the ranks among which these are partitioned."""
    name, dims = str(lowering.target), nonnegative_dims(x, dim)
    if not axes_of_dims(x, dims):
        return operator_along_dims(lowering, x, dim)
    if "nansum" in name:
        x = lowering.local(lambda a: torch.where(a.isnan(), 0, a), [x], x.layout)
    count = prod(x.shape[d] for d in dims) if "mean" in name else 1
    if dtype is not None or not (x.dtype.is_floating_point or x.dtype.is_complex):
        x = lowering.convert_dtype(x, lowering.fake_out.dtype)
    result = total(lowering, x, dims, keepdim)
    if count != 1:
        result = lowering.local(lambda a: a / count, [result], result.layout)
    return lowering.convert_dtype(result, x.dtype)


@rule("aten.var.correction", "aten.std.correction", "aten.var_mean.correction", "aten.var.dim", "aten.std.dim",
      "aten.var_mean.dim", "aten.var.default", "aten.std.default", "aten.std_mean.correction", "aten.std_mean.dim",
      "aten.std_mean.default", "aten.var_mean.default")  # fmt: skip
def variance(
    lowering: Lowering, x: Value, dim: Dims = None, correction: float | None = None, keepdim: bool = False,
    unbiased: bool = True,
) -> Value | tuple[Value, Value]:  # fmt: skip
    """Sum over ranks for the mean, then for the squared differences from it."""
    name = str(lowering.target)
    dims = nonnegative_dims(x, dim)
    degrees_of_freedom = prod(x.shape[d] for d in dims) - float(unbiased if correction is None else correction)
    mean, squares, _ = mean_and_deviations(lowering, lowering.widen(x), dims, has_gradient_of_mean=False)
    divisor = degrees_of_freedom if degrees_of_freedom > 0 else torch.nan
    result = lowering.local(lambda s: s / divisor, [squares], squares.layout)
    if "std" in name:
        result = lowering.local(_root_with_zero_gradient, [result], result.layout)
    layout = layout_after_reduction(x, dims, keepdim)
    result = lowering.convert_dtype(lowering.reshape_local(result, layout), x.dtype.to_real())
    mean = lowering.convert_dtype(lowering.reshape_local(mean, layout), x.dtype)
    return (result, mean) if "_mean" in name else result


def _root_with_zero_gradient(v: torch.Tensor, order: float = 2) -> torch.Tensor:
    """Return the root with derivative 0 at 0, as in PyTorch's standard deviations and norms."""
    return v.where(v != 0, 1).pow(1 / order).where(v != 0, 0)


def mean_and_deviations(
    lowering: Lowering, x: Value, dims: Sequence[int], has_gradient_of_mean: bool = True
) -> tuple[Value, Value, Value]:
    """Return the mean over dimensions, the sum of squared differences from it, and the differences.

    The squares need no gradient of the mean, since the differences add up to zero, unless some are not finite.
    """
    count = prod(x.shape[d] for d in dims)
    summed = total(lowering, x, dims)
    mean = lowering.local(lambda s: s / count, [summed], summed.layout)
    subtracted_mean = mean if has_gradient_of_mean else lowering.detach(mean)
    deviations = lowering.local(torch.sub, [x, lowering.sum_gradient(subtracted_mean, x.axes)], x.layout)
    run = lambda a, d, k: _squared_magnitude(a).sum(d, k)  # noqa: E731
    squares = sum_over_dims(lowering, run, [deviations], dims, dtype=x.dtype.to_real())
    return mean, squares, deviations


def _squared_magnitude(a: torch.Tensor) -> torch.Tensor:
    return (a * a.conj()).real if a.is_complex() else a * a


@rule("aten.linalg_vector_norm.default")
def vector_norm(
    lowering: Lowering, x: Value, ord: float = 2, dim: Dims = None, keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> Value:  # fmt: skip
    """Sum powers over ranks; reduce extrema for infinite orders; gather the dimensions for orders below 1."""
    dims = nonnegative_dims(x, dim)
    if ord < 1 and ord not in (0, -torch.inf):  # a decomposition would have a different gradient at 0
        x = lowering.gather(x, dims)
    if abs(ord) == torch.inf and dtype is None and x.dtype.is_floating_point:
        magnitude = lowering.local(torch.abs, [x], x.layout)
        return _extremum(lowering, magnitude, dims, keepdim, ord < 0, nan_shares_gradient=True)
    if not 1 <= ord < torch.inf or dtype is not None or all(lowering.is_whole(x, d) for d in dims):
        return operator_along_dims(lowering, x, dim)
    x = lowering.widen(x)
    summed = sum_over_dims(lowering, lambda a, d, k: a.abs().pow(ord).sum(d, k), [x], dims, keepdim, x.dtype.to_real())
    norm = lowering.local(lambda s: _root_with_zero_gradient(s, ord), [summed], summed.layout)
    return lowering.convert_dtype(norm, lowering.fake_out.dtype)


@rule("aten.amax.default", "aten.amin.default", "aten.max.default", "aten.min.default")
def amax_or_amin(lowering: Lowering, x: Value, dim: Dims = None, keepdim: bool = False) -> Value:
    """Reduce extrema over ranks; equal elements share the gradient."""
    dims, name = nonnegative_dims(x, dim), str(lowering.target)
    is_minimum = "min" in name
    if not x.dtype.is_floating_point:
        return _integer_extremum(lowering, x, dims, keepdim, is_minimum)
    return _extremum(
        lowering, x, dims, keepdim, is_minimum, nan_shares_gradient=name in ("aten.max.default", "aten.min.default")
    )


def _extremum(
    lowering: Lowering, x: Value, dims: list[int], keepdim: bool, is_minimum: bool, nan_shares_gradient: bool
) -> Value:
    """Return the minimum or maximum; equal elements share the gradient, NaN only if `nan_shares_gradient`."""
    greatest = _global_maximum(lowering, lambda a: -a if is_minimum else a, x, dims)
    aligned_greatest = lowering.sum_gradient(greatest, x.axes)

    def is_extremum(a: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        equal = (-a if is_minimum else a) == m
        return (equal | (a.isnan() & m.isnan()) if nan_shares_gradient else equal).to(a.dtype)

    mask = lowering.without_gradient(lowering.local(is_extremum, [x, aligned_greatest], x.layout))
    count = lowering.sum_gradient(total(lowering, mask, dims), x.axes)
    gradient_share = lowering.local(lambda m, n: (m / n).to(m.dtype), [mask, count], x.layout)
    extremum = _sum_with_derivative(lowering, greatest, x, gradient_share, dims, lambda m: -m if is_minimum else m)
    return lowering.reshape_local(extremum, layout_after_reduction(x, dims, keepdim))


class _ZerosWithDerivative(torch.autograd.Function):
    """Zeros of the shape of x.sum(dims, True), with a given derivative with respect to x, finite or not."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, derivative: torch.Tensor, dims: list[int]) -> torch.Tensor:
        ctx.save_for_backward(derivative)
        return x.new_zeros([1 if at in dims else n for at, n in enumerate(x.shape)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * ctx.saved_tensors[0].conj(), None, None


def _sum_with_derivative(
    lowering: Lowering, value: Value, x: Value, derivative: Value, dims: list[int], run: Callable[..., torch.Tensor]
) -> Value:
    """Return run(value), with a given derivative with respect to the elements of x that each result depends on."""
    zeros = sum_over_dims(lowering, lambda a, d, dims, _: _ZerosWithDerivative.apply(a, d, dims), [x, derivative], dims)
    return lowering.local(lambda v, z: run(v) + z, [value, zeros], zeros.layout)


def _global_maximum(
    lowering: Lowering, run: Callable[..., torch.Tensor], x: Value, dims: list[int], dtype: torch.dtype | None = None
) -> Value:
    """Return the maximum of run(x), without a gradient, over dimensions, which are kept with size 1."""

    def local_maximum(a: torch.Tensor) -> torch.Tensor:
        a = run(a.detach())
        if a.numel():
            return a.amax(dims, True)
        lowest = -torch.inf if a.is_floating_point() else torch.iinfo(a.dtype).min
        return a.new_full([1 if d in dims else n for d, n in enumerate(a.shape)], lowest)

    layout = layout_after_reduction(x, dims, True)
    return lowering.allreduce_local_result(local_maximum, [x], axes_of_dims(x, dims), layout, dtype, op="max")


def _integer_extremum(lowering: Lowering, x: Value, dims: list[int], keepdim: bool, is_minimum: bool) -> Value:
    """Return the minimum or maximum of integers, which has no gradient."""
    dtype, sign = x.dtype, -1 if is_minimum else 1
    greatest = _global_maximum(lowering, lambda a: a.to(torch.int64) * sign, x, dims, torch.int64)
    extremum = lowering.local(lambda a: (a * sign).to(dtype), [greatest], greatest.layout, dtype)
    return lowering.reshape_local(extremum, layout_after_reduction(x, dims, keepdim))


@rule("aten.softmax.int", "aten._softmax.default", "aten.log_softmax.int", "aten._log_softmax.default",
      "aten._safe_softmax.default")  # fmt: skip
def softmax(
    lowering: Lowering, x: Value, dim: int, dtype: torch.dtype | None = None, half_to_float: bool = False
) -> Value:
    """Compute locally; along a partitioned dimension, reduce maximum and sum over ranks."""
    dims, name = nonnegative_dims(x, dim), str(lowering.target)
    is_log, is_safe = "log" in name, "safe" in name  # is_safe: zeros where all scores are -inf
    x = x if dtype is None else lowering.convert_dtype(x, dtype)
    if not axes_of_dims(x, dims):
        run = torch.ops.aten._safe_softmax if is_safe else torch.log_softmax if is_log else torch.softmax
        return lowering.local(lambda a: run(a, dims[0]), [x], x.layout)
    out_dtype, x = x.dtype, lowering.widen(x)
    greatest = _global_maximum(lowering, lambda a: a.clamp(min=torch.finfo(a.dtype).min), x, dims)
    shifted = lowering.local(torch.sub, [x, greatest], x.layout)
    summed = sum_over_dims(lowering, lambda a, d, k: a.exp().sum(d, k), [shifted], dims)
    if is_safe:
        summed = lowering.local(lambda s: s.where(s != 0, 1), [summed], summed.layout)
    y = lowering.local(lambda a, s: a - s.log() if is_log else a.exp() / s, [shifted, summed], x.layout)
    return lowering.convert_dtype(y, out_dtype)


@rule("aten.cumsum.default")
def cumsum(lowering: Lowering, x: Value, dim: int, dtype: torch.dtype | None = None) -> Value:
    """Compute locally, and add the sums of the preceding tiles."""
    dim, out_dtype = dim % len(x.shape) if x.shape else 0, lowering.fake_out.dtype
    if lowering.is_whole(x, dim):
        return lowering.local(lambda a: a.cumsum(dim, dtype=dtype), [x], x.layout, out_dtype)
    if len(x.layout[dim]) > 1:
        return operator_along_dims(lowering, x, dim)
    axis = lowering.axis_of(x, dim)
    assert axis is not None
    part_at = itemgetter(axis)
    num_parts = lowering.mesh.parts[axis]

    def sums_for_later_parts(part: int, a: torch.Tensor) -> torch.Tensor:
        """Return this part's sum for each later part."""
        is_later = torch.arange(num_parts, device=a.device) > part
        return a.sum(dim, dtype=dtype).unsqueeze(-1).where(is_later, 0)

    layout = (*x.layout[:dim], *x.layout[dim + 1 :], (Atom(num_parts),))
    preceding_sums = lowering.allreduce_local_result(sums_for_later_parts, [x], [axis], layout, out_dtype, at=part_at)

    def add_previous_parts(part: int, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a.cumsum(dim, dtype=dtype) + b.select(-1, part).unsqueeze(dim)

    return lowering.local(add_previous_parts, [x, preceding_sums], x.layout, out_dtype, at=part_at)


@rule("aten.prod.default", "aten.prod.dim_int")
def product(
    lowering: Lowering, x: Value, dim: int | None = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> Value:
    """Multiply locally, and multiply the products of all tiles; derivatives are computed as in PyTorch."""
    dims, out_dtype = nonnegative_dims(x, dim), lowering.fake_out.dtype
    x = lowering.convert_dtype(x, out_dtype)
    axes = sorted(axes_of_dims(x, dims))
    parts = [lowering.mesh.parts[axis] for axis in axes]
    num_parts = prod(parts)

    def part_number(place: Any) -> int:
        return index_of(parts, [place[axis] for axis in axes])

    def products_by_part(part: int, a: torch.Tensor) -> torch.Tensor:
        """Return this part's product in its element of a new last dimension."""
        a = a.detach()
        for d in dims:
            a = a.prod(d, keepdim=True)
        return a.unsqueeze(-1).where(torch.arange(num_parts, device=a.device) == part, 0)

    def derivative(part: int, a: torch.Tensor, products: torch.Tensor, num_zeros: torch.Tensor) -> torch.Tensor:
        """Return the product divided by each element, or, if there are zeros, the product of the other elements."""
        products_of_others = _products_of_others(a, dims) * _products_of_others(products, [-1])[..., part]
        if dim is None:
            products_of_others = products_of_others.where(num_zeros < 2, 0)
        return products_of_others.where(num_zeros > 0, products.prod(-1) / a)

    layout = (*layout_after_reduction(x, dims, True), (Atom(num_parts),))
    products = lowering.allreduce_local_result(products_by_part, [x], axes, layout, out_dtype, at=part_number)
    num_zeros = lowering.allreduce_local_result(lambda a: (a == 0).sum(), [x], x.axes, (), torch.int64)
    lowering.mark_constants([products, num_zeros], [False, False])
    operands = [lowering.sum_gradient(value, x.axes) for value in (products, num_zeros)]
    derivatives = lowering.without_gradient(lowering.local(derivative, [x, *operands], x.layout, at=part_number))
    result = _sum_with_derivative(lowering, products, x, derivatives, dims, lambda p: p.prod(-1))
    return lowering.reshape_local(result, layout_after_reduction(x, dims, keepdim))


def _products_of_others(a: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """Return, for each element, the product of all other elements along dimensions."""
    a = a.detach()
    flat = a.movedim(list(dims), list(range(-len(dims), 0)))
    lines = flat.flatten(-len(dims))
    ones = torch.ones_like(lines[..., :1])
    products_before = torch.cat([ones, lines[..., :-1]], -1).cumprod(-1)
    products_after = torch.cat([ones, lines.flip(-1)[..., :-1]], -1).cumprod(-1).flip(-1)
    return (products_before * products_after).reshape(flat.shape).movedim(list(range(-len(dims), 0)), list(dims))


@rule("aten.renorm.default")
def renorm(lowering: Lowering, x: Value, p: float, dim: int, maxnorm: float) -> Value:
    """Decompose for slices whose norm exceeds maxnorm only; for others, the decomposition's gradient may be NaN."""
    decomposition = decomposition_table[torch.ops.aten.renorm.default]
    other_dims = [d for d in range(len(x.shape)) if d != dim % len(x.shape)]

    def run(a: torch.Tensor) -> torch.Tensor:
        dtype = torch.promote_types(a.dtype, torch.float32)
        is_larger = torch.linalg.vector_norm(a.detach(), p, other_dims, keepdim=True, dtype=dtype) > maxnorm
        return torch.where(is_larger, decomposition(a.where(is_larger, 0), p, dim, maxnorm), a)

    return lowering.trace_and_lower([x], run)


@rule("aten.histc.default")
def histogram(lowering: Lowering, x: Value, bins: int = 100, min: float = 0, max: float = 0) -> Value:
    """Add the counts of all tiles."""
    if min == max:
        lowering.refuse("its range would depend on the values; pass min and max")
    run = lambda a: torch.histc(a.detach(), bins, min, max)  # noqa: E731
    return lowering.without_gradient(lowering.allreduce_local_result(run, [x], axes_of(x.layout), ((Atom(bins),),)))


@rule("aten.median.default", "aten.nanmedian.default", "aten.nanmedian.dim", "aten.mode.default",
      "aten.quantile.scalar", "aten.nanquantile.scalar", "aten.quantile.default",
      "aten.nanquantile.default")  # fmt: skip
def order_statistic(
    lowering: Lowering, x: Value, dim: Dims = None, keepdim: bool = False, q: Value | float | None = None,
    interpolation: str = "linear", **_: object,
) -> Value | tuple[Value, ...]:  # fmt: skip
    """Gather the reduced dimensions."""
    dims = nonnegative_dims(x, dim)
    values, run = lowering.values_and_function()
    args = [lowering.gather(x, dims), *(lowering.gather(value) for value in values[1:])]
    if interpolation != "linear":  # there is no gradient with respect to q
        args[1:] = map(lowering.detach, args[1:])
    layout = layout_after_reduction(args[0], dims, keepdim)
    if isinstance(q, Value) and q.shape:
        layout = ((Atom(q.shape[0]),), *layout)
    return lowering.local_call(run, args, [layout for _ in pytree.tree_leaves(lowering.fake_out)])


@rule("aten.cumprod.default", "aten.cummax.default", "aten.cummin.default", "aten.logcumsumexp.default",
      "aten.argmax.default", "aten.argmin.default", "aten.topk.default", "aten.sort.default", "aten.sort.stable",
      "aten.max.dim", "aten.min.dim", "aten.glu.default", "aten.any.dim", "aten.all.dim", "aten.logsumexp.default",
      "aten.median.dim", "aten.kthvalue.default", "aten.argsort.default", "aten.normalize.default")  # fmt: skip
def operator_along_dims(lowering: Lowering, x: Value, dim: Dims = None, **_: object) -> Value | tuple[Value, ...]:
    """Compute locally along unpartitioned dimensions; otherwise decompose, or gather the dimension."""
    (values, run), dims, original_layout = lowering.values_and_function(), nonnegative_dims(x, dim), None
    if len(values) > 1:
        lowering.refuse("an argument other than the input is a tensor")
    if any(not lowering.is_whole(x, d) for d in dims):
        with contextlib.suppress(UnsupportedOperator):
            decomposed = lowering.decompose()
            if decomposed is not None:
                return decomposed
        original_layout, x = x.layout, lowering.gather(x, dims)
    layouts = []
    for out in pytree.tree_leaves(lowering.fake_out):
        if len(out.shape) == len(x.shape):
            layouts.append(tuple((Atom(out.shape[at]),) if at in dims else dim for at, dim in enumerate(x.layout)))
        else:
            layouts.append(layout_after_reduction(x, dims, False))
    result = lowering.local_call(run, [x], layouts)
    if original_layout is not None and isinstance(result, Value) and result.shape == shape_of(original_layout):
        return lowering.partition_as(result, original_layout)
    return result
