"""Linear algebra of small matrices, and diagonals."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from ..ir.graph import Value
from ..ir.layout import Layout, axes_of, replicated, shape_of, whole_if_partitioned_along
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
    names = {value.id: name for name, value in arguments.items() if isinstance(value, Value)}
    ndims = [_matrix_ndim(names[value.id], value, values[0]) for value in values]
    values_and_ndims = list(zip(values, ndims, strict=True))
    batch = lowering.pointwise_layout([value.layout[: len(value.shape) - n] for value, n in values_and_ndims])
    there = _reshard_matrices_into_batch(lowering, batch, values[0].layout[len(values[0].shape) - ndims[0] :])
    args = []
    for value, n in values_and_ndims:
        before = len(value.shape) - n
        layout = (*there[len(there) - before :], *replicated(value.shape[before:]))
        args.append(lowering.gather_as(value, layout, axes_of(there)))
    returns_tuple = isinstance(lowering.fake_out, (tuple, list))
    outs = list(lowering.fake_out) if returns_tuple else [lowering.fake_out]
    is_nonempty = [tuple(out.shape[: len(batch)]) == shape_of(batch) for out in outs]  # other results are empty

    def run_and_drop_empty_outputs(*tensors: torch.Tensor) -> list[torch.Tensor]:
        all_outputs = run(*tensors) if returns_tuple else [run(*tensors)]
        return [each for each, wanted in zip(all_outputs, is_nonempty, strict=True) if wanted]

    nonempty_outs = [out for out, one in zip(outs, is_nonempty, strict=True) if one]
    results = lowering.local_results(
        run_and_drop_empty_outputs,
        args,
        nonempty_outs,
        [(*there, *replicated(out.shape[len(batch) :])) for out in nonempty_outs],
    )
    if "linalg_lu.default" in str(lowering.target):
        results[0].kind = "constant"  # a permutation of rows, which has no gradient
    waiting = [lowering.partition_as(y, _result_layout(lowering, batch, values[0], y.shape)) for y in reversed(results)]
    outputs = tuple(waiting.pop() if one else None for one in is_nonempty)
    return outputs if returns_tuple else outputs[0]


def _matrix_ndim(name: str, value: Value, first_argument: Value) -> int:
    """Return the number of dimensions of one matrix, vector or number of a batched argument."""
    if name in _SCALAR_ARGUMENTS or name == "rcond":
        return 0
    return 1 if name in _VECTOR_ARGUMENTS or (name == "B" and value.shape == first_argument.shape[:-1]) else 2


def _reshard_matrices_into_batch(lowering: Lowering, batch: Layout, core: Layout) -> Layout:
    """Return a layout of the batch in which each matrix is whole."""
    full = (*batch, *(whole_if_partitioned_along(dim, axes_of(batch)) for dim in core))
    turned: Layout = lowering.reshard_away_from(full, range(len(batch), len(full)))
    return turned[: len(batch)]


def _result_layout(lowering: Lowering, batch: Layout, first_argument: Value, shape: Sequence[int]) -> Layout:
    """Return the layout of a result: partitioned like the argument if of the same shape, else along the batch."""
    core = replicated(shape[len(batch) :])
    if tuple(shape) == first_argument.shape and not axes_of(first_argument.layout[len(batch) :]) & axes_of(batch):
        core = first_argument.layout[len(batch) :]
    return (*batch, *core)


@rule("aten.diagonal.default", "aten.diagonal_copy.default")
def diagonal(lowering: Lowering, x: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Value:
    """Gather the two dimensions."""
    dims = {dim1 % len(x.shape), dim2 % len(x.shape)}
    (there,), back = lowering.co_align([x], dims)
    last = replicated(lowering.fake_out.shape[-1:])
    here, target = ((*(dim for at, dim in enumerate(old) if at not in dims), *last) for old in (there.layout, back))
    run = lambda a: a.diagonal(offset, dim1, dim2)  # noqa: E731
    return lowering.partition_as(lowering.local(run, [there], here), target)


@rule("aten.diagonal_scatter.default", applies_if_replicated=True)
def diagonal_scatter(lowering: Lowering, x: Value, src: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Value:
    """Gather the two dimensions, and partition them again afterwards."""
    dims = {dim1 % len(x.shape), dim2 % len(x.shape)}
    (there,), back = lowering.co_align([x], dims)
    layout = (*(dim for at, dim in enumerate(there.layout) if at not in dims), *replicated(src.shape[-1:]))

    def run(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        copy = a.clone()
        copy.diagonal(offset, dim1, dim2).copy_(b)
        return copy

    args = [there, lowering.gather_as(src, layout, axes_of(layout))]
    return lowering.partition_as(lowering.local(run, args, there.layout), back)


@rule("aten.diag_embed.default")
def diag_embed(lowering: Lowering, x: Value, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Value:
    """Gather the last dimension, which becomes two."""
    dims = {dim1 % (len(x.shape) + 1), dim2 % (len(x.shape) + 1)}
    (there,), back = lowering.co_align([x], [len(x.shape) - 1])
    new = replicated(lowering.fake_out.shape)

    def with_new_dims(layout: Layout) -> Layout:
        rest = iter(layout[:-1])
        return tuple(dim if at in dims else next(rest) for at, dim in enumerate(new))

    run = lambda a: a.diag_embed(offset, dim1, dim2)  # noqa: E731
    return lowering.partition_as(lowering.local(run, [there], with_new_dims(there.layout)), with_new_dims(back))


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
    given = [weights for weights in (fweights, aweights) if weights is not None]
    weights = prod(given, start=torch.ones_like(rows[0].abs()))
    total = weights.sum()
    squares = 1 if aweights is None else (weights * aweights).sum() / total
    deviations = rows - (rows * weights).sum(1, keepdim=True) / total
    products = deviations @ (deviations * weights).mT.conj()
    return (products / (total - correction * squares).clamp(min=0)).squeeze()


def traceable_correlation(input: torch.Tensor) -> torch.Tensor:
    """Return torch.corrcoef; PyTorch's own implementation reads values."""
    covariance = traceable_covariance(input)
    if not covariance.dim():
        return covariance / covariance
    deviation = covariance.diagonal().real.sqrt()
    scaled = covariance / deviation.unsqueeze(-1) / deviation
    if scaled.is_complex():
        return torch.complex(scaled.real.clip(-1, 1), scaled.imag.clip(-1, 1))
    return scaled.clip(-1, 1)


CAPTURE_REPLACEMENTS.update({
    torch.cov: traceable_covariance, torch.Tensor.cov: traceable_covariance,
    torch.corrcoef: traceable_correlation, torch.Tensor.corrcoef: traceable_correlation,
})  # fmt: skip
