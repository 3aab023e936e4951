"""Batch, group and instance normalisation with statistics of images that are partitioned over ranks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..ir.once_differentiable import once_differentiable
from .channel import memory_format_of
from .mesh_comm import MeshComm


class MomentsSpec(NamedTuple):
    """Specification of a normalisation's statistics.

    Attributes
    ----------
    groups : int or None
        Number of groups of channels with statistics per sample; None: statistics per channel over all samples.
    group_size : int
        Number of elements of the whole images that one mean covers.
    axes : axes of the mesh over which the elements of one mean are partitioned
    own_cells : slices of the spatial dimensions, or None
        Cells that this rank contributes, if it also has cells of other ranks.
    has_placeholder_sample : bool
        Whether this rank's replica has no samples except a placeholder.
    """

    groups: int | None
    group_size: int
    eps: float
    axes: frozenset[int]
    own_cells: tuple[slice, ...] | None = None
    has_placeholder_sample: bool = False

    def select_own_cells(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the cells of rows that this rank contributes."""
        return rows if self.own_cells is None else rows[(slice(None), slice(None), *self.own_cells)]

    def reshape_to_rows(self, x: torch.Tensor) -> torch.Tensor:
        """Return x (N, C, ...) reshaped so that dimension 1 has a row for each channel with separate statistics."""
        return x if self.groups is None else x.reshape(1, x.shape[0] * x.shape[1], *x.shape[2:])

    def sum_by_group(self, rows: torch.Tensor, channels: int) -> torch.Tensor:
        """Sum over the rows of each group."""
        return rows if self.groups is None else rows.unflatten(-1, (-1, channels // self.groups)).sum(-1)

    def repeat_by_group(self, group_values: torch.Tensor, channels: int) -> torch.Tensor:
        """Repeat the values of groups for each of their rows."""
        return group_values if self.groups is None else group_values.repeat_interleave(channels // self.groups, dim=-1)


class Normalise(torch.autograd.Function):
    """Batch, group and instance normalisation with statistics of the whole images, with few passes over memory.

    Ranks merge their means and variances in one sum in double precision, which suffices for squares of narrower types;
    float64 requires two sums, to avoid cancellation (Chan, Golub and LeVeque 1983).
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: Any, bias: Any, comm: MeshComm, name: str, moments: MomentsSpec
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return x (N, C, ...) normalised, and the mean and variance of each group."""
        ctx.full = x.shape
        if moments.has_placeholder_sample:
            x = x[:0]
        samples, channels = x.shape[:2]
        rows = moments.reshape_to_rows(x)
        own_rows = moments.select_own_cells(rows)
        mean, variance = _local_moments(own_rows, moments, samples)
        share = own_rows.numel() // max(1, mean.numel()) / moments.group_size
        mean, variance = _merge_moments(mean, variance, share, comm, name, moments.axes)
        means, variances = (moments.repeat_by_group(values, channels) for values in (mean, variance))
        scale, shift = (None if v is None else _repeat_channels(v, means) for v in (weight, bias))
        y = _normalise_rows(rows, scale, shift, means, variances, moments.eps)
        ctx.save_for_backward(x, weight, mean, variance)
        ctx.options = comm, name, moments
        ctx.mark_non_differentiable(mean, variance)
        y = y if y.shape == x.shape else torch.ops.aten._unsafe_view(y, x.shape)  # not a view: a ReLU may overwrite it
        return y.new_zeros(ctx.full) if moments.has_placeholder_sample else y, mean, variance

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradient of x, and this rank's parts of the gradients of the weight and the bias."""
        x, weight, mean, variance = ctx.saved_tensors
        comm, name, moments = ctx.options
        channels = x.shape[1]
        needs_input_grad = ctx.needs_input_grad
        dy = gradients[0][:0] if moments.has_placeholder_sample else gradients[0]
        rows, dy = moments.reshape_to_rows(x), moments.reshape_to_rows(dy.contiguous(memory_format=memory_format_of(x)))
        means, variances = moments.repeat_by_group(mean, channels), moments.repeat_by_group(variance, channels)
        scale = torch.ones_like(means) if weight is None else _repeat_channels(weight, means)
        std = torch.rsqrt(variances + moments.eps)
        if x.numel():  # GPU kernels read the saved statistics, CPU kernels the running statistics
            _, dscale, dshift = torch.ops.aten.native_batch_norm_backward(
                dy, rows, scale, means, variances, means, std, False, moments.eps, [False, True, True]
            )
        else:
            dscale, dshift = torch.zeros_like(means), torch.zeros_like(means)
        dx = None
        if needs_input_grad[0]:
            sums = moments.sum_by_group(torch.stack([dshift, dscale]).mul_(scale), channels)
            sums = comm.reduce(name, "backward", sums, moments.axes, in_place=True)
            shift_term, scale_term = moments.repeat_by_group(sums, channels).mul(std).div_(-moments.group_size).unbind()
            dy_factor = (scale * std).view(1, -1, *[1] * (rows.dim() - 2))
            own_rows = moments.select_own_cells(rows)
            statistics_gradient = _normalise_rows(own_rows, scale_term, shift_term, means, variances, moments.eps)
            if moments.own_cells is None:
                dx = statistics_gradient.addcmul_(dy, dy_factor)
            else:
                dx = (dy * dy_factor).to(x.dtype)
                moments.select_own_cells(dx).add_(statistics_gradient)
            dx = dx.new_zeros(ctx.full) if moments.has_placeholder_sample else dx.view(x.shape)
        if len(dscale) != channels:  # one row per sample; there may be no samples
            dscale, dshift = (dv.view(len(dv) // channels, channels).sum(0) for dv in (dscale, dshift))
        return (
            dx,
            *(dv if need else None for dv, need in zip((dscale, dshift), needs_input_grad[1:3], strict=True)),
            *_NO_GRADIENTS,
        )


_NO_GRADIENTS = None, None, None
_HALF_DTYPES = (torch.bfloat16, torch.float16)


def _local_moments(rows: torch.Tensor, moments: MomentsSpec, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean and variance of each group of this rank's elements."""
    if not rows.numel():
        num_means = rows.shape[1] if moments.groups is None else samples * moments.groups
        dtype = torch.float32 if rows.dtype in _HALF_DTYPES else rows.dtype
        return rows.new_zeros(num_means, dtype=dtype), rows.new_zeros(num_means, dtype=dtype)
    grouped_rows = rows if moments.groups is None else rows.reshape(1, samples * moments.groups, -1)
    if grouped_rows.dtype in _HALF_DTYPES:  # as PyTorch does: statistics in higher precision
        grouped_rows = grouped_rows.float()
    if grouped_rows.device.type == "cpu" and memory_format_of(grouped_rows) == torch.contiguous_format:
        # as accurate as PyTorch's sums of this layout, which are not vectorised, and five times as fast
        reduced_dims = [0, *range(2, grouped_rows.dim())]
        mean = grouped_rows.mean(reduced_dims)
        deviations = grouped_rows - mean.view(1, -1, *[1] * (grouped_rows.dim() - 2))
        return mean, deviations.square_().mean(reduced_dims)
    mean, variance = torch.ops.aten.batch_norm_update_stats(grouped_rows, None, None, 0.0)
    return mean, variance


def _merge_moments(
    mean: torch.Tensor, variance: torch.Tensor, share: float, comm: MeshComm, name: str, axes: frozenset[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the global mean and variance from those of this rank and its share of the elements."""
    dtype = mean.dtype
    if not axes & comm.mesh.axes:
        return mean, variance
    if dtype == torch.float64:  # no wider type: differences of squares would cancel
        mean, own_mean = comm.reduce(name, "forward", mean * share, axes, in_place=True), mean
        deviations = (own_mean - mean).square_().add_(variance).mul_(share)
        return mean, comm.reduce(name, "forward", deviations, axes, in_place=True)
    moment_sums = torch.stack([mean, variance]).double()
    own_mean, squares = moment_sums.unbind()
    squares.addcmul_(own_mean, own_mean)
    mean, squares = comm.reduce(name, "forward", moment_sums.mul_(share), axes, in_place=True).unbind()
    return mean.to(dtype), squares.addcmul(mean, mean, value=-1).clamp_(min=0).to(dtype)


def _normalise_rows(
    rows: torch.Tensor, scale: Any, shift: Any, mean: torch.Tensor, variance: torch.Tensor, eps: float
) -> torch.Tensor:
    """Return rows normalised with these statistics, scaled and shifted, in one pass."""
    if not rows.numel():
        return rows.clone()
    return torch.native_batch_norm(rows, scale, shift, mean, variance, False, 0.0, eps)[0]


def _repeat_channels(channels: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Repeat the values of channels for each row, in the dtype of the statistics."""
    values = channels.to(rows.dtype)
    return values if len(values) == len(rows) else values.repeat(len(rows) // len(values))
