"""Adam, AdamW and LAMB."""

from __future__ import annotations

from typing import Any

from ..arrays.namespace import namespace
from ..registry.ranges import NotNegative, Positive, UnitInterval
from .base import Optimizer, update_running_mean
from .flat import FlatLayout, block_slices


class Adam(Optimizer):
    """Adaptive moments (Kingma and Ba 2015), equivalent to `torch.optim.Adam`.

    Parameters
    ----------
    learning_rate : float
        Learning rate.
    beta1, beta2 : float
        Decay rates of the running means of the gradient and of its square, in [0, 1).
    eps : float
        Term added to the root of the mean square for numerical stability; above 0.
    **kwargs
        weight_decay, decay_all, clip_norm, ema and schedule, as in Optimizer.

    Raises
    ------
    ConfigError
        If a value is out of range.
    """

    slot_names = ("mean", "square")
    has_momentum = True

    def __init__(
        self,
        learning_rate: NotNegative = 1e-3,
        *,
        beta1: UnitInterval = 0.9,
        beta2: UnitInterval = 0.999,
        eps: Positive = 1e-8,
        **kwargs: Any,
    ) -> None:
        super().__init__(learning_rate, **kwargs)
        self.beta1, self.beta2, self.eps = float(beta1), float(beta2), float(eps)

    def set_momentum(self, momentum: float) -> None:
        """Set beta1."""
        self.beta1 = momentum

    def apply(self, params: Any, grads: Any, slots: dict[str, Any], scratch: Any, rate: float, step: int) -> None:
        """Update one block in place by the bias-corrected mean over the bias-corrected root mean square."""
        params -= self.compute_update(grads, slots, scratch, rate, step)

    def compute_update(self, grads: Any, slots: dict[str, Any], scratch: Any, rate: float, step: int) -> Any:
        """Return the update of the parameters, in `scratch`, and update the slots of one block."""
        xp, mean, square = namespace(grads), slots["mean"], slots["square"]
        update_running_mean(mean, grads, self.beta1, scratch)
        square *= self.beta2
        xp.multiply(grads, grads, out=scratch)
        scratch *= 1.0 - self.beta2
        square += scratch
        step_count = step + 1
        xp.sqrt(square, out=scratch)
        scratch /= (1.0 - self.beta2**step_count) ** 0.5
        scratch += self.eps
        xp.divide(mean, scratch, out=scratch)
        scratch *= rate / (1.0 - self.beta1**step_count)
        return scratch


class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019), equivalent to `torch.optim.AdamW`.

    Parameters
    ----------
    learning_rate, beta1, beta2, eps
        As in Adam.
    weight_decay : float
        Each step subtracts learning_rate x weight_decay x parameter.
    **kwargs
        decay_all, clip_norm, ema and schedule, as in Optimizer.
    """

    decay_target = "weights"

    def __init__(self, learning_rate: NotNegative = 1e-3, *, weight_decay: NotNegative = 0.01, **kwargs: Any) -> None:
        super().__init__(learning_rate, weight_decay=weight_decay, **kwargs)


class LAMB(Adam):
    """LAMB: Adam with steps scaled to the norm of each parameter, for large batches (You et al. 2020).

    The step, including weight decay, is scaled by the ratio of the parameter's norm to the norm of the step, both
    computed over all ranks that own parts of the parameter; if either norm is 0, the scale is 1.

    Parameters
    ----------
    learning_rate, beta1, beta2, eps
        As in Adam.
    weight_decay : float
        Coefficient of the decay term, which is added to the step.
    **kwargs
        decay_all, clip_norm, ema and schedule, as in Optimizer.
    """

    decay_target = "direction"

    def __init__(
        self,
        learning_rate: NotNegative = 1e-3,
        *,
        eps: Positive = 1e-6,
        weight_decay: NotNegative = 0.01,
        **kwargs: Any,
    ) -> None:
        super().__init__(learning_rate, eps=eps, weight_decay=weight_decay, **kwargs)

    def apply(self, params: Any, grads: Any, slots: dict[str, Any], scratch: Any, rate: float, step: int) -> None:
        """Replace the gradients by Adam's update without the learning rate."""
        grads[...] = self.compute_update(grads, slots, scratch, 1.0, step)

    def update_whole_parameters(self, params: Any, grads: Any, rate: float, layout: FlatLayout) -> None:
        """Subtract the updates, scaled by learning rate and trust ratio."""
        xp = namespace(params)
        param_norms, update_norms = (xp.sqrt(layout.global_square_norms(array)) for array in (params, grads))
        both_positive = (param_norms > 0) & (update_norms > 0)
        trust_ratios = xp.where(both_positive, param_norms / xp.where(both_positive, update_norms, 1.0), 1.0)
        factors = (rate * trust_ratios).astype(params.dtype)
        for at, (start, stop) in enumerate(layout.spans):
            for block in block_slices(params, start, stop):
                grads[block] *= factors[at]
                params[block] -= grads[block]

    def num_reduced_norms(self, num_partitioned_parameters: int) -> int:
        """Return the number of reduced norms: those of any optimiser, and two per partitioned parameter."""
        return super().num_reduced_norms(num_partitioned_parameters) + 2 * num_partitioned_parameters
