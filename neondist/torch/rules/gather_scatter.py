"""Indexing by the values of tensors: gather, scatter, embedding."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import combinations, combinations_with_replacement
from math import prod

import torch
import torch.nn.functional as F

from ...geometry import Atom
from ..ir.graph import Value
from ..ir.layout import axes_of, replace_dim, replicated, whole_if_partitioned_along
from ..ir.registry import CAPTURE_REPLACEMENTS, rule
from ..lowering.lowering import Lowering
from .index import indexed_layout, slice_dim


@rule("aten.gather.default")
def gather(lowering: Lowering, x: Value, dim: int, index: Value, sparse_grad: bool = False) -> Value:
    """Gather the indexed dimension for the indices of each rank."""
    dim %= len(x.shape)
    x = _crop_other_dims(lowering, x, dim, index.shape)
    other_dims = lowering.pointwise_layout([replace_dim(value.layout, dim, Atom(1)) for value in (index, x)])
    layout = replace_dim(other_dims, dim, *whole_if_partitioned_along(index.layout[dim], axes_of(other_dims)))
    gathered = lowering.gather_as(x, replace_dim(other_dims, dim, Atom(x.shape[dim])), axes_of(layout))
    return lowering.local(lambda a, i: a.gather(dim, i), [gathered, lowering.partition_as(index, layout)], layout)


def _crop_other_dims(lowering: Lowering, x: Value, dim: int, shape: Sequence[int]) -> Value:
    """Return x cropped to `shape` along all dimensions but one."""
    for at, n in enumerate(shape):
        if at != dim and x.shape[at] != n:
            x = slice_dim(lowering, x, at, 0, n)
    return x


@rule("aten.take.default")
def take(lowering: Lowering, x: Value, index: Value) -> Value:
    """Gather the whole tensor for the indices of each rank."""
    flat = lowering.reshape(x, (prod(x.shape),))
    gathered = lowering.gather_as(flat, replicated(flat.shape), axes_of(index.layout))
    return lowering.local(torch.take, [gathered, index], index.layout)


@rule("aten.embedding.default")
def embedding(
    lowering: Lowering, weight: Value, indices: Value, padding_idx: int = -1, scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Value:  # fmt: skip
    """Select rows of a replicated table locally."""
    if scale_grad_by_freq:
        lowering.refuse("scale_grad_by_freq needs the number of times each row is selected on all ranks")
    table = lowering.gather(weight)
    padding = padding_idx if padding_idx >= 0 else None
    layout = (*indices.layout, *replicated(weight.shape[1:]))
    return lowering.local(lambda w, i: F.embedding(i, w, padding), [table, indices], layout, weight.dtype)


def traceable_embedding_bag(
    input: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor | None = None, max_norm: float | None = None,
    norm_type: float = 2.0, scale_grad_by_freq: bool = False, mode: str = "mean", sparse: bool = False,
    per_sample_weights: torch.Tensor | None = None, include_last_offset: bool = False, padding_idx: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return torch.nn.functional.embedding_bag, by embeddings and reductions where the arguments permit."""
    if (
        (input.dim() == 2) != (offsets is None) or max_norm is not None or scale_grad_by_freq
        or mode not in ("sum", "mean", "max") or (per_sample_weights is not None and mode != "sum")
        or (offsets is not None and mode == "max")
    ):  # fmt: skip
        return F.embedding_bag(
            input, weight, offsets, max_norm, norm_type, scale_grad_by_freq, mode, sparse, per_sample_weights,
            include_last_offset, padding_idx,
        )  # fmt: skip
    rows = F.embedding(input, weight, padding_idx)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    if offsets is not None:
        is_used = torch.ones_like(input) if padding_idx is None else (input != padding_idx % len(weight)).long()
        positions = torch.arange(len(input), dtype=offsets.dtype, device=offsets.device)
        bag_ids = torch.searchsorted(offsets, positions, right=True) - 1
        bag_sums = rows.new_zeros(len(offsets), weight.shape[1]).index_add(0, bag_ids, rows * is_used.unsqueeze(-1))
        bag_sizes = is_used.new_zeros(len(offsets)).index_add(0, bag_ids, is_used).unsqueeze(-1)
        if include_last_offset:
            bag_sums, bag_sizes = bag_sums[:-1], bag_sizes[:-1]
        return bag_sums if mode == "sum" else bag_sums / bag_sizes.clamp(min=1)
    if padding_idx is None:
        return rows.sum(1) if mode == "sum" else rows.mean(1) if mode == "mean" else rows.max(1).values
    is_used = (input != padding_idx % len(weight)).unsqueeze(-1)
    if mode == "max":
        return rows.where(is_used, -torch.inf).max(1).values.where(is_used.any(1), 0)
    bag_sums = rows.where(is_used, 0).sum(1)
    return bag_sums if mode == "sum" else bag_sums / is_used.sum(1).clamp(min=1)


CAPTURE_REPLACEMENTS[F.embedding_bag] = traceable_embedding_bag


def traceable_fill_diagonal(x: torch.Tensor, fill_value: float, wrap: bool = False) -> torch.Tensor:
    """Fill the diagonal of a matrix in place, without memory offsets."""
    if x.dim() != 2 or wrap:
        return x.fill_diagonal_(fill_value, wrap)
    x.diagonal().fill_(fill_value)
    return x


CAPTURE_REPLACEMENTS[torch.Tensor.fill_diagonal_] = traceable_fill_diagonal


def traceable_combinations(input: torch.Tensor, r: int = 2, with_replacement: bool = False) -> torch.Tensor:
    """Return torch.combinations, computed by indexing with constants."""
    choose = combinations_with_replacement if with_replacement else combinations
    return input[torch.tensor(list(choose(range(len(input)), r)), dtype=torch.int64).reshape(-1, r)]


CAPTURE_REPLACEMENTS[torch.combinations] = traceable_combinations


@rule("aten.grid_sampler.default", "aten.grid_sampler_2d.default", "aten.grid_sampler_3d.default")
def grid_sampler(lowering: Lowering, x: Value, grid: Value, **options: object) -> Value:
    """Gather images for the sampling points of each rank."""
    n, (batch_dim,) = len(x.shape) - 2, lowering.pointwise_layout([x.layout[:1], grid.layout[:1]])
    grid_dims = tuple(whole_if_partitioned_along(dim, axes_of([batch_dim])) for dim in grid.layout[1:-1])
    layout = (batch_dim, *replicated(x.shape[1:2]), *grid_dims)
    gathered = lowering.gather_as(x, (batch_dim, *replicated(x.shape[1:])), axes_of(layout))
    local_grid = lowering.partition_as(grid, (batch_dim, *grid_dims, *replicated([n])))
    target, extra_args = lowering.target, list(options.values())
    return lowering.local(lambda a, g: target(a, g, *extra_args), [gathered, local_grid], layout)


@rule("aten.scatter.src", "aten.scatter.value", "aten.scatter.reduce", "aten.scatter.value_reduce",
      "aten.scatter_add.default", "aten.scatter_reduce.two")  # fmt: skip
def scatter(
    lowering: Lowering, x: Value, dim: int, index: Value, src: Value | None = None, value: float | None = None,
    **options: object,
) -> Value:  # fmt: skip
    """Gather the indexed dimension, and partition it again afterwards."""
    dim %= len(x.shape)
    if src is not None:
        src = _crop_other_dims(lowering, src, -1, index.shape)
    unequal_dims = [at for at, n in enumerate(index.shape) if n != x.shape[at]]
    tensors = [v for v in (x, index, src) if v is not None]
    (x, *other_args), final_layout = lowering.co_align(tensors, {dim, *unequal_dims})
    target = partial(lowering.target, **options)

    def run(a: torch.Tensor, i: torch.Tensor, s: torch.Tensor | float | None = value) -> torch.Tensor:
        return target(a, dim, i, s)

    return lowering.partition_as(lowering.local(run, [x, *other_args], x.layout), final_layout)


@rule("aten.index_add.default", "aten.index_copy.default", "aten.index_reduce.default", "aten.index_fill.int_Scalar",
      "aten.index_fill.int_Tensor")  # fmt: skip
def index_update(
    lowering: Lowering, x: Value, dim: int, index: Value, source: Value | None = None,
    value: Value | float | None = None, reduce: str = "", **options: object,
) -> Value:  # fmt: skip
    """Gather the indexed dimension, and partition it again afterwards; replicate the index tensor."""
    dim %= len(x.shape)
    (x, *other_args), final_layout = lowering.co_align([v for v in (x, source) if v is not None], {dim})
    other_args += [value] if isinstance(value, Value) else []
    extra_args = ([] if value is None or isinstance(value, Value) else [value]) + ([reduce] if reduce else [])
    target = partial(lowering.target, **options)

    def run(a: torch.Tensor, i: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return target(a, dim, i, *rest, *extra_args)

    args = [x, lowering.gather(index), *other_args]
    return lowering.partition_as(lowering.local(run, args, x.layout), final_layout)


@rule("aten.index_put.default", "aten._unsafe_index_put.default")
def index_put(
    lowering: Lowering, x: Value, indices: Sequence[Value | None], values: Value, accumulate: bool = False, **_: object
) -> Value:
    """Gather the indexed dimensions, and partition them again afterwards; apply boolean masks locally."""
    index_by_dim = {dim: value for dim, value in enumerate(indices) if value is not None}
    if any(value.dtype == torch.bool for value in index_by_dim.values()):
        return _put_masked(lowering, x, index_by_dim, values, accumulate)
    indexed_dims = list(index_by_dim)
    (x,), final_layout = lowering.co_align([x], indexed_dims)
    gathered_indices, target = [lowering.gather(value) for value in index_by_dim.values()], lowering.target

    def run(a: torch.Tensor, v: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        tensor_by_dim = dict(zip(indexed_dims, tensors, strict=True))
        return target(a, [tensor_by_dim.get(dim) for dim in range(a.dim())], v, accumulate)

    args = [x, lowering.gather_as(values, indexed_layout(x.layout, index_by_dim), x.axes), *gathered_indices]
    return lowering.partition_as(lowering.local(run, args, x.layout), final_layout)


def _put_masked(lowering: Lowering, x: Value, index_by_dim: dict[int, Value], values: Value, accumulate: bool) -> Value:
    """Return x with one value per channel written, or added if `accumulate`, where a mask is true."""
    ((dim, mask), *other_indices) = index_by_dim.items()
    trailing_ndim = len(x.shape) - dim - len(mask.shape)
    shape = [1] * (dim + trailing_ndim + 1 - len(values.shape)) + list(values.shape)
    if other_indices or shape[dim] != 1:
        lowering.refuse("the assignment of values to cells depends on the values of a mask; use torch.where")
    mask = lowering.reshape(mask, (*[1] * dim, *mask.shape, *[1] * trailing_ndim))
    values = lowering.reshape(values, (*shape[:dim], *[1] * (len(x.shape) - dim - trailing_ndim), *shape[dim + 1 :]))
    args, layout = lowering.align_pointwise([x, mask, values])
    return lowering.local(lambda a, m, v: torch.where(m, a + v if accumulate else v, a), args, layout)


@rule("aten.masked_scatter.default")
def masked_scatter(lowering: Lowering, **_: object) -> None:
    """Reject the operator: the source of each cell depends on the values of the mask."""
    lowering.refuse("the assignment of values to cells depends on the values of the mask; use torch.where")


@rule("aten.searchsorted.Tensor", "aten.bucketize.Tensor")
def searchsorted(
    lowering: Lowering, x: Value, sorted_sequence: Value | None = None, boundaries: Value | None = None,
    sorter: Value | None = None, **options: object,
) -> Value:  # fmt: skip
    """Search locally in sorted rows, each of which is whole on every rank that searches it."""
    sequence = next(value for value in (boundaries, sorted_sequence) if value is not None)
    target, dtype, layout = lowering.target, lowering.fake_out.dtype, x.layout

    def run(a: torch.Tensor, s: torch.Tensor, *order: torch.Tensor) -> torch.Tensor:
        sorter_option = {"sorter": order[0]} if order else {}
        return target(a, s, **options) if boundaries is not None else target(s, a, **options, **sorter_option)

    rows = [value for value in (sequence, sorter) if value is not None]
    if len(sequence.shape) > 1:
        batch = lowering.pointwise_layout([layout[:-1], sequence.layout[:-1]])
        layout = (*batch, whole_if_partitioned_along(layout[-1], axes_of(batch)))
    row_layout = (*layout[: len(sequence.shape) - 1], (Atom(sequence.shape[-1]),))
    args = [lowering.partition_as(x, layout), *(lowering.gather_as(row, row_layout, axes_of(layout)) for row in rows)]
    return lowering.local(run, args, layout, dtype)
