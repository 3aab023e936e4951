"""Normalisation of each sample by itself: group and instance normalisation."""

from __future__ import annotations

from abc import abstractmethod
from math import prod
from typing import Any

from ..comm import group_of
from ..errors import ConfigError, ShapeError
from ..initializers import Constant
from ..namespace import namespace
from ..registry.ranges import Count, Positive
from .base import Dist, Layer, Parameter, Shape
from .context import StepContext
from .reduction import Reduction


class SampleNormLayer(Layer):
    """Base of the layers that normalise groups of channels over all cells of a sample.

    Mean and (biased) variance are those of the whole image: the tiles join their moments, so that nothing cancels.
    Training and evaluation are the same. Parameters 'gamma' and 'beta' (C,) if `affine`. Input and output
    (N, *spatial, C), local.
    """

    sums_image = True
    saves_input = saves_output = False

    def __init__(self, eps: float, affine: bool, name: str | None) -> None:
        super().__init__(name=name)
        self.eps, self.affine = eps, affine

    @abstractmethod
    def groups_for(self, input_shape: Shape) -> int:
        """Return the number of groups, or ConfigError."""

    def output_shape_for(self, input_shape: Shape) -> Shape:
        """Return the input's shape."""
        self.groups_for(input_shape)
        return input_shape

    def reductions_for(self, input_shape: Shape) -> list[Reduction]:
        """Return the moments of all groups, and the sums of the gradients."""
        group, groups = group_of(len(input_shape) > 1, replicas=False), self.groups_for(input_shape)
        return [
            Reduction("forward", group, each=2 * groups, once=1, combine="moments"),
            Reduction("backward", group, each=2 * groups),
        ]

    def parameters_for(self, input_shape: Shape) -> dict[str, Parameter]:
        """Return 'gamma' and 'beta', if any."""
        shape = input_shape[-1:]
        return {"gamma": Parameter(shape, Constant(1.0)), "beta": Parameter(shape)} if self.affine else {}

    def reduce(self, ctx: StepContext, view: Any) -> Any:
        """Return count, means and sums of squared differences of all groups (n, groups) of this rank's cells."""
        cells = ctx.owned(view)
        each = view.shape[-1] // self.groups_for(self.input_shape)
        count = prod(cells.shape[1:-1]) * each
        mean = self._by_group(self.kernels.sample_sum(cells)) / max(1, count)
        from_mean = cells - self._by_channel(mean, cells.ndim)
        squares = self._by_group(self.kernels.sample_sum(from_mean * from_mean))
        return ctx.xp.concatenate([ctx.xp.full((1,), count, view.dtype), mean.ravel(), squares.ravel()])

    def forward(self, ctx: StepContext, view: Any) -> Any:
        """Return the normalised cells."""
        count, moments = ctx.reduced[0], ctx.reduced[1:].reshape(2, len(view), self.groups_for(self.input_shape))
        mean, var = (self._by_channel(numbers, view.ndim) for numbers in (moments[0], moments[1] / count))
        scale = 1 / ctx.xp.sqrt(var + view.dtype.type(self.eps))
        normal = (view - mean) * scale
        ctx.save(scale=scale, normal=normal)
        return normal * ctx.params["gamma"] + ctx.params["beta"] if self.affine else normal.copy()

    def reduce_backward(self, ctx: StepContext, dy: Any) -> Any:
        """Fill the gradients of gamma and beta; return what the groups' statistics need of this rank's cells."""
        if self.affine:
            ctx.grads["gamma"] = ctx.local_contribution(self.kernels.channel_sum(dy * ctx.normal))
            ctx.grads["beta"] = ctx.local_contribution(self.kernels.channel_sum(dy))
            dy = dy * ctx.params["gamma"]
        if not ctx.needs_input_gradient:
            return None
        return ctx.xp.stack([self._by_group(self.kernels.sample_sum(part)) for part in (dy * ctx.normal, dy)])

    def backward(self, ctx: StepContext, dy: Any) -> Any:
        """Return the gradient through the statistics."""
        if not ctx.needs_input_gradient:
            return None
        if self.affine:
            dy = dy * ctx.params["gamma"]
        count = prod(self.input_shape[:-1]) * (dy.shape[-1] // self.groups_for(self.input_shape))
        along, offset = (self._by_channel(sums / count, dy.ndim) for sums in ctx.reduced)
        dx = ctx.scale * dy
        own = ctx.owned(dx)  # the statistics are those of cells that count
        own -= ctx.scale * (offset + ctx.owned(ctx.normal) * along)
        return dx

    def _by_group(self, sums: Any) -> Any:
        """Return the sums of each group (n, groups), given those of the channels (n, C)."""
        groups = self.groups_for(self.input_shape)
        return sums.reshape(len(sums), groups, sums.shape[-1] // groups).sum(axis=-1)

    def _by_channel(self, numbers: Any, ndim: int) -> Any:
        """Return each channel's number (n, 1, ..., C), given those of the groups (n, groups)."""
        channels = self.input_shape[-1]
        found = namespace(numbers).repeat(numbers, channels // numbers.shape[-1], axis=1)
        return found.reshape(len(found), *(1,) * (ndim - 2), channels)


class GroupNormLayer(SampleNormLayer):
    """Normalises each group of neighbouring channels of each sample over all its cells (Wu and He 2018).

    Parameters
    ----------
    groups : int
        Must divide the input's channels.
    eps : float
        Added to the variance.
    affine : bool
        Scale and shift each channel by 'gamma' and 'beta'.
    """

    def __init__(
        self, groups: Count = 32, *, eps: Positive = 1e-5, affine: bool = True, name: str | None = None
    ) -> None:
        super().__init__(eps, affine, name)
        self.groups = groups

    def groups_for(self, input_shape: Shape) -> int:
        """Return `groups`."""
        if input_shape[-1] % self.groups:
            raise ConfigError(f"groups {self.groups} must divide the input's {input_shape[-1]} channels")
        return self.groups


class InstanceNormLayer(SampleNormLayer):
    """Normalises each channel of each sample over all its cells (Ulyanov et al. 2016); there are no running statistics.

    Parameters
    ----------
    eps, affine
        As in GroupNormLayer.
    """

    def __init__(self, *, eps: Positive = 1e-5, affine: bool = False, name: str | None = None) -> None:
        super().__init__(eps, affine, name)

    def groups_for(self, input_shape: Shape) -> int:
        """Return the number of channels."""
        if len(input_shape) < 2:
            raise ShapeError(f"instance normalisation needs an image, but its input has shape {input_shape}")
        return input_shape[-1]


class GroupNormLayerDist(Dist, GroupNormLayer):
    """Group normalisation over tiles."""


class InstanceNormLayerDist(Dist, InstanceNormLayer):
    """Instance normalisation over tiles."""
