"""RMSprop."""

from __future__ import annotations

from typing import Any

from ..arrays.namespace import namespace
from ..registry.ranges import NotNegative, Positive, UnitInterval
from .base import Optimizer, update_running_mean


class RMSprop(Optimizer):
    """RMSprop (Hinton 2012): gradients are divided by their running root mean square, as in `torch.optim.RMSprop`.

    Parameters
    ----------
    learning_rate : float
        Learning rate.
    alpha : float
        Decay rate of the running mean of the squares, in [0, 1).
    momentum : float
        Momentum factor, in [0, 1).
    centered : bool
        Divide by the running standard deviation instead.
    eps : float
        Term added to the divisor for numerical stability; above 0.
    **kwargs
        weight_decay, decay_all, clip_norm, ema and schedule, as in Optimizer.
    """

    def __init__(
        self,
        learning_rate: NotNegative = 0.01,
        *,
        alpha: UnitInterval = 0.99,
        momentum: UnitInterval = 0.0,
        centered: bool = False,
        eps: Positive = 1e-8,
        **kwargs: Any,
    ) -> None:
        super().__init__(learning_rate, **kwargs)
        self.alpha, self.momentum, self.centered, self.eps = float(alpha), float(momentum), centered, float(eps)
        self.slot_names = ("square", *(["mean"] if centered else []), *(["momentum"] if momentum else []))
        self.has_momentum = bool(momentum)

    def set_momentum(self, momentum: float) -> None:
        """Set the momentum."""
        self.momentum = momentum

    def apply(self, params: Any, grads: Any, slots: dict[str, Any], scratch: Any, rate: float, step: int) -> None:
        """Update one block in place."""
        xp, square = namespace(params), slots["square"]
        square *= self.alpha
        xp.multiply(grads, grads, out=scratch)
        scratch *= 1.0 - self.alpha
        square += scratch
        if self.centered:
            mean = slots["mean"]
            update_running_mean(mean, grads, self.alpha, scratch)
            xp.multiply(mean, mean, out=scratch)
            xp.subtract(square, scratch, out=scratch)
            xp.sqrt(scratch, out=scratch)
        else:
            xp.sqrt(square, out=scratch)
        scratch += self.eps
        xp.divide(grads, scratch, out=scratch)
        if self.momentum:
            momentum_buffer = slots["momentum"]
            momentum_buffer *= self.momentum
            momentum_buffer += scratch
            xp.multiply(momentum_buffer, rate, out=scratch)
        else:
            scratch *= rate
        params -= scratch
