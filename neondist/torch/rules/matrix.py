"""Linear algebra of small matrices, and diagonals."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import prod

import torch

from ..ir.graph import Value
from ..ir.layout import Atom, Layout, axes_of, replicated, shape_of, whole_if_partitioned_along
from ..ir.registry import CAPTURE_REPLACEMENTS, rule
from ..lowering.lowering import Lowering

_VECTOR_ARGUMENTS = ("pivots", "LU_pivots", "tau")
_SCALAR_ARGUMENTS = ("atol", "rtol", "tol")


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
def batched_matrix_operator(lowering: Lowering, **arguments: object) -> Value | tuple[Value | None, ...] | None:
    """Gather each matrix, and partition the batch instead."""
    values, run = lowering.values_and_function()
    name_by_value_id = {value.id: name for name, value in arguments.items() if isinstance(value, Value)}
    ndims = [_matrix_ndim(name_by_value_id[value.id], value, values[0]) for value in values]
    values_and_ndims = list(zip(values, ndims, strict=True))
    batch = lowering.pointwise_layout([value.layout[: len(value.shape) - n] for value, n in values_and_ndims])
    resharded_batch = _reshard_matrices_into_batch(lowering, batch, values[0].layout[len(values[0].shape) - ndims[0] :])
    args = []
    for value, n in values_and_ndims:
        batch_ndim = len(value.shape) - n
        layout = (*resharded_batch[len(resharded_batch) - batch_ndim :], *replicated(value.shape[batch_ndim:]))
        args.append(lowering.gather_as(value, layout, axes_of(resharded_batch)))
    returns_tuple = isinstance(lowering.fake_out, (tuple, list))
    fake_outs = list(lowering.fake_out) if returns_tuple else [lowering.fake_out]
    is_nonempty = [tuple(out.shape[: len(batch)]) == shape_of(batch) for out in fake_outs]  # other results are empty

    def run_and_drop_empty_outputs(*tensors: torch.Tensor) -> list[torch.Tensor]:
        all_outputs = run(*tensors) if returns_tuple else [run(*tensors)]
        return [out for out, nonempty in zip(all_outputs, is_nonempty, strict=True) if nonempty]

    nonempty_fake_outs = [out for out, nonempty in zip(fake_outs, is_nonempty, strict=True) if nonempty]
    results = lowering.local_results(
        run_and_drop_empty_outputs,
        args,
        nonempty_fake_outs,
        [(*resharded_batch, *replicated(out.shape[len(batch) :])) for out in nonempty_fake_outs],
    )
    if "linalg_lu.default" in str(lowering.target):
        results[0].kind = "constant"  # a permutation of rows, which has no gradient
    pending = [lowering.partition_as(y, _result_layout(lowering, batch, values[0], y.shape)) for y in reversed(results)]
    outputs = tuple(pending.pop() if nonempty else None for nonempty in is_nonempty)
    return outputs if returns_tuple else outputs[0]


def _matrix_ndim(name: str, value: Value, first_argument: Value) -> int:
    """Return the number of dimensions of one matrix, vector or number of a batched argument."""
    if name in _SCALAR_ARGUMENTS or name == "rcond":
        return 0
    return 1 if name in _VECTOR_ARGUMENTS or (name == "B" and value.shape == first_argument.shape[:-1]) else 2


def _reshard_matrices_into_batch(lowering: Lowering, batch: Layout, matrix_dims: Layout) -> Layout:
    """Return a layout of the batch in which each matrix is whole."""
    layout = (*batch, *(whole_if_partitioned_along(dim, axes_of(batch)) for dim in matrix_dims))
    resharded: Layout = lowering.reshard_away_from(layout, range(len(batch), len(layout)))
    return resharded[: len(batch)]


def _result_layout(lowering: Lowering, batch: Layout, first_argument: Value, shape: Sequence[int]) -> Layout:
    """Return the layout of a result: partitioned like the argument if of the same shape, else along the batch."""
    matrix_dims = replicated(shape[len(batch) :])
    if tuple(shape) == first_argument.shape and not axes_of(first_argument.layout[len(batch) :]) & axes_of(batch):
        matrix_dims = first_argument.layout[len(batch) :]
    return (*batch, *matrix_dims)


@rule("aten.diagonal.default", "aten.diagonal_copy.default")
def diagonal(lowering: Lowering, x: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Value:
    """Gather the two dimensions."""
    dims = {dim1 % len(x.shape), dim2 % len(x.shape)}
    (x,), final_layout = lowering.co_align([x], dims)
    extent = lowering.fake_out.shape[-1]
    layout, result_layout = (_diagonal_layout(old, dims, extent) for old in (x.layout, final_layout))
    run = lambda a: a.diagonal(offset, dim1, dim2)  # noqa: E731
    return lowering.partition_as(lowering.local(run, [x], layout), result_layout)


@rule("aten.diagonal_scatter.default", applies_if_replicated=True)
def diagonal_scatter(lowering: Lowering, x: Value, src: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Value:
    """Gather the two dimensions, and partition them again afterwards."""
    dims = {dim1 % len(x.shape), dim2 % len(x.shape)}
    (x,), final_layout = lowering.co_align([x], dims)
    src_layout = _diagonal_layout(x.layout, dims, src.shape[-1])

    def run(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        copy = a.clone()
        copy.diagonal(offset, dim1, dim2).copy_(b)
        return copy

    args = [x, lowering.gather_as(src, src_layout, axes_of(src_layout))]
    return lowering.partition_as(lowering.local(run, args, x.layout), final_layout)


def _diagonal_layout(layout: Layout, dims: Collection[int], extent: int) -> Layout:
    """Return the layout of the diagonals along two whole dimensions, which become the last dimension."""
    return (*(dim for at, dim in enumerate(layout) if at not in dims), (Atom(extent),))


@rule("aten.diag_embed.default")
def diag_embed(lowering: Lowering, x: Value, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Value:
    """Gather the last dimension, which becomes two."""
    dims = {dim1 % (len(x.shape) + 1), dim2 % (len(x.shape) + 1)}
    (x,), final_layout = lowering.co_align([x], [len(x.shape) - 1])
    whole_dims = replicated(lowering.fake_out.shape)

    def insert_new_dims(layout: Layout) -> Layout:
        other_dims = iter(layout[:-1])
        return tuple(dim if at in dims else next(other_dims) for at, dim in enumerate(whole_dims))

    run = lambda a: a.diag_embed(offset, dim1, dim2)  # noqa: E731
    return lowering.partition_as(lowering.local(run, [x], insert_new_dims(x.layout)), insert_new_dims(final_layout))


@rule("aten.trace.default")
def trace(lowering: Lowering, x: Value) -> Value:
    """Sum the diagonal over all tiles."""
    return lowering.trace_and_lower([x], lambda a: a.diagonal().sum())


@rule("aten.addbmm.default")
def addbmm(lowering: Lowering, x: Value, batch1: Value, batch2: Value, beta: float = 1, alpha: float = 1) -> Value:
    """Sum products over the batch, by simpler operators."""
    return lowering.trace_and_lower([x, batch1, batch2], lambda a, b, c: beta * a + alpha * (b @ c).sum(0))


def traceable_covariance(
    input: torch.Tensor, *, correction: int = 1, fweights: torch.Tensor | None = None,
    aweights: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return torch.cov; PyTorch's own implementation reads values."""
    rows = input if input.dim() == 2 else input.reshape(1, -1)
    given_weights = [weights for weights in (fweights, aweights) if weights is not None]
    weights = prod(given_weights, start=torch.ones_like(rows[0].abs()))
    total_weight = weights.sum()
    correction_scale = 1 if aweights is None else (weights * aweights).sum() / total_weight
    deviations = rows - (rows * weights).sum(1, keepdim=True) / total_weight
    products = deviations @ (deviations * weights).mT.conj()
    return (products / (total_weight - correction * correction_scale).clamp(min=0)).squeeze()


def traceable_correlation(input: torch.Tensor) -> torch.Tensor:
    """Return torch.corrcoef; PyTorch's own implementation reads values."""
    covariance = traceable_covariance(input)
    if not covariance.dim():
        return covariance / covariance
    standard_deviations = covariance.diagonal().real.sqrt()
    correlation = covariance / standard_deviations.unsqueeze(-1) / standard_deviations
    if correlation.is_complex():
        return torch.complex(correlation.real.clip(-1, 1), correlation.imag.clip(-1, 1))
    return correlation.clip(-1, 1)


CAPTURE_REPLACEMENTS.update({
    torch.cov: traceable_covariance, torch.Tensor.cov: traceable_covariance,
    torch.corrcoef: traceable_correlation, torch.Tensor.corrcoef: traceable_correlation,
})  # fmt: skip
