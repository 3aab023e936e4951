"""Standard initialisers."""

from __future__ import annotations

from math import sqrt

import numpy as np

from ..arrays import rng
from ..errors import ConfigError
from ..registry.ranges import Finite, NotNegative
from .base import Initializer


class Constant(Initializer):
    """Fill with a constant value."""

    def __init__(self, value: Finite = 0.0) -> None:
        self.value = float(value)

    def values(self, stream_key: int, indices: np.ndarray, fan_in: int, fan_out: int) -> np.ndarray:
        """Return an array filled with the constant."""
        return np.full(indices.shape, float(self.value))


class Gaussian(Initializer):
    """Normal values of standard deviation `scale`."""

    def __init__(self, scale: NotNegative = 0.01) -> None:
        self.scale = float(scale)

    def values(self, stream_key: int, indices: np.ndarray, fan_in: int, fan_out: int) -> np.ndarray:
        """Return normal values."""
        return self.scale * rng.normal(stream_key, indices)


class Uniform(Initializer):
    """Uniform values in [low, high)."""

    def __init__(self, low: Finite = -0.1, high: Finite = 0.1) -> None:
        self.low, self.high = float(low), float(high)
        if self.low > self.high:
            raise ConfigError(f"low {low} is above high {high}; swap them")

    def values(self, stream_key: int, indices: np.ndarray, fan_in: int, fan_out: int) -> np.ndarray:
        """Return uniform values."""
        return self.low + (self.high - self.low) * rng.uniform(stream_key, indices)


class FanInNormal(Initializer):
    """Normal values of standard deviation gain / sqrt(fan_in) (He et al. 2015: gain sqrt(2) for ReLU)."""

    def __init__(self, gain: NotNegative = 1.0) -> None:
        self.gain = float(gain)

    def values(self, stream_key: int, indices: np.ndarray, fan_in: int, fan_out: int) -> np.ndarray:
        """Return scaled normal values."""
        return self.gain / sqrt(max(1, fan_in)) * rng.normal(stream_key, indices)


class FanInUniform(Initializer):
    """Uniform values within 1 / sqrt(fan_in) of zero, the default of convolutions and FC layers (as in PyTorch)."""

    def values(self, stream_key: int, indices: np.ndarray, fan_in: int, fan_out: int) -> np.ndarray:
        """Return scaled uniform values."""
        return (2.0 * rng.uniform(stream_key, indices) - 1.0) / sqrt(max(1, fan_in))


class GlorotUniform(Initializer):
    """Uniform values of variance 2 / (fan_in + fan_out) (Glorot and Bengio 2010)."""

    def values(self, stream_key: int, indices: np.ndarray, fan_in: int, fan_out: int) -> np.ndarray:
        """Return scaled uniform values."""
        limit = sqrt(6.0 / max(1, fan_in + fan_out))
        return limit * (2.0 * rng.uniform(stream_key, indices) - 1.0)
