"""Stochastic gradient descent."""

from __future__ import annotations

from typing import Any

from ..arrays.namespace import namespace
from ..errors import ConfigError
from ..registry.ranges import NotNegative, UnitInterval
from .base import Optimizer


class SGD(Optimizer):
    """Gradient descent with momentum, equivalent to `torch.optim.SGD` (dampening 0).

    Parameters
    ----------
    learning_rate : float
        Learning rate.
    momentum : float
        Momentum factor, in [0, 1).
    nesterov : bool
        Use Nesterov momentum (Sutskever et al. 2013); requires momentum.
    **kwargs
        weight_decay, decay_all, clip_norm, ema and schedule, as in Optimizer.

    Raises
    ------
    ConfigError
        If a value is out of range, or `nesterov` is set without momentum.
    """

    def __init__(
        self, learning_rate: NotNegative = 0.01, *, momentum: UnitInterval = 0.0, nesterov: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(learning_rate, **kwargs)
        self.momentum, self.nesterov = float(momentum), bool(nesterov)
        if self.nesterov and not self.momentum:
            raise ConfigError("nesterov: true requires momentum; set momentum: 0.9, or remove nesterov")
        self.slot_names = ("momentum",) if self.momentum else ()
        self.has_momentum = bool(momentum)

    def set_momentum(self, momentum: float) -> None:
        """Set the momentum."""
        self.momentum = momentum

    def apply(self, params: Any, grads: Any, slots: dict[str, Any], scratch: Any, rate: float, step: int) -> None:
        """Update one block in place: buf = momentum * buf + grad; p -= rate * buf."""
        xp, direction = namespace(params), grads
        if self.momentum:
            momentum_buffer = slots["momentum"]
            momentum_buffer *= self.momentum
            momentum_buffer += grads
            direction = momentum_buffer
            if self.nesterov:
                xp.multiply(momentum_buffer, self.momentum, out=scratch)
                grads += scratch
                direction = grads
        xp.multiply(direction, rate, out=scratch)
        params -= scratch
