"""Batch normalisation."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..comm import group_of
from ..errors import ConfigError
from ..initializers import Constant
from .base import Dist, Layer, Parameter, Shape
from .sums import LayerSum


class BatchNormLayer(Layer):
    """Normalises each channel over the batch and all cells (Ioffe and Szegedy 2015).

    While training, mean and variance are those of the whole batch over all tiles and replicas, weighted by their cells,
    in two passes so that nothing cancels. Parameters 'gamma' and 'beta' (C,), state 'mean' and 'var' (C,), the latter
    unbiased. Input and output (N, *spatial, C), local.

    Parameters
    ----------
    momentum : float
        Weight of the newest batch in the running statistics.
    eps : float
        Added to the variance.
    """

    def __init__(self, momentum: float = 0.1, eps: float = 1e-5, name: str | None = None) -> None:
        super().__init__(name)
        if not (0 <= momentum <= 1 and 0 < eps < np.inf):
            raise ConfigError(f"momentum {momentum} must be in [0, 1] and eps {eps} positive")
        self.momentum, self.eps = momentum, eps

    sums_image = True

    def sums_for(self, input_shape: Shape) -> list[LayerSum]:
        """Return those of the sums and cells, of the squares, and of the gradients."""
        group, channels = group_of(len(input_shape) > 1, replicas=True) or "", input_shape[-1]
        forward, back = (channels + 1, channels), 2 * channels
        return [*(LayerSum("forward", group, once=n) for n in forward), LayerSum("backward", group, once=back)]

    def parameters_for(self, input_shape: Shape) -> dict[str, Parameter]:
        """Return 'gamma' and 'beta'."""
        return {"gamma": Parameter(input_shape[-1:], Constant(1.0)), "beta": Parameter(input_shape[-1:])}

    def state_for(self, input_shape: Shape) -> dict[str, Parameter]:
        """Return the running 'mean' and 'var'."""
        return {"mean": Parameter(input_shape[-1:]), "var": Parameter(input_shape[-1:], Constant(1.0))}

    def forward(self, view: Any) -> Any:
        """Return the normalised cells."""
        mean, var = self._statistics(view) if self.phase.training else (self.state["mean"], self.state["var"])
        self.scale = 1 / np.sqrt(var + view.dtype.type(self.eps))
        self.normal = (view - mean) * self.scale
        return self.normal * self.params["gamma"] + self.params["beta"]

    def backward(self, dy: Any) -> Any:
        """Return the gradient through the statistics; fill those of gamma and beta."""
        by_gamma, by_beta = self.kernels.channel_sum(dy * self.normal), self.kernels.channel_sum(dy)
        self.grads["gamma"], self.grads["beta"] = self.share(by_gamma), self.share(by_beta)
        if not self.needs_input_gradient:
            return None
        through = self.params["gamma"] * self.scale
        if not self.phase.training:
            return dy * through
        sums = self.total(np.concatenate([by_gamma, by_beta]), replicas=True) / self.cells
        along, offset = np.split(sums, 2)
        dx = through * dy
        own = self.counted(dx)  # the statistics are those of cells that count
        own -= through * (offset + self.counted(self.normal) * along)
        return dx

    def _statistics(self, view: Any) -> tuple[Any, Any]:
        cells = self.counted(view)
        local = np.append(self.kernels.channel_sum(cells), view.dtype.type(cells.size // view.shape[-1]))
        *sums, self.cells = self.total(local, replicas=True)
        mean = np.asarray(sums, view.dtype) / self.cells
        from_mean = cells - mean
        var = self.total(self.kernels.channel_sum(from_mean * from_mean), replicas=True) / self.cells
        for name, new in (("mean", mean), ("var", var * (self.cells / max(1, self.cells - 1)))):
            self.state[name] += self.momentum * (new - self.state[name])
        return mean, var


class BatchNormLayerDist(Dist, BatchNormLayer):
    """Batch normalisation over tiles and replicas."""
