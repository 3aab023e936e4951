"""Custom layers of generated networks, written as in docs/adding_a_layer.md."""

from __future__ import annotations

from itertools import product
from math import prod
from typing import Any

import numpy as np

import neondist as nd


def ramp(box: nd.Box, dtype: Any = "float64") -> np.ndarray:
    """Return a number for each cell of a box in image coordinates, (*shape, 1)."""
    cells = [np.arange(first, first + n) for first, n in zip(box.lo, box.shape, strict=True)]
    return np.cos(sum(np.ix_(*cells)))[..., None].astype(dtype)


class OwnStencilLayer(nd.Layer):
    """Squares of weighted sums over a window, with weights 'taps' (*kernel, C), channel by channel."""

    def __init__(self, kernel_size: Any, padding: Any = 0, mode: Any = "zeros", *, name=None, scheme=None) -> None:
        super().__init__(name=name, scheme=scheme)
        self.kernel_size, self.padding, self.mode = kernel_size, padding, mode

    def window_for(self, input_shape):
        ndim = len(input_shape) - 1
        kernel = (self.kernel_size,) * ndim if isinstance(self.kernel_size, int) else self.kernel_size
        padding = (self.padding,) * ndim if isinstance(self.padding, int) else self.padding
        return nd.Window(kernel=kernel, stride=(1,) * ndim, padding=padding, dilation=(1,) * ndim, mode=self.mode)

    def parameters_for(self, input_shape):
        return {"taps": nd.Parameter((*self.window_for(input_shape).kernel, input_shape[-1]), nd.Uniform(-1, 1))}

    def shifted(self, ctx, view):
        taps = ctx.params["taps"]
        for at in product(*map(range, taps.shape[:-1])):
            yield at, view[(slice(None), *(slice(i, i + n) for i, n in zip(at, ctx.output_box.shape, strict=True)))]

    def forward(self, ctx, view):
        sums = sum(part * ctx.params["taps"][at] for at, part in self.shifted(ctx, view))
        ctx.save(view=view, sums=sums)
        return sums * sums / 4

    def backward(self, ctx, dy):
        dview, dtaps = ctx.xp.zeros_like(ctx.view), ctx.xp.zeros_like(ctx.params["taps"])
        dsums = dy * ctx.sums / 2
        for (at, part), (_, dpart) in zip(self.shifted(ctx, ctx.view), self.shifted(ctx, dview), strict=True):
            dpart += dsums * ctx.params["taps"][at]
            dtaps[at] = ctx.kernels.channel_sum(dsums * part)
        ctx.grads["taps"] = dtaps
        return dview


class OwnGainLayer(nd.Layer):
    """Trained factor for each channel."""

    def parameters_for(self, input_shape):
        return {"gain": nd.Parameter(input_shape[-1:], nd.Constant(1.0))}

    def forward(self, ctx, view):
        ctx.save(view=view)
        return view * ctx.params["gain"]

    def backward(self, ctx, dy):
        ctx.grads["gain"] = ctx.contribution_to_sum(ctx.kernels.channel_sum(dy * ctx.view))
        return dy * ctx.params["gain"]


class OwnCellGainLayer(nd.Layer):
    """Trained factor for each cell and channel, stored with its tile."""

    def parameters_for(self, input_shape):
        return {"gain": nd.Parameter(input_shape, nd.Constant(1.0), layout=nd.Tiled(len(input_shape) - 1))}

    def forward(self, ctx, view):
        ctx.save(view=view)
        return view * ctx.params["gain"]

    def backward(self, ctx, dy):
        ctx.grads["gain"] = (dy * ctx.view).sum(axis=0)
        return dy * ctx.params["gain"]


class OwnProjectionLayer(nd.Layer):
    """Products with 'weights', whose rows are stored with the inputs."""

    layout = nd.Shard

    def __init__(self, out_features: int, *, name=None) -> None:
        super().__init__(name=name)
        self.out_features = out_features

    def output_shape_for(self, input_shape):
        return (self.out_features,)

    def parameters_for(self, input_shape):
        shape = prod(input_shape), self.out_features
        return {"weights": nd.Parameter(shape, nd.Uniform(-0.5, 0.5), layout=nd.Shard(input_shape))}

    def reductions_for(self, input_shape):
        return [nd.Reduction("forward", "tiles", result_elements_per_sample=self.out_features)]

    def reduce(self, ctx, view):
        ctx.save(view=view)
        return view.reshape(len(view), prod(view.shape[1:])) @ ctx.params["weights"]

    def forward(self, ctx, view):
        return ctx.reduced

    def backward(self, ctx, dy):
        ctx.grads["weights"] = ctx.view.reshape(len(dy), prod(ctx.view.shape[1:])).T @ dy
        return (dy @ ctx.params["weights"].T).reshape(ctx.view.shape)


class OwnCenterLayer(nd.Layer):
    """Subtraction of the mean of each channel over an image."""

    saves_input = saves_output = False

    def reductions_for(self, input_shape):
        directions = ("forward", "backward")
        return [nd.Reduction(which, "tiles", result_elements_per_sample=input_shape[-1]) for which in directions]

    def reduce(self, ctx, view):
        return ctx.kernels.sample_sum(ctx.owned(view))

    def forward(self, ctx, view):
        return view - self.means(ctx, view)

    def reduce_backward(self, ctx, dy):
        return ctx.kernels.sample_sum(dy)

    def backward(self, ctx, dy):
        dx = dy.copy()
        counted = ctx.owned(dx)
        counted -= self.means(ctx, dy)
        return dx

    def means(self, ctx, like):
        cells = prod(self.input_shape[:-1])
        return (ctx.reduced / cells).reshape(len(like), *(1,) * (like.ndim - 2), like.shape[-1])


class OwnExcitationLayer(nd.Layer):
    """Factor for each channel: tanh of products of the means over the image with 'weights'.

    The layer saves the array that `reduce_backward` returns, reads `ctx.reduced` there, and modifies it in place.
    """

    def parameters_for(self, input_shape):
        return {"weights": nd.Parameter(input_shape[-1:] * 2, nd.Uniform(-1, 1))}

    def reductions_for(self, input_shape):
        directions = ("forward", "backward")
        return [nd.Reduction(which, "tiles", result_elements_per_sample=input_shape[-1]) for which in directions]

    def reduce(self, ctx, view):
        return ctx.kernels.sample_sum(ctx.owned(view)).reshape(len(view), view.shape[-1])

    def forward(self, ctx, view):
        means = ctx.reduced
        means /= prod(self.input_shape[:-1])
        ctx.save(view=view, factor=ctx.xp.tanh(means @ ctx.params["weights"]))
        return view * self.broadcast(ctx.factor, view)

    def reduce_backward(self, ctx, dy):
        ctx.save(own=ctx.kernels.sample_sum(dy * ctx.view).reshape(len(dy), dy.shape[-1]) * (1 - ctx.factor**2))
        ctx.save(means=ctx.reduced / prod(self.input_shape[:-1]))
        return ctx.own

    def backward(self, ctx, dy):
        ctx.grads["weights"] = ctx.means.T @ ctx.own
        ctx.reduced[...] /= prod(self.input_shape[:-1])
        dx = dy * self.broadcast(ctx.factor, dy)
        counted = ctx.owned(dx)
        counted += self.broadcast(ctx.reduced @ ctx.params["weights"].T, dy)
        return dx

    def broadcast(self, array, like):
        return array.reshape(len(like), *(1,) * (like.ndim - 2), like.shape[-1])


class OwnBatchCenterLayer(nd.Layer):
    """Subtraction of the mean of each channel over the batch, in evaluation of its running mean 'mean'."""

    saves_input = saves_output = False

    def reductions_for(self, input_shape):
        group, channels = "world" if len(input_shape) > 1 else "replicas", input_shape[-1]
        return [
            nd.Reduction("forward", group, fixed_elements=1 + channels),
            nd.Reduction("backward", group, fixed_elements=channels),
        ]

    def state_for(self, input_shape):
        return {"mean": nd.Parameter(input_shape[-1:])}

    def reduce(self, ctx, view):
        if not ctx.training:
            return None
        cells = ctx.owned(view).reshape(-1, view.shape[-1])
        return ctx.xp.concatenate([ctx.xp.full(1, len(cells), view.dtype), cells.sum(axis=0)])

    def forward(self, ctx, view):
        if not ctx.training:
            return view - ctx.state["mean"]
        ctx.save(count=ctx.reduced[0])
        mean = ctx.reduced[1:] / ctx.count
        ctx.state["mean"][...] += 0.25 * (mean - ctx.state["mean"])
        return view - mean

    def reduce_backward(self, ctx, dy):
        return dy.reshape(-1, dy.shape[-1]).sum(axis=0) if ctx.training else None

    def backward(self, ctx, dy):
        dx = dy.copy()
        if ctx.training:
            counted = ctx.owned(dx)
            counted -= ctx.reduced / ctx.count
        return dx


class OwnNoiseLayer(nd.Layer):
    """Product with a uniform random number in training, drawn for every value."""

    saves_input = saves_output = False
    step_dependent = True

    def forward(self, ctx, view):
        ctx.save(factor=(0.5 + ctx.random("noise").uniform()).astype(view.dtype) if ctx.training else 1)
        return view * ctx.factor

    def backward(self, ctx, dy):
        return dy * ctx.factor


class OwnCounterLayer(nd.Layer):
    """Quotient by the number of training passes so far, 'mean', plus 2."""

    saves_input = saves_output = False

    def state_for(self, input_shape):
        return {"mean": nd.Parameter((1,))}

    def forward(self, ctx, view):
        if ctx.training:
            ctx.state["mean"][...] += 1
        ctx.save(divisor=2 + abs(ctx.state["mean"]))
        return view / ctx.divisor

    def backward(self, ctx, dy):
        return dy / ctx.divisor


class OwnMomentLayer(nd.Layer):
    """Sum of all cells of an image, times a function of their position."""

    position_dependent = True

    def output_shape_for(self, input_shape):
        return input_shape[-1:]

    def reductions_for(self, input_shape):
        return [nd.Reduction("forward", "tiles", result_elements_per_sample=input_shape[-1])]

    def reduce(self, ctx, view):
        return ctx.kernels.sample_sum(ctx.owned(view * ramp(ctx.input_box, view.dtype)))

    def forward(self, ctx, view):
        ctx.save(shape=view.shape)
        return ctx.reduced

    def backward(self, ctx, dy):
        dy = dy.reshape(len(dy), *(1,) * (len(ctx.shape) - 2), dy.shape[-1])
        return dy * ramp(ctx.input_box, dy.dtype)


class OwnSpreadLayer(nd.Layer):
    """Image whose cells are a vector, times a function of their position."""

    position_dependent = True

    def __init__(self, extent: Any, *, name=None) -> None:
        super().__init__(name=name)
        self.extent = tuple(extent)

    def output_shape_for(self, input_shape):
        return *self.extent, *input_shape

    def reductions_for(self, input_shape):
        return [nd.Reduction("backward", "tiles", result_elements_per_sample=input_shape[-1])]

    def forward(self, ctx, view):
        view = view.reshape(len(view), *(1,) * len(self.extent), view.shape[-1])
        return view * ramp(ctx.output_box, view.dtype)

    def reduce_backward(self, ctx, dy):
        return ctx.kernels.sample_sum(dy * ramp(ctx.output_box, dy.dtype))

    def backward(self, ctx, dy):
        return ctx.reduced


class OwnStencilLayerDist(nd.Dist, OwnStencilLayer): ...


class OwnGainLayerDist(nd.Dist, OwnGainLayer): ...


class OwnCellGainLayerDist(nd.Dist, OwnCellGainLayer): ...


class OwnProjectionLayerDist(nd.Dist, OwnProjectionLayer): ...


class OwnCenterLayerDist(nd.Dist, OwnCenterLayer): ...


class OwnExcitationLayerDist(nd.Dist, OwnExcitationLayer): ...


class OwnBatchCenterLayerDist(nd.Dist, OwnBatchCenterLayer): ...


class OwnNoiseLayerDist(nd.Dist, OwnNoiseLayer): ...


class OwnCounterLayerDist(nd.Dist, OwnCounterLayer): ...


class OwnMomentLayerDist(nd.Dist, OwnMomentLayer): ...


class OwnSpreadLayerDist(nd.Dist, OwnSpreadLayer): ...
