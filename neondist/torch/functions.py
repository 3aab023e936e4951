"""Communication as differentiable operations.

A value that several ranks have whole has its whole gradient on each of them. Therefore: a sum over ranks passes its
gradient on as it is (`Sum`); what goes from there into something that each rank computes for its own indices has its
gradient added up over the ranks (`Spread`). Parameters alone are different: each rank finds its part of their gradient,
and all parts are added up once, at the end of the backward pass (`Parameters`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .wires import Channel, Wires


class View(torch.autograd.Function):
    """What a rank wants to see of a tensor that is cut; the adjoint adds."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, channel: Channel, pads: Any, fill: float) -> torch.Tensor:
        """Return the view of this rank."""
        ctx.channel, ctx.shape, ctx.pads = channel, tensor.shape, pads
        return channel.view(tensor, pads, fill)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradient of the part."""
        return ctx.channel.adjoint(gradients[0], ctx.shape, ctx.pads), None, None, None


class Gather(torch.autograd.Function):
    """A tensor that is cut, whole on every rank, for what all of them compute alike; the adjoint takes the own part."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, channel: Channel) -> torch.Tensor:
        """Return the whole."""
        ctx.channel, ctx.shape = channel, tensor.shape
        return channel.view(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradient of the part."""
        (gradient,) = gradients
        found = gradient.new_zeros(ctx.shape)
        for piece in ctx.channel.own:
            ctx.channel._at(found, piece, "source").copy_(ctx.channel._at(gradient, piece, "target"))
        return found, None


class Sum(torch.autograd.Function):
    """The sum over axes of the mesh; each rank's gradient is whole."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, wires: Wires, name: str, axes: frozenset[int]) -> torch.Tensor:
        """Return the sum."""
        return wires.reduce(name, "forward", tensor, axes)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradient as it is."""
        return gradients[0], None, None, None


class Spread(torch.autograd.Function):
    """The same values, for what each rank computes of its own; the gradient is added up over axes of the mesh."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, wires: Wires, name: str, axes: frozenset[int]) -> torch.Tensor:
        """Return the values."""
        ctx.how = wires, name, axes
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the sum of the gradients."""
        wires, name, axes = ctx.how
        return wires.reduce(name, "backward", gradients[0], axes), None, None, None


class Counted(torch.autograd.Function):
    """A parameter, for what several ranks compute alike: its gradient counts on one of them."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, counts: bool) -> torch.Tensor:
        """Return the values."""
        ctx.counts = counts
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradient, or zeros."""
        return gradients[0] if ctx.counts else torch.zeros_like(gradients[0]), None


class Parameters(torch.autograd.Function):
    """All parameters of a pass; their gradients are added up over all ranks, in one message of each dtype."""

    @staticmethod
    def forward(ctx: Any, wires: Wires, *tensors: torch.Tensor) -> Any:
        """Return the parameters."""
        ctx.wires = wires
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the sums."""
        found = list(gradients)
        for dtype in sorted({g.dtype for g in gradients if g is not None}, key=str):
            these = [at for at, g in enumerate(gradients) if g is not None and g.dtype == dtype]
            flat = torch.cat([gradients[at].reshape(-1) for at in these])
            flat = ctx.wires.reduce("gradients", "backward", flat, ctx.wires.mesh.axes)
            parts = flat.split([gradients[at].numel() for at in these])
            for at, part in zip(these, parts, strict=True):
                found[at] = part.view(gradients[at].shape)
        return (None, *found)


class Nothing(torch.autograd.Function):
    """The empty result of a rank without indices; what it was computed from takes part in the backward pass."""

    @staticmethod
    def forward(ctx: Any, shape: Sequence[int], *inputs: torch.Tensor) -> torch.Tensor:
        """Return an empty tensor."""
        ctx.inputs = [(tensor.shape, tensor.dtype, tensor.device) for tensor in inputs]
        return inputs[0].new_zeros(tuple(shape))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return zeros."""
        zeros = (torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.inputs)
        return (None, *zeros)
