"""What every optimiser shares: slots, the learning rate of a moment, and the walk over a flat array."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from ..errors import ConfigError
from ..namespace import namespace
from ..registry import Registered
from ..registry.arguments import checked
from ..registry.ranges import NotNegative
from .schedule import Schedule

BLOCK = 1 << 15  # cells per block: parameters, gradients, slots and scratch of one block stay in the cache


class Scheduled:
    """What follows a schedule."""

    schedule: Schedule | None

    def scale(self, epoch: float) -> float:
        """Return the schedule's factor at `epoch` (1 without a schedule), which `update` takes as `scale`."""
        return 1.0 if self.schedule is None else float(self.schedule.factor(epoch))

    def check(self, epochs: int) -> None:
        """Raise ConfigError, about the schedule, if a run of so many epochs would train on at rate 0."""
        if isinstance(self.schedule, Schedule):  # of others, a factor is all that is asked for
            try:
                self.schedule.check(epochs)
            except ConfigError as error:
                error.subject = self.schedule
                raise


class Optimizer(Scheduled, Registered, ABC):
    """A rule that turns gradients into new parameters.

    A subclass names its slots (arrays that it remembers from step to step, each as long as the parameters) and
    overrides `apply`. It holds no arrays itself, so that one optimiser can serve several models.

    Parameters
    ----------
    learning_rate : float
        Length of a step, at least 0.
    weight_decay : float
        This many times the parameters is added to the gradient of every parameter (an L2 penalty), as in PyTorch.
    schedule : Schedule, optional
        A factor on the learning rate over the epochs.
    """

    slot_names: tuple[str, ...] = ()

    @checked
    def __init__(
        self, learning_rate: NotNegative, *, weight_decay: NotNegative = 0.0, schedule: Schedule | None = None
    ) -> None:
        self.learning_rate, self.weight_decay = float(learning_rate), float(weight_decay)
        self.schedule = schedule

    def slots(self, params: Any) -> dict[str, Any]:
        """Return new zeroed slots for parameters; the caller keeps them and gives them to `update`."""
        return {name: namespace(params).zeros_like(params) for name in self.slot_names}

    def update(self, params: Any, grads: Any, slots: dict[str, Any], step: int, scale: float = 1.0) -> None:
        """Change `params` and `slots` in place by one step.

        Parameters
        ----------
        params, grads : ndarray, 1-D
            All parameters and their summed gradients; `grads` may be overwritten.
        slots : dict of str to ndarray
            What `slots` returned for these parameters.
        step : int
            Number of updates before this one: 0 at the first.
        scale : float
            Factor on the learning rate.
        """
        rate = self.learning_rate * scale
        xp = namespace(params)
        scratch = xp.empty(min(BLOCK, params.size), params.dtype)
        for start in range(0, params.size, BLOCK):
            block = slice(start, start + BLOCK)
            p, g = params[block], grads[block]
            room = scratch[: p.size]
            if self.weight_decay:
                xp.multiply(p, self.weight_decay, out=room)
                g += room
            self.apply(p, g, {name: slot[block] for name, slot in slots.items()}, room, rate, step)

    @abstractmethod
    def apply(
        self,
        params: Any,
        grads: Any,
        slots: dict[str, Any],
        scratch: Any,
        rate: float,
        step: int,
    ) -> None:
        """Change one block of `params` and `slots` in place; weight decay is already in `grads`.

        All arrays are 1-D and equally long; `grads` and `scratch` may be overwritten. `rate` is the scaled learning
        rate, `step` counts from 0.
        """
