"""Normalisation of each sample by itself: group and instance normalisation."""

from __future__ import annotations

from abc import abstractmethod
from math import prod
from typing import Any

import numpy as np

from ..comm import group_of
from ..errors import ConfigError, ShapeError
from ..initializers import Constant
from .base import Dist, Layer, Parameter, Shape
from .sums import LayerSum


class SampleNormLayer(Layer):
    """Base of the layers that normalise groups of channels over all cells of a sample.

    Mean and (biased) variance are those of the whole image: each rank sums its own cells, and the tiles add up, in two
    passes so that nothing cancels. Training and evaluation are the same. Parameters 'gamma' and 'beta' (C,) if
    `affine`. Input and output (N, *spatial, C), local.
    """

    sums_image = True

    def __init__(self, eps: float, affine: bool, name: str | None) -> None:
        super().__init__(name)
        if not 0 < eps < np.inf:
            raise ConfigError(f"eps {eps}: needs a number above 0")
        self.eps, self.affine = eps, affine

    @abstractmethod
    def groups_for(self, input_shape: Shape) -> int:
        """Return the number of groups, or ConfigError."""

    def output_shape_for(self, input_shape: Shape) -> Shape:
        """Return the input's shape."""
        self.groups_for(input_shape)
        return input_shape

    def sums_for(self, input_shape: Shape) -> list[LayerSum]:
        """Return those of the means, of the variances, and of the gradients."""
        group, groups = group_of(len(input_shape) > 1, replicas=False), self.groups_for(input_shape)
        passes = [("forward", groups), ("forward", groups), ("backward", 2 * groups)]
        return [LayerSum(direction, group, each=numbers) for direction, numbers in passes] if group else []

    def parameters_for(self, input_shape: Shape) -> dict[str, Parameter]:
        """Return 'gamma' and 'beta', if any."""
        shape = input_shape[-1:]
        return {"gamma": Parameter(shape, Constant(1.0)), "beta": Parameter(shape)} if self.affine else {}

    def forward(self, view: Any) -> Any:
        """Return the normalised cells."""
        from_mean = view - self._mean(self.kernels.sample_sum(self.counted(view)), view.shape)
        counted = self.counted(from_mean)
        var = self._mean(self.kernels.sample_sum(counted * counted), view.shape)
        self.scale = 1 / np.sqrt(var + self.eps)
        self.normal = from_mean * self.scale
        if not self.affine:
            return self.normal.copy()  # the next layer may work in place
        return self.normal * self.params["gamma"] + self.params["beta"]

    def backward(self, dy: Any) -> Any:
        """Return the gradient through the statistics; fill those of gamma and beta."""
        if self.affine:
            self.grads["gamma"] = self.share(self.kernels.channel_sum(dy * self.normal))
            self.grads["beta"] = self.share(self.kernels.channel_sum(dy))
            dy = dy * self.params["gamma"]
        if not self.needs_input_gradient:
            return None
        both = np.concatenate([self.kernels.sample_sum(dy * self.normal), self.kernels.sample_sum(dy)])
        means = self._mean(both, (2 * len(dy), *dy.shape[1:]))
        along, offset = means[: len(dy)], means[len(dy) :]
        dx = self.scale * dy
        own = self.counted(dx)  # the statistics are those of cells that count
        own -= self.scale * (offset + self.counted(self.normal) * along)
        return dx

    def _mean(self, sums: Any, shape: Shape) -> Any:
        """Return the groups' means over all tiles, for each channel (N, 1, ..., C), from sums (N, C) over own cells."""
        groups, channels = self.groups_for(self.input_shape), self.input_shape[-1]
        each = channels // groups
        by_group = np.ascontiguousarray(sums.reshape(len(sums), groups, each).sum(axis=-1))
        means = self.total(by_group) / (prod(self.input_shape[:-1]) * each)
        return np.repeat(means, each, axis=1).reshape(shape[0], *(1 for _ in shape[1:-1]), channels)


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

    def __init__(self, groups: int = 32, eps: float = 1e-5, affine: bool = True, name: str | None = None) -> None:
        super().__init__(eps, affine, name)
        if isinstance(groups, bool) or not isinstance(groups, int) or groups < 1:
            raise ConfigError(f"groups {groups}: needs an integer of at least 1")
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

    def __init__(self, eps: float = 1e-5, affine: bool = False, name: str | None = None) -> None:
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
