"""Adam."""

from __future__ import annotations

from typing import Any

from ..namespace import namespace
from ..registry.ranges import NotNegative, Positive, Share
from .base import Optimizer
from .schedule import Schedule


class Adam(Optimizer):
    """Adaptive moments (Kingma and Ba 2015), as `torch.optim.Adam`.

    Parameters
    ----------
    learning_rate : float
        Length of a step.
    beta1, beta2 : float
        Memory of the running means of the gradient and of its square, in [0, 1).
    eps : float
        Added to the root of the mean square, against division by zero; above 0.
    weight_decay : float
        L2 penalty, added to the gradients.
    schedule : Schedule, optional
        A factor on the learning rate over the epochs.

    Raises
    ------
    ConfigError
        A value is out of its range.
    """

    slot_names = ("mean", "square")

    def __init__(
        self,
        learning_rate: NotNegative = 1e-3,
        *,
        beta1: Share = 0.9,
        beta2: Share = 0.999,
        eps: Positive = 1e-8,
        weight_decay: NotNegative = 0.0,
        schedule: Schedule | None = None,
    ) -> None:
        super().__init__(learning_rate, weight_decay=weight_decay, schedule=schedule)
        self.beta1, self.beta2, self.eps = float(beta1), float(beta2), float(eps)

    def apply(
        self,
        params: Any,
        grads: Any,
        slots: dict[str, Any],
        scratch: Any,
        rate: float,
        step: int,
    ) -> None:
        """Change one block in place by the bias-corrected mean over the bias-corrected root mean square."""
        xp, mean, square = namespace(params), slots["mean"], slots["square"]
        mean *= self.beta1
        xp.multiply(grads, 1.0 - self.beta1, out=scratch)
        mean += scratch
        square *= self.beta2
        xp.multiply(grads, grads, out=scratch)
        scratch *= 1.0 - self.beta2
        square += scratch
        count = step + 1
        xp.sqrt(square, out=scratch)
        scratch /= (1.0 - self.beta2**count) ** 0.5
        scratch += self.eps
        xp.divide(mean, scratch, out=scratch)
        scratch *= rate / (1.0 - self.beta1**count)
        params -= scratch
