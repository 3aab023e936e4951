"""Base of optimisers: slots, the scheduled learning rate, and iteration over a flat array."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from typing import Any, Literal

from ..arrays.namespace import namespace
from ..errors import ConfigError, set_error_subject
from ..registry import Registered
from ..registry.arguments import type_checked
from ..registry.ranges import NotNegative, Positive, UnitInterval
from .flat import FlatLayout, elements_per_block
from .schedule import Schedule

AVERAGE_SLOT = "average"
"""Slot of the parameters' running mean."""


class ScheduledOptimizer:
    """Base of optimisers with a schedule of the learning rate."""

    schedule: Schedule | None
    #: whether there is a momentum that a schedule can change
    has_momentum = False

    def rate_factor_at(self, epoch: float, validation_losses: Sequence[float | None] = ()) -> float:
        """Return the schedule's factor at `epoch` (1 without a schedule), which `update` takes as `rate_factor`.

        `validation_losses` has one entry per epoch so far.
        """
        if isinstance(self.schedule, Schedule):  # other objects only need `factor`
            return float(self.schedule.factor_given_losses(epoch, validation_losses))
        return 1.0 if self.schedule is None else float(self.schedule.factor(epoch))

    def momentum_at(self, epoch: float) -> float | None:
        """Return the scheduled momentum at `epoch`; None if it is not scheduled."""
        return self.schedule.momentum_at(epoch) if isinstance(self.schedule, Schedule) else None

    def check_schedule_covers(self, epochs: int) -> None:
        """Raise ConfigError if the schedule ends before `epochs` epochs, or there is no momentum for it to change."""
        if isinstance(self.schedule, Schedule):
            with set_error_subject(self.schedule):
                self.schedule.check_schedule_covers(epochs)
                if self.momentum_at(math.inf) is not None and not self.has_momentum:
                    raise ConfigError(
                        f"momentum: {type(self).__name__} has no momentum to schedule; set momentum: 0.9 in the"
                        " optimiser or remove momentum from the schedule"
                    )


class Optimizer(ScheduledOptimizer, Registered, ABC):
    """Base class of optimisers.

    A subclass names its slots (state arrays, each as long as the parameters) and overrides `apply`. The optimiser
    itself holds no arrays, so one object can serve several models.

    Parameters
    ----------
    learning_rate : float
        Learning rate, at least 0.
    weight_decay : float
        Coefficient of the L2 penalty: weight_decay x parameter is added to the gradient, as in PyTorch.
    decay_all : bool
        Whether weight decay also applies to biases and to scales and shifts of normalisation layers.
    clip_norm : float, optional
        Maximum total norm of the gradients, over all ranks, as in `torch.nn.utils.clip_grad_norm_`.
    ema : float, optional
        Decay rate of an exponential moving average of the parameters, which is used for evaluation and, from
        checkpoints, by `predict` and `evaluate`. Running statistics of normalisation layers are not averaged.
    schedule : Schedule, optional
        Multiplier of the learning rate as a function of the epoch.
    """

    slot_names: tuple[str, ...] = ()
    #: target of weight decay: the gradient, the step ('direction') or, decoupled, the parameters ('weights')
    decay_target: Literal["gradient", "weights", "direction"] = "gradient"

    @type_checked
    def __init__(
        self,
        learning_rate: NotNegative,
        *,
        weight_decay: NotNegative = 0.0,
        decay_all: bool = True,
        clip_norm: Positive | None = None,
        ema: UnitInterval | None = None,
        schedule: Schedule | None = None,
    ) -> None:
        self.learning_rate, self.weight_decay = float(learning_rate), float(weight_decay)
        self.decay_all, self.clip_norm, self.ema = decay_all, clip_norm, ema
        self.schedule = schedule

    @property
    def all_slot_names(self) -> tuple[str, ...]:
        """Names of all slots, including the running mean of the parameters."""
        return self.slot_names if self.ema is None else (*self.slot_names, AVERAGE_SLOT)

    def create_slots(self, params: Any) -> dict[str, Any]:
        """Return new zeroed slots for parameters; the caller keeps them and passes them to `update`."""
        return {name: namespace(params).zeros_like(params) for name in self.all_slot_names}

    def update(
        self,
        params: Any,
        grads: Any,
        slots: dict[str, Any],
        step: int,
        rate_factor: float = 1.0,
        layout: FlatLayout | None = None,
    ) -> None:
        """Update `params` and `slots` in place by one step. Collective if norms span several ranks.

        Parameters
        ----------
        params, grads : ndarray, 1-D
            All parameters and their summed gradients; `grads` may be overwritten.
        slots : dict of str to ndarray
            Slots returned by `create_slots` for these parameters.
        step : int
            Number of updates before this one: 0 for the first.
        rate_factor : float
            Multiplier of the learning rate.
        layout : FlatLayout, optional
            Layout of the parameters. Default: a single parameter, whole on this rank.
        """
        layout = layout or FlatLayout.single_parameter(params.size)
        rate = self.learning_rate * rate_factor
        xp = namespace(params)
        if self.clip_norm is not None:
            norm = xp.sqrt(layout.global_square_norms(grads).sum())
            self._multiply_in_place(grads, layout, xp.minimum(self.clip_norm / (norm + 1e-6), 1.0))
        scratch = xp.empty(min(elements_per_block(params), params.size), params.dtype)
        for block, applies_decay in layout.blocks_with_decay_flags(params, self.decay_all or not self.weight_decay):
            p, g = params[block], grads[block]
            buffer = scratch[: p.size]
            applies_decay = applies_decay and self.weight_decay > 0
            if applies_decay and self.decay_target == "gradient":
                xp.multiply(p, self.weight_decay, out=buffer)
                g += buffer
            if applies_decay and self.decay_target == "weights":
                p *= 1 - rate * self.weight_decay
            own_slots = {name: slots[name][block] for name in self.slot_names}
            if self.apply(p, g, own_slots, buffer, rate, step) is not None:
                with set_error_subject(self):
                    raise ConfigError(
                        f"optimizer: {type(self).__name__}.apply returns a value; update params and slots in place"
                    )
            if applies_decay and self.decay_target == "direction":
                xp.multiply(p, self.weight_decay, out=buffer)
                g += buffer
        self.update_whole_parameters(params, grads, rate, layout)
        if self.ema is not None:
            self._update_parameter_average(params, slots[AVERAGE_SLOT], scratch, step, layout)

    def with_momentum(self, momentum: float | None) -> Optimizer:
        """Return this optimiser with another momentum (None: unchanged); its slots remain valid."""
        if momentum is None:
            return self
        optimizer = copy(self)
        optimizer.set_momentum(momentum)
        return optimizer

    def set_momentum(self, momentum: float) -> None:
        """Set the momentum, if `has_momentum`."""
        raise NotImplementedError

    @abstractmethod
    def apply(self, params: Any, grads: Any, slots: dict[str, Any], scratch: Any, rate: float, step: int) -> None:
        """Update one block of `params` and `slots` in place; `grads` already include an L2 penalty.

        All arrays are 1-D and equally long; `grads` and `scratch` may be overwritten. `rate` is the scaled learning
        rate, `step` counts from 0.
        """

    def update_whole_parameters(self, params: Any, grads: Any, rate: float, layout: FlatLayout) -> None:
        """Update all parameters after `apply` has processed all blocks, for rules that need whole parameters."""

    def num_reduced_norms(self, num_partitioned_parameters: int) -> int:
        """Return the number of float64 values that a step reduces over ranks."""
        return num_partitioned_parameters * (self.clip_norm is not None)

    def _multiply_in_place(self, array: Any, layout: FlatLayout, factor: Any) -> None:
        factor = factor.astype(array.dtype)
        for block, _ in layout.blocks_with_decay_flags(array, decay_all=True):
            array[block] *= factor

    def _update_parameter_average(self, params: Any, average: Any, scratch: Any, step: int, layout: FlatLayout) -> None:
        decay_rate = self.ema if step else 0.0
        for block, _ in layout.blocks_with_decay_flags(params, decay_all=True):
            update_running_mean(average[block], params[block], decay_rate or 0.0, scratch[: params[block].size])


def update_running_mean(mean: Any, values: Any, decay_rate: float, scratch: Any) -> None:
    """Update a running mean in place: mean = decay_rate * mean + (1 - decay_rate) * values."""
    mean *= decay_rate
    namespace(values).multiply(values, 1.0 - decay_rate, out=scratch)
    mean += scratch
