"""Communication as differentiable operations.

A value that several ranks have whole has its whole gradient on each of them. Therefore: a sum over ranks passes its
gradient on as it is (`Sum`); what goes from there into something that each rank computes for its own indices has its
gradient added up over the ranks (`Spread`). Parameters alone are different: each rank finds its part of their gradient,
and all parts are added up once, at the end of the backward pass (`Parameters`).

None has gradients of gradients, and says so: those would have to communicate too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .graph import GRADIENTS
from .mesh_comm import Channel, MeshComm, format_of
from .once import once_differentiable

_NOTHING = torch.empty(0)


def announce(ctx: Any) -> None:
    """Save something for `recompute` to ask for."""
    ctx.save_for_backward(_NOTHING)


def recompute(ctx: Any) -> Any:
    """Return what was saved, and let a checkpoint run the forward again that this belongs to before anything is sent.

    It does so when the first saved tensor is asked for: of local work that may be another one on each rank, and ranks'
    messages of the two passes would come in different orders.
    """
    return ctx.saved_tensors


class View(torch.autograd.Function):
    """View that a rank needs of a partitioned tensor; the adjoint adds."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, channel: Channel, pads: Any, fill: float, owns_gradient: bool
    ) -> torch.Tensor:
        """Return the view of this rank; `owns_gradient`: the memory of its gradient is not shared."""
        ctx.channel, ctx.how = channel, (tensor.shape, pads, owns_gradient)
        announce(ctx)
        with channel.during("forward"):
            return channel.view(tensor, pads, fill)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradient of the part."""
        recompute(ctx)
        with ctx.channel.during("backward"):
            return ctx.channel.adjoint(gradients[0], *ctx.how), None, None, None, None


class Again(torch.autograd.Function):
    """Result of a segment that is recomputed in the backward pass, on all ranks, whatever its steps save there."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor."""
        announce(ctx)
        return torch.ops.aten._unsafe_view(tensor, tensor.shape)  # no view: others may write into it

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradient as it is."""
        recompute(ctx)
        return gradients[0]


class Gather(torch.autograd.Function):
    """A tensor that is cut, whole on every rank, for what all of them compute alike; the adjoint takes the own part."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, channel: Channel) -> torch.Tensor:
        """Return the whole."""
        ctx.channel, ctx.shape = channel, tensor.shape
        with channel.during("forward"):
            return channel.view(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradient of the part."""
        return ctx.channel.own_part(gradients[0], ctx.shape), None


class Sum(torch.autograd.Function):
    """The sum over axes of the mesh; each rank's gradient is whole."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, wires: MeshComm, name: str, axes: frozenset[int]) -> torch.Tensor:
        """Return the sum."""
        return wires.reduce(name, "forward", tensor, axes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradient as it is."""
        return gradients[0], None, None, None


class Spread(torch.autograd.Function):
    """The same values, for what each rank computes of its own; the gradient is added up over axes of the mesh."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, wires: MeshComm, name: str, axes: frozenset[int]) -> torch.Tensor:
        """Return the values."""
        ctx.how = wires, name, axes
        announce(ctx)
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the sum of the gradients."""
        recompute(ctx)
        wires, name, axes = ctx.how
        return wires.reduce(name, "backward", gradients[0], axes), None, None, None


class Moments(NamedTuple):
    """Over what a normalisation takes its statistics.

    Attributes
    ----------
    groups : int or None
        Statistics of so many groups of channels for each sample; None: of each channel, over all samples.
    number : int
        How many numbers of the whole images one mean is taken over.
    eps : float
    axes : the axes of the mesh along which there are more of them
    own : slices of the spatial dimensions, or None
        What of them counts on this rank, where it has some of other ranks' too.
    idle : bool
        Whether this rank's replica has no samples: the one that it has fills in for shapes alone.
    """

    groups: int | None
    number: int
    eps: float
    axes: frozenset[int]
    own: tuple[slice, ...] | None = None
    idle: bool = False

    def counted(self, rows: torch.Tensor) -> torch.Tensor:
        """Return what of rows counts on this rank."""
        return rows if self.own is None else rows[(slice(None), slice(None), *self.own)]

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """Return x (N, C, ...) such that dimension 1 has a row for each channel that has statistics of its own."""
        return x if self.groups is None else x.reshape(1, x.shape[0] * x.shape[1], *x.shape[2:])

    def of_groups(self, rows: torch.Tensor, channels: int) -> torch.Tensor:
        """Return sums over the rows of each group."""
        return rows if self.groups is None else rows.unflatten(-1, (-1, channels // self.groups)).sum(-1)

    def of_rows(self, groups: torch.Tensor, channels: int) -> torch.Tensor:
        """Return for each row what its group has."""
        return groups if self.groups is None else groups.repeat_interleave(channels // self.groups, dim=-1)


class Normalise(torch.autograd.Function):
    """Batch, group and instance normalisation with statistics of the whole images, in one pass over memory each.

    Ranks merge their means and variances in one sum of wider numbers, which squares of narrower ones fit into; those of
    the widest in two, such that nothing cancels (Chan, Golub and LeVeque 1983).
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: Any, bias: Any, wires: MeshComm, name: str, moments: Moments
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return x (N, C, ...) normalised, and the mean and variance of each group."""
        ctx.full = x.shape
        if moments.idle:
            x = x[:0]
        samples, channels = x.shape[:2]
        rows = moments.rows(x)
        mine = moments.counted(rows)
        mean, variance = _local_moments(mine, moments, samples)
        share = mine.numel() // max(1, mean.numel()) / moments.number
        mean, variance = _merged(mean, variance, share, wires, name, moments.axes)
        means, variances = (moments.of_rows(values, channels) for values in (mean, variance))
        scale, shift = (None if v is None else _repeated(v, means) for v in (weight, bias))
        y = _scaled(rows, scale, shift, means, variances, moments.eps) if x.numel() else x.clone()
        ctx.save_for_backward(x, weight, mean, variance)
        ctx.how = wires, name, moments
        ctx.mark_non_differentiable(mean, variance)
        y = y if y.shape == x.shape else torch.ops.aten._unsafe_view(y, x.shape)  # no view: a ReLU may write over it
        return y.new_zeros(ctx.full) if moments.idle else y, mean, variance

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradients of x, and of the weight and the bias, in so far as this rank has a part in them."""
        (x, weight, mean, variance), (wires, name, moments) = ctx.saved_tensors, ctx.how
        channels, asked = x.shape[1], ctx.needs_input_grad
        dy = gradients[0][:0] if moments.idle else gradients[0]
        rows, dy = moments.rows(x), moments.rows(dy.contiguous(memory_format=format_of(x)))
        each, var = moments.of_rows(mean, channels), moments.of_rows(variance, channels)
        scale, std = (
            torch.ones_like(each) if weight is None else _repeated(weight, each),
            torch.rsqrt(var + moments.eps),
        )
        if x.numel():  # kernels of a GPU read the saved statistics, those of the host the running ones
            _, dscale, dshift = torch.ops.aten.native_batch_norm_backward(
                dy, rows, scale, each, var, each, std, False, moments.eps, [False, True, True]
            )
        else:
            dscale, dshift = torch.zeros_like(each), torch.zeros_like(each)
        dx = None
        if asked[0]:
            sums = moments.of_groups(torch.stack([dshift, dscale]).mul_(scale), channels)
            sums = wires.reduce(name, "backward", sums, moments.axes, in_place=True)
            first, second = moments.of_rows(sums, channels).mul(std).div_(-moments.number).unbind()
            slope = (scale * std).view(1, -1, *[1] * (rows.dim() - 2))
            mine = moments.counted(rows)
            moved = _scaled(mine, second, first, each, var, moments.eps) if mine.numel() else mine.clone()
            if moments.own is None:
                dx = moved.addcmul_(dy, slope)
            else:
                dx = (dy * slope).to(x.dtype)
                moments.counted(dx).add_(moved)
            dx = dx.new_zeros(ctx.full) if moments.idle else dx.view(x.shape)
        if len(dscale) != channels:  # those of each sample, of which there may be none
            dscale, dshift = (dv.view(len(dv) // channels, channels).sum(0) for dv in (dscale, dshift))
        return dx, *(dv if wanted else None for dv, wanted in zip((dscale, dshift), asked[1:3], strict=True)), *_NONE


_NONE = None, None, None
_NARROW = (torch.bfloat16, torch.float16)


def _local_moments(rows: torch.Tensor, moments: Moments, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean of each group of this rank's numbers, and their variance."""
    if not rows.numel():
        number = rows.shape[1] if moments.groups is None else samples * moments.groups
        dtype = torch.float32 if rows.dtype in _NARROW else rows.dtype
        return rows.new_zeros(number, dtype=dtype), rows.new_zeros(number, dtype=dtype)
    grouped = rows if moments.groups is None else rows.reshape(1, samples * moments.groups, -1)
    if grouped.dtype in _NARROW:  # as PyTorch's own: statistics have more digits
        grouped = grouped.float()
    mean, variance = torch.ops.aten.batch_norm_update_stats(grouped, None, None, 0.0)
    return mean, variance


def _merged(
    mean: torch.Tensor, variance: torch.Tensor, share: float, wires: MeshComm, name: str, axes: frozenset[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and variance of all numbers, given those of this rank's, and what share of all they are."""
    dtype = mean.dtype
    if dtype == torch.float64:  # no type is so wide that squares would not cancel
        mean, own = wires.reduce(name, "forward", mean * share, axes, in_place=True), mean
        apart = (own - mean).square_().add_(variance).mul_(share)
        return mean, wires.reduce(name, "forward", apart, axes, in_place=True)
    sums = torch.stack([mean, variance]).double()
    own, squares = sums.unbind()
    squares.addcmul_(own, own)
    mean, squares = wires.reduce(name, "forward", sums.mul_(share), axes, in_place=True).unbind()
    return mean.to(dtype), squares.addcmul(mean, mean, value=-1).clamp_(min=0).to(dtype)


def _scaled(
    rows: torch.Tensor, scale: Any, shift: Any, mean: torch.Tensor, variance: torch.Tensor, eps: float
) -> torch.Tensor:
    """Return rows with mean 0 and variance 1, by these statistics, times a scale, plus a shift, in one pass."""
    return torch.native_batch_norm(rows, scale, shift, mean, variance, False, 0.0, eps)[0]


def _repeated(channels: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return for each row what its channel has, in the type of statistics."""
    found = channels.to(rows.dtype)
    return found if len(found) == len(rows) else found.repeat(len(rows) // len(found))


class Counted(torch.autograd.Function):
    """A parameter, for what several ranks compute alike: its gradient counts on one of them."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, counts: bool) -> torch.Tensor:
        """Return the values."""
        ctx.counts = counts
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradient, or zeros."""
        return gradients[0] if ctx.counts else torch.zeros_like(gradients[0]), None


class Noted(torch.autograd.Function):
    """A parameter of a pass; what this rank's part of the pass adds to its gradient is noted."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, noted: list[torch.Tensor]) -> torch.Tensor:
        """Return the parameter."""
        ctx.noted = noted
        ctx.set_materialize_grads(False)
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradient."""
        ctx.noted.extend(gradient for gradient in gradients if gradient is not None)
        return gradients[0], None


class Parameters(torch.autograd.Function):
    """All parameters of a pass; their gradients are added up over all ranks, in one message of each dtype."""

    @staticmethod
    def forward(ctx: Any, wires: MeshComm, *tensors: torch.Tensor) -> Any:
        """Return the parameters."""
        ctx.wires = wires
        announce(ctx)
        ctx.set_materialize_grads(False)
        return tensors  # as views of them

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the sums."""
        recompute(ctx)
        found = list(gradients)
        for dtype in sorted({g.dtype for g in gradients if g is not None}, key=str):
            these = [at for at, g in enumerate(gradients) if g is not None and g.dtype == dtype]
            grads = [gradients[at] for at in these]
            flat = torch._C._nn.flatten_dense_tensors(grads)
            flat = ctx.wires.reduce(GRADIENTS, "backward", flat, ctx.wires.mesh.axes, in_place=len(these) > 1)
            for at, part in zip(these, torch._C._nn.unflatten_dense_tensors(flat, grads), strict=True):
                found[at] = part
        return (None, *found)


class Nothing(torch.autograd.Function):
    """The empty result of a rank without indices; what it was computed from takes part in the backward pass."""

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
