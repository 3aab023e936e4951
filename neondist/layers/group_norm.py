"""Normalisation of single samples: group and instance normalisation."""

from __future__ import annotations

from abc import abstractmethod
from math import prod
from typing import Any

from ..arrays.namespace import namespace
from ..comm import reduction_group
from ..errors import ConfigError, ShapeError
from ..initializers import Constant
from ..registry.ranges import Count, Positive
from ..terminal.console import counted
from .base import Dist, Parameter, Shape
from .context import StepContext
from .norm import NormLayer
from .reduction import Reduction


class SampleNormLayer(NormLayer):
    """Base class of layers that normalise groups of channels over all cells of a sample.

    Mean and (biased) variance are computed over the whole image; moments of tiles are combined without cancellation.
    Training and evaluation are the same. Parameters 'gamma' and 'beta' (C,) if `affine`. Input and output
    (N, *spatial, C) per tile.
    """

    fusible_activation_kind = "is_relu"
    saved_bytes_and_elements = (0, 0)
    reduce_needed_in_recomputation = False
    can_recompute_output = in_place = True

    def __init__(self, eps: float, affine: bool, name: str | None) -> None:
        super().__init__(name=name)
        self.eps, self.affine = eps, affine

    @abstractmethod
    def group_count_for(self, input_shape: Shape) -> int:
        """Return the number of groups; raises ConfigError or ShapeError if the input does not fit."""

    def output_shape_for(self, input_shape: Shape) -> Shape:
        """Return the input's shape."""
        self.group_count_for(input_shape)
        return input_shape

    def reductions_for(self, input_shape: Shape) -> list[Reduction]:
        """Return the moments of all groups, and the sums of the gradients."""
        group, groups = reduction_group(len(input_shape) > 1, over_replicas=False), self.group_count_for(input_shape)
        return [
            Reduction("forward", group, result_elements_per_sample=2 * groups, fixed_elements=1, combine="moments"),
            Reduction("backward", group, result_elements_per_sample=2 * groups, needed_by_parameters=False),
        ]

    def parameters_for(self, input_shape: Shape) -> dict[str, Parameter]:
        """Return 'gamma' and 'beta', or nothing without `affine`."""
        shape = input_shape[-1:]
        return {"gamma": Parameter(shape, Constant(1.0)), "beta": Parameter(shape)} if self.affine else {}

    def reduce(self, ctx: StepContext, view: Any) -> Any:
        """Return count, means and sums of squared differences of all groups (n, groups) of this rank's cells."""
        cells = ctx.owned(view)
        num_cells = prod(cells.shape[1:-1])
        means, squares = self.kernels.moments(cells, by_sample=True)
        num_values = num_cells * (view.shape[-1] // self.group_count_for(self.input_shape))
        mean = self._sum_by_group(num_cells * means) / max(1, num_values)
        squares = self._sum_by_group(squares + num_cells * (means - self._repeat_for_channels(mean)) ** 2)
        return ctx.xp.concatenate([ctx.xp.full((1,), num_values, view.dtype), mean.ravel(), squares.ravel()])

    def forward(self, ctx: StepContext, view: Any) -> Any:
        """Return the normalised cells."""
        count, moments = ctx.reduced[0], ctx.reduced[1:].reshape(2, len(view), self.group_count_for(self.input_shape))
        mean, var = (self._repeat_for_channels(values) for values in (moments[0], moments[1] / count))
        scale, shift = 1 / ctx.xp.sqrt(var + view.dtype.type(self.eps)), ctx.xp.zeros_like(mean)
        ctx.save(scale=scale)
        if self.affine:
            scale, shift = scale * ctx.params["gamma"], shift + ctx.params["beta"]
        return self.normalise_view(ctx, view, mean, scale, shift)

    def reduce_backward(self, ctx: StepContext, dy: Any) -> Any:
        """Fill the gradients of gamma and beta; return this rank's sums for the statistics of the groups."""
        dbeta, dscale = self.channel_gradient_sums(ctx, dy)
        dgamma = dscale * ctx.scale
        if self.affine:
            ctx.grads["gamma"] = ctx.contribution_to_sum(dgamma.sum(axis=0))
            ctx.grads["beta"] = ctx.contribution_to_sum(dbeta.sum(axis=0))
            dgamma, dbeta = dgamma * ctx.params["gamma"], dbeta * ctx.params["gamma"]
        if not ctx.needs_input_gradient:
            return None
        return ctx.xp.stack([self._sum_by_group(dgamma), self._sum_by_group(dbeta)])

    def backward(self, ctx: StepContext, dy: Any) -> Any:
        """Return the gradient of the view, including the gradient through the statistics."""
        if not ctx.needs_input_gradient:
            return None
        count = prod(self.input_shape[:-1]) * (dy.shape[-1] // self.group_count_for(self.input_shape))
        dgamma, dbeta = (self._repeat_for_channels(sums / count) for sums in ctx.reduced)
        dy_factor = ctx.scale * ctx.params["gamma"] if self.affine else ctx.scale
        return self.view_gradient(ctx, dy, dy_factor, (-ctx.scale * ctx.scale * dgamma, -ctx.scale * dbeta))

    def _sum_by_group(self, sums: Any) -> Any:
        """Return the sums of each group (n, groups), given the sums of the channels (n, C)."""
        groups = self.group_count_for(self.input_shape)
        return sums.reshape(len(sums), groups, sums.shape[-1] // groups).sum(axis=-1)

    def _repeat_for_channels(self, values: Any) -> Any:
        """Return one value per channel (n, C), given the values of the groups (n, groups)."""
        (num_samples, num_groups), channels = values.shape, self.input_shape[-1]
        if num_groups == channels:
            return values
        repeated = namespace(values).broadcast_to(values[..., None], (num_samples, num_groups, channels // num_groups))
        return repeated.reshape(num_samples, channels)


class GroupNormLayer(SampleNormLayer):
    """Normalisation of each group of consecutive channels of a sample over all its cells (Wu and He 2018).

    Parameters
    ----------
    groups : int
        Number of groups; must divide the input's channels.
    eps : float
        Constant added to the variance.
    affine : bool
        Whether to scale and shift each channel by 'gamma' and 'beta'.
    """

    def __init__(
        self, groups: Count = 32, *, eps: Positive = 1e-5, affine: bool = True, name: str | None = None
    ) -> None:
        super().__init__(eps, affine, name)
        self.groups = groups

    def group_count_for(self, input_shape: Shape) -> int:
        """Return `groups`."""
        if input_shape[-1] % self.groups:
            raise ConfigError(f"groups {self.groups} must divide the input's {counted(input_shape[-1], 'channel')}")
        return self.groups


class InstanceNormLayer(SampleNormLayer):
    """Normalisation of each channel of a sample over all its cells, without running statistics (Ulyanov et al. 2016).

    Parameters
    ----------
    eps, affine
        As in GroupNormLayer.
    """

    def __init__(self, *, eps: Positive = 1e-5, affine: bool = False, name: str | None = None) -> None:
        super().__init__(eps, affine, name)

    def group_count_for(self, input_shape: Shape) -> int:
        """Return the number of channels."""
        if len(input_shape) < 2:
            problem = f"instance normalisation needs an image, but its input has shape {input_shape}"
            raise ShapeError(f"{problem}; move it before the layers that return vectors, or use GroupNormLayer")
        if prod(input_shape[:-1]) == 1:
            raise ShapeError("instance normalisation of a single cell is 0; leave it out, or use GroupNormLayer")
        return input_shape[-1]


class GroupNormLayerDist(Dist, GroupNormLayer):
    """Group normalisation over tiles."""


class InstanceNormLayerDist(Dist, InstanceNormLayer):
    """Instance normalisation over tiles."""
