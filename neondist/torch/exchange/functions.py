"""Communication as differentiable operations.

A value replicated on several ranks has its whole gradient on each of them. Therefore a sum over ranks passes its
gradient on unchanged (`SumOverRanks`), and the gradient of a replicated value used in work that is partitioned over
ranks is summed over them (`SumGradientOverRanks`). Only parameters are different: each rank computes its part of their
gradient, and all parts are summed once, at the end of the backward pass (`SumParameterGradients`).

None of these functions supports double backward, which would also have to communicate; they raise an error instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..ir.graph import GRADIENTS, DimPart
from ..ir.once_differentiable import once_differentiable
from .channel import TransferChannel
from .mesh_comm import MeshComm

_RECOMPUTE_TRIGGER = torch.empty(0)


def save_recompute_trigger(ctx: Any) -> None:
    """Save the dummy tensor that `trigger_recompute` unpacks."""
    ctx.save_for_backward(_RECOMPUTE_TRIGGER)


def trigger_recompute(ctx: Any) -> Any:
    """Return the saved tensors, so that an enclosing checkpoint recomputes its forward pass before any send.

    A checkpoint recomputes when the first saved tensor is unpacked. Without this call, ranks with different local work
    could unpack the first tensor at different places, and order the messages of the two passes differently.
    """
    return ctx.saved_tensors


class ExchangeView(torch.autograd.Function):
    """View of a partitioned tensor that includes cells of other ranks; the adjoint sums the gradients of all views."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, channel: TransferChannel, pads: Any, fill: float, has_unaliased_gradient: bool
    ) -> torch.Tensor:
        """Return this rank's view; `has_unaliased_gradient`: whether the view's gradient may be modified."""
        ctx.channel, ctx.options = channel, (tensor.shape, pads, has_unaliased_gradient)
        save_recompute_trigger(ctx)
        with channel.observe("forward"):
            return channel.view(tensor, pads, fill)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradient of the part."""
        trigger_recompute(ctx)
        with ctx.channel.observe("backward"):
            return ctx.channel.adjoint(gradients[0], *ctx.options), None, None, None, None


class RecomputedResult(torch.autograd.Function):
    """Result of a segment that all ranks recompute in the backward pass, whatever its steps save locally."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor."""
        save_recompute_trigger(ctx)
        return torch.ops.aten._unsafe_view(tensor, tensor.shape)  # not a view: the result may be modified in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradient unchanged."""
        trigger_recompute(ctx)
        return gradients[0]


class GatherWhole(torch.autograd.Function):
    """Partitioned tensor gathered on every rank for replicated work; the adjoint takes the rank's own part."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, channel: TransferChannel) -> torch.Tensor:
        """Return the whole tensor."""
        ctx.channel, ctx.shape = channel, tensor.shape
        with channel.observe("forward"):
            return channel.view(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradient of the part."""
        return ctx.channel.own_gradient_contribution(gradients[0], ctx.shape), None


class SumOverRanks(torch.autograd.Function):
    """Sum over axes of the mesh; each rank has the whole gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, comm: MeshComm, name: str, axes: frozenset[int]) -> torch.Tensor:
        """Return the sum."""
        return comm.reduce(name, "forward", tensor, axes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradient unchanged."""
        return gradients[0], None, None, None


class SumGradientOverRanks(torch.autograd.Function):
    """Identity for use in partitioned work; the gradient is summed over axes of the mesh."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, comm: MeshComm, name: str, axes: frozenset[int]) -> torch.Tensor:
        """Return the values."""
        ctx.options = comm, name, axes
        save_recompute_trigger(ctx)
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the sum of the gradients."""
        trigger_recompute(ctx)
        comm, name, axes = ctx.options
        return comm.reduce(name, "backward", gradients[0], axes), None, None, None


class CountGradientOnce(torch.autograd.Function):
    """Parameter used in replicated work: its gradient is counted on only one of the ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, is_counted: bool) -> torch.Tensor:
        """Return the values."""
        ctx.is_counted = is_counted
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradient, or zeros."""
        return gradients[0] if ctx.is_counted else torch.zeros_like(gradients[0]), None


class RecordGradient(torch.autograd.Function):
    """Parameter of a pass; this rank's contributions to its gradient are recorded."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, recorded_gradients: list[torch.Tensor]) -> torch.Tensor:
        """Return the parameter."""
        ctx.recorded_gradients = recorded_gradients
        ctx.set_materialize_grads(False)
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradient."""
        ctx.recorded_gradients.extend(gradient for gradient in gradients if gradient is not None)
        return gradients[0], None


class SumParameterGradients(torch.autograd.Function):
    """All parameters of a pass; their gradients are summed over all ranks, in groups of one dtype.

    If each rank uses only a part of a parameter, the gradients of the parts are summed over replicas, and gathered.
    """

    @staticmethod
    def forward(
        ctx: Any,
        comm: MeshComm,
        parts: Sequence[DimPart | None],
        gradients_are_unaliased: Sequence[bool],
        *tensors: torch.Tensor,
    ) -> Any:
        """Return the parameters, or this rank's parts of them; unaliased gradients may be modified in place."""
        ctx.comm = comm
        ctx.parts = parts
        ctx.gradients_are_unaliased = gradients_are_unaliased
        ctx.shapes = [tensor.shape for tensor in tensors]
        save_recompute_trigger(ctx)
        ctx.set_materialize_grads(False)
        tensors_and_parts = zip(tensors, parts, strict=True)
        return tuple(t if part is None else part.select(t, comm.place) for t, part in tensors_and_parts)  # views

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the sums."""
        trigger_recompute(ctx)
        gradients = tuple(g.to_dense() if g is not None and g.is_sparse else g for g in gradients)
        comm = ctx.comm
        gradient_sums = list(gradients)
        for dtype in sorted({g.dtype for g in gradients if g is not None}, key=str):
            sizes = [shape.numel() * dtype.itemsize for shape in ctx.shapes]
            indices_of_dtype = [at for at, g in enumerate(gradients) if g is not None and g.dtype == dtype]
            for indices in _group_into_buckets([at for at in indices_of_dtype if ctx.parts[at] is None], sizes):
                grads = [gradients[at] for at in indices]
                flat = _sum_bucket(ctx, indices, grads, comm.mesh.axes)
                for at, tensor in zip(indices, torch._C._nn.unflatten_dense_tensors(flat, grads), strict=True):
                    gradient_sums[at] = tensor
            for indices in _group_into_buckets([at for at in indices_of_dtype if ctx.parts[at] is not None], sizes):
                flat = _sum_bucket(ctx, indices, [gradients[at] for at in indices], comm.mesh.axes & {0})
                whole_sums = [torch.empty(ctx.shapes[at], dtype=dtype, device=flat.device) for at in indices]
                comm.gather_parts(GRADIENTS, "backward", flat, whole_sums, [ctx.parts[at] for at in indices])
                for at, tensor in zip(indices, whole_sums, strict=True):
                    gradient_sums[at] = tensor
        return (None, None, None, *gradient_sums)


MAX_BUCKET_BYTES = 1 << 22
"""Bytes above which no gradient is added to a bucket: the allocator would not reuse the memory of larger arrays."""
MIN_UNBUCKETED_BYTES = 1 << 18
"""Size from which a gradient is summed alone, in place if possible, instead of being joined with others."""


def _group_into_buckets(indices: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    """Return the indices in groups: each large gradient alone, and small gradients joined to about MAX_BUCKET_BYTES.

    `sizes` are those of whole gradients, since all ranks need the same groups, although their parts may differ.
    """
    buckets = [[at] for at in indices if sizes[at] >= MIN_UNBUCKETED_BYTES]
    bucket = list[int]()
    bucket_bytes = 0
    for at in (at for at in indices if sizes[at] < MIN_UNBUCKETED_BYTES):
        if bucket_bytes > MAX_BUCKET_BYTES:
            buckets.append(bucket)
            bucket, bucket_bytes = [], 0
        bucket.append(at)
        bucket_bytes += sizes[at]
    return [*buckets, bucket] if bucket else buckets


def _sum_bucket(ctx: Any, indices: Sequence[int], grads: Sequence[torch.Tensor], axes: frozenset[int]) -> torch.Tensor:
    """Return the sums of gradients over axes as a flat tensor."""
    first_gradient = grads[0]
    if len(grads) == 1 and ctx.gradients_are_unaliased[indices[0]] and first_gradient.is_contiguous():
        return ctx.comm.reduce(GRADIENTS, "backward", first_gradient.view(-1), axes, in_place=True)
    flat = torch._C._nn.flatten_dense_tensors(list(grads))
    return ctx.comm.reduce(GRADIENTS, "backward", flat, axes, in_place=len(grads) > 1)


class EmptyResult(torch.autograd.Function):
    """Empty result of a rank without indices; its inputs take part in the backward pass."""

    @staticmethod
    def forward(ctx: Any, shape: Sequence[int], dtype: torch.dtype, *inputs: torch.Tensor) -> torch.Tensor:
        """Return an empty tensor."""
        ctx.inputs = [(tensor.shape, tensor.dtype, tensor.device) for tensor in inputs]
        return inputs[0].new_zeros(tuple(shape), dtype=dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return zeros."""
        zeros = (torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.inputs)
        return (None, None, *zeros)
