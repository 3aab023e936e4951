"""Linear algebra of small matrices, and diagonals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..ir.graph import Value
from ..ir.layout import Layout, axes_of, shape_of, whole, whole_along
from ..ir.registry import rule
from ..lowering.lower import Lowering

_VECTORS = ("pivots", "LU_pivots", "tau")
_NUMBERS = ("atol", "rtol", "tol")


@rule("aten.cholesky.default", "aten.linalg_cholesky.default", "aten.linalg_cholesky_ex.default",
      "aten.cholesky_inverse.default", "aten.cholesky_solve.default", "aten.inverse.default",
      "aten.linalg_inv.default", "aten.linalg_inv_ex.default", "aten.pinverse.default", "aten.linalg_pinv.default",
      "aten.linalg_pinv.atol_rtol_tensor", "aten.linalg_pinv.atol_rtol_float", "aten.linalg_pinv.rcond_tensor",
      "aten.det.default", "aten.linalg_det.default", "aten._linalg_det.default", "aten.logdet.default",
      "aten.slogdet.default", "aten.linalg_slogdet.default", "aten._linalg_slogdet.default",
      "aten.linalg_solve.default", "aten.linalg_solve_ex.default", "aten._linalg_solve_ex.default",
      "aten.linalg_solve_triangular.default", "aten.triangular_solve.default", "aten.linalg_eigh.default",
      "aten._linalg_eigh.default", "aten.linalg_eigvalsh.default", "aten.linalg_qr.default", "aten.qr.default",
      "aten.linalg_svd.default", "aten._linalg_svd.default", "aten.svd.default", "aten.linalg_svdvals.default",
      "aten.linalg_matrix_exp.default", "aten.matrix_exp.default", "aten.linalg_matrix_power.default",
      "aten.matrix_power.default", "aten.linalg_lu.default", "aten.linalg_lu_factor.default",
      "aten.linalg_lu_factor_ex.default", "aten.linalg_lu_solve.default", "aten.lu_unpack.default",
      "aten.linalg_householder_product.default", "aten.linalg_cond.default", "aten.linalg_cond.p_str",
      "aten.linalg_matrix_rank.default", "aten.linalg_matrix_rank.atol_rtol_tensor",
      "aten.linalg_matrix_rank.atol_rtol_float", "aten.linalg_matrix_rank.tol_tensor")  # fmt: skip
def matrices(lowering: Lowering, **given: Any) -> Any:
    """Redistribution: each matrix is gathered, and the batch is partitioned instead."""
    values, run = lowering.tensors()
    names = {value.id: name for name, value in given.items() if value in values}
    ranks = [_rank(names[value.id], value, values[0]) for value in values]
    batch = lowering.common([value.layout[: len(value.shape) - n] for value, n in zip(values, ranks, strict=True)])
    there = _turned(lowering, batch, values[0].layout[len(values[0].shape) - ranks[0] :])
    args = []
    for value, n in zip(values, ranks, strict=True):
        before = len(value.shape) - n
        layout = (*there[len(there) - before :], *whole(value.shape[before:]))
        args.append(lowering.seen_as(value, layout, axes_of(there)))
    several = isinstance(lowering.out, (tuple, list))
    outs = list(lowering.out) if several else [lowering.out]
    real = [tuple(out.shape[: len(batch)]) == shape_of(batch) for out in outs]  # others are not asked for, and empty

    def kept(*tensors: torch.Tensor) -> list[torch.Tensor]:
        made = run(*tensors) if several else [run(*tensors)]
        return [each for each, asked in zip(made, real, strict=True) if asked]

    asked = [out for out, one in zip(outs, real, strict=True) if one]
    results = lowering.locals(kept, args, asked, [(*there, *whole(out.shape[len(batch) :])) for out in asked])
    if "linalg_lu.default" in str(lowering.target):
        results[0].kind = "constant"  # an order of rows
    waiting = [lowering.cut_as(made, _back(lowering, batch, values[0], made.shape)) for made in reversed(results)]
    outputs = tuple(waiting.pop() if one else None for one in real)
    return outputs if several else outputs[0]


def _rank(name: str, value: Any, first: Any) -> int:
    """Return the number of dimensions of one matrix, vector or number of a batched argument."""
    if name in _NUMBERS or name == "rcond":
        return 0
    return 1 if name in _VECTORS or (name == "B" and value.shape == first.shape[:-1]) else 2


def _turned(lowering: Lowering, batch: Layout, core: Layout) -> Layout:
    """Return a layout of the batch in which each matrix is whole."""
    full = (*batch, *(dim if not axes_of([dim]) & axes_of(batch) else whole_along((dim,), (0,))[0] for dim in core))
    turned: Layout = lowering.reshard_away_from(full, range(len(batch), len(full)))
    return turned[: len(batch)]


def _back(lowering: Lowering, batch: Layout, first: Value, shape: Sequence[int]) -> Layout:
    """Return the layout of results: image-like ones as the argument's, others partitioned along the batch."""
    core = whole(shape[len(batch) :])
    if tuple(shape) == first.shape and not axes_of(first.layout[len(batch) :]) & axes_of(batch):
        core = first.layout[len(batch) :]
    return (*batch, *core)


@rule("aten.diagonal.default", "aten.diagonal_copy.default")
def diagonal(lowering: Lowering, x: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    """Redistribution: the two dimensions are gathered."""
    dims = {dim1 % len(x.shape), dim2 % len(x.shape)}
    (there,), back = lowering.co_align([x], dims)
    last = whole(lowering.out.shape[-1:])
    here, target = ((*(dim for at, dim in enumerate(cut) if at not in dims), *last) for cut in (there.layout, back))
    run = lambda a: a.diagonal(offset, dim1, dim2)  # noqa: E731
    return lowering.cut_as(lowering.local(run, [there], here), target)


@rule("aten.diagonal_scatter.default", always=True)
def diagonal_scatter(lowering: Lowering, x: Value, src: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    """Redistribution: the two dimensions are gathered, and partitioned again afterwards."""
    dims = {dim1 % len(x.shape), dim2 % len(x.shape)}
    (there,), back = lowering.co_align([x], dims)
    layout = (*(dim for at, dim in enumerate(there.layout) if at not in dims), *whole(src.shape[-1:]))

    def run(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        copy = a.clone()
        copy.diagonal(offset, dim1, dim2).copy_(b)
        return copy

    args = [there, lowering.seen_as(src, layout, axes_of(layout))]
    return lowering.cut_as(lowering.local(run, args, there.layout), back)


@rule("aten.diag_embed.default")
def diag_embed(lowering: Lowering, x: Value, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Any:
    """Redistribution: the last dimension is gathered, and becomes two."""
    dims = {dim1 % (len(x.shape) + 1), dim2 % (len(x.shape) + 1)}
    (there,), back = lowering.co_align([x], [len(x.shape) - 1])
    new = whole(lowering.out.shape)

    def layout(cut: Layout) -> Layout:
        rest = iter(cut[:-1])
        return tuple(dim if at in dims else next(rest) for at, dim in enumerate(new))

    run = lambda a: a.diag_embed(offset, dim1, dim2)  # noqa: E731
    return lowering.cut_as(lowering.local(run, [there], layout(there.layout)), layout(back))


@rule("aten.trace.default")
def trace(lowering: Lowering, x: Value) -> Any:
    """Reduction: sum of the diagonal."""
    return lowering.traced([x], lambda a: a.diagonal().sum())


@rule("aten.addbmm.default")
def addbmm(lowering: Lowering, x: Value, batch1: Value, batch2: Value, beta: Any = 1, alpha: Any = 1) -> Any:
    """Products summed over the batch, by simpler operators."""
    return lowering.traced([x, batch1, batch2], lambda a, b, c: beta * a + alpha * (b @ c).sum(0))
