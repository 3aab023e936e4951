"""Batch normalisation."""

from __future__ import annotations

from math import prod
from typing import Annotated, Any

from ..comm import reduction_group
from ..errors import ShapeError
from ..initializers import Constant
from ..registry.ranges import Positive, between
from .base import Dist, Parameter, Shape
from .context import StepContext
from .norm import NormLayer
from .reduction import Reduction


class BatchNormLayer(NormLayer):
    """Normalisation of each channel over the batch and all cells (Ioffe and Szegedy 2015).

    In training, mean and variance are computed over the whole batch, on all tiles and replicas, weighted by their cell
    counts; moments of ranks are combined without cancellation. A batch with a single value per channel is rejected.
    Parameters 'gamma' and 'beta' (C,), state 'mean' and 'var' (C,), the latter unbiased. Input and output
    (N, *spatial, C) per tile.

    Parameters
    ----------
    momentum : float
        Weight of the current batch in the running statistics.
    eps : float
        Constant added to the variance.
    """

    def __init__(
        self, momentum: Annotated[float, between(0, 1)] = 0.1, eps: Positive = 1e-5, *, name: str | None = None
    ) -> None:
        super().__init__(name=name)
        self.momentum, self.eps = momentum, eps

    fusible_activation_kind = "is_relu"
    saved_bytes_and_elements = (0, 0)
    reduce_needed_in_recomputation = False
    can_recompute_output = in_place = True

    def reductions_for(self, input_shape: Shape) -> list[Reduction]:
        """Return the moments of the batch, and the sums of the gradients."""
        group, channels = reduction_group(len(input_shape) > 1, over_replicas=True), input_shape[-1]
        return [
            Reduction("forward", group, fixed_elements=1 + 2 * channels, combine="moments"),
            Reduction("backward", group, fixed_elements=2 * channels, needed_by_parameters=False),
        ]

    def parameters_for(self, input_shape: Shape) -> dict[str, Parameter]:
        """Return 'gamma' and 'beta'."""
        return {"gamma": Parameter(input_shape[-1:], Constant(1.0)), "beta": Parameter(input_shape[-1:])}

    def state_for(self, input_shape: Shape) -> dict[str, Parameter]:
        """Return the running 'mean' and 'var'."""
        return {"mean": Parameter(input_shape[-1:]), "var": Parameter(input_shape[-1:], Constant(1.0))}

    def reduce(self, ctx: StepContext, view: Any) -> Any:
        """Return count, means and sums of squared differences of this rank's cells; None in evaluation."""
        if not ctx.training:
            return None
        cells = ctx.owned(view)
        (mean,), (squares,) = self.kernels.moments(cells)
        return ctx.xp.concatenate([ctx.xp.full((1,), cells.size // view.shape[-1], view.dtype), mean, squares])

    def forward(self, ctx: StepContext, view: Any) -> Any:
        """Return the normalised cells."""
        affine = ctx.params["gamma"], ctx.params["beta"]
        if ctx.training:
            # reading the count waits for the device, and is needed only where this rank has a single value
            if prod(self.input_shape[:-1]) == 1 >= len(view) and ctx.reduced[0] == 1:
                raise ShapeError(
                    f"layer '{self.name}': a batch of 1 sample has one value per channel here, whose variance is 0;"
                    " train on batches of at least 2 samples, also at the end of an epoch, or use GroupNormLayer"
                )
            ctx.save(count=ctx.reduced[0])
            running = ctx.state["mean"], ctx.state["var"]
            channel_arrays = self.kernels.batch_scale_and_shift(ctx.reduced, running, affine, self.momentum, self.eps)
        else:
            channel_arrays = self.kernels.scale_and_shift(ctx.state["mean"].copy(), ctx.state["var"], affine, self.eps)
        ctx.save(scale=channel_arrays[3])
        return self.normalise_view(ctx, view, *(array[None] for array in channel_arrays[:3]))

    def reduce_backward(self, ctx: StepContext, dy: Any) -> Any:
        """Fill the gradients of gamma and beta; return this rank's contributions to both in one array."""
        (dbeta,), (dscale,) = self.channel_gradient_sums(ctx, dy)
        dgamma = dscale * ctx.scale
        ctx.grads["gamma"], ctx.grads["beta"] = ctx.contribution_to_sum(dgamma), ctx.contribution_to_sum(dbeta)
        return ctx.xp.concatenate([dgamma, dbeta]) if ctx.training and ctx.needs_input_gradient else None

    def backward(self, ctx: StepContext, dy: Any) -> Any:
        """Return the gradient of the view, including the gradient through the statistics."""
        if not ctx.needs_input_gradient:
            return None
        if ctx.reduced is None:
            return self.view_gradient(ctx, dy, (ctx.params["gamma"] * ctx.scale)[None], None)
        dy_factor, *statistics = self.kernels.batch_gradient_factors(
            ctx.reduced, ctx.count, ctx.params["gamma"], ctx.scale
        )
        return self.view_gradient(ctx, dy, dy_factor[None], [array[None] for array in statistics])


class BatchNormLayerDist(Dist, BatchNormLayer):
    """Batch normalisation over tiles and replicas."""
