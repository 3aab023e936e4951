"""Optimisers on servers: in-place updates of flat arrays by rules of neondist or PyTorch, described as JSON."""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import ConfigError
from ..optim import FlatLayout, Optimizer, ScheduledOptimizer
from ..registry import registered_classes, suggest
from ..strategies import Strategy
from .message import MessageError
from .placement import construct_from_message

if TYPE_CHECKING:
    from ..torch.training.losses_and_optimizers import TorchOptimizer

Slots = dict[str, np.ndarray]
"""Arrays of the length of the values, or scalars (shape ())."""


class Updater(ABC):
    """Stateless update rule on flat arrays."""

    @abstractmethod
    def update(
        self,
        values: np.ndarray,
        grads: np.ndarray,
        slots: Slots,
        step: int,
        scale: float,
        layout: FlatLayout | None = None,
    ) -> None:
        """Change values and slots in place by one step.

        Parameters
        ----------
        values, grads : ndarray, 1-D
            `grads` may be overwritten.
        slots : dict
            Empty before the first update, which fills it.
        step : int
            Number of updates before this one.
        scale : float
            Multiplier of the learning rate.
        layout : FlatLayout, optional
            Parameters in the flat arrays. Default: a single parameter.
        """

    @abstractmethod
    def initial_slot_values(self) -> dict[str, float]:
        """Return the initial value of each slot that has the length of the values."""

    @abstractmethod
    def require_independent_updates(self, whole_parameters: bool) -> None:
        """Raise ConfigError if parameters cannot be updated independently or, unless `whole_parameters`, in parts."""

    def skips_zero_gradients(self) -> bool:
        """Whether a zero gradient changes neither values nor slots, so that rows without a gradient need no update."""
        values, slots = np.ones(1), Slots()
        self.update(values, np.ones(1), slots, 0, 1.0)
        arrays_before = {name: array.copy() for name, array in slots.items() if array.ndim} | {"": values.copy()}
        self.update(values, np.zeros(1), slots, 1, 1.0)
        return all(np.array_equal(array, (slots | {"": values})[name]) for name, array in arrays_before.items())


class NeondistOptimizerUpdater(Updater):
    """Updater by an optimiser of neondist."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def update(
        self,
        values: np.ndarray,
        grads: np.ndarray,
        slots: Slots,
        step: int,
        scale: float,
        layout: FlatLayout | None = None,
    ) -> None:
        """Change values and slots in place by one step."""
        if not slots:
            slots.update(self.optimizer.create_slots(values))
        with np.errstate(all="ignore"):  # workers never push non-finite gradients
            self.optimizer.update(values, grads, slots, step, scale, layout)

    def initial_slot_values(self) -> dict[str, float]:
        """Return 0 for each slot."""
        return dict.fromkeys(self.optimizer.all_slot_names, 0.0)

    def require_independent_updates(self, whole_parameters: bool) -> None:
        """Reject optimisers that need norms over all parameters, or of partitioned parameters."""
        if self.optimizer.clip_norm is not None:
            raise ConfigError(
                "clip_norm: needs a norm over all servers; leave it out, or use sync: true and staleness: 0"
            )
        if not whole_parameters and self.optimizer.num_reduced_norms(1):
            name = type(self.optimizer).__name__
            raise ConfigError(f"optimizer: {name} updates whole parameters; choose a strategy without partitions")


class TorchUpdater(Updater):
    """Updater by an optimiser of torch.optim."""

    def __init__(self, optimizer: TorchOptimizer) -> None:
        self._optimizer = optimizer

    def update(
        self,
        values: np.ndarray,
        grads: np.ndarray,
        slots: Slots,
        step: int,
        scale: float,
        layout: FlatLayout | None = None,
    ) -> None:
        """Change values and slots in place by one step."""
        import torch

        tensor = torch.nn.Parameter(torch.from_numpy(values))
        optimizer = self._optimizer.create([tensor])
        if slots:
            optimizer.state[tensor] = {name: torch.from_numpy(array) for name, array in slots.items()}
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * scale
        tensor.grad = torch.from_numpy(grads)
        optimizer.step()
        for name, value in optimizer.state[tensor].items():
            if isinstance(value, torch.Tensor):
                slots[name] = value.detach().numpy()

    def initial_slot_values(self) -> dict[str, float]:
        """Return the slots of a new optimiser for value 0 and gradient 0."""
        values, slots = np.zeros(1), Slots()
        self.update(values, np.zeros(1), slots, 0, 1.0)
        return {name: float(array[0]) for name, array in slots.items() if array.shape}

    def require_independent_updates(self, whole_parameters: bool) -> None:
        """Reject optimisers that need whole parameters."""
        if not self._optimizer.elementwise:
            name = self._optimizer.constructor.__name__
            raise ConfigError(
                f"optimizer: {name} needs whole parameters, but servers hold parts; use an elementwise optimiser, such"
                " as Adam"
            )


def check_server_optimizer(optimizer: Any, strategy: Strategy) -> None:
    """Raise ConfigError if servers cannot apply an optimiser to the parameters of a strategy."""
    if getattr(optimizer, "ema", None) is not None:
        raise ConfigError("ema: is not supported on parameter servers; leave it out")
    unpartitioned = all(placement.partition is None for placement in strategy.parameters.values())
    make_updater(describe_optimizer(optimizer)).require_independent_updates(unpartitioned)


def describe_optimizer(optimizer: Any) -> dict[str, Any]:
    """Return the JSON description of an optimiser, without its schedule, which workers apply.

    Parameters
    ----------
    optimizer : Optimizer, TorchOptimizer, or torch.optim.Optimizer
        A torch.optim optimiser must have a single parameter group.

    Raises
    ------
    ConfigError
        The optimiser cannot be described, or its schedule changes the momentum.
    """
    if isinstance(optimizer, ScheduledOptimizer) and optimizer.momentum_at(math.inf) is not None:
        raise ConfigError("schedule: servers cannot change the momentum; leave it out of the schedule")
    if isinstance(optimizer, Optimizer):
        arguments = {name: value for name, value in optimizer.arguments().items() if name != "schedule"}
        return {"kind": "neondist", "name": type(optimizer).__name__, "arguments": arguments}
    import torch

    from ..torch.training.losses_and_optimizers import TorchOptimizer

    if isinstance(optimizer, TorchOptimizer) and not isinstance(optimizer.constructor, type):
        # a function that creates the optimiser: call it with weights and a bias to detect parameter groups
        optimizer = optimizer.create([torch.nn.Parameter(torch.zeros(shape)) for shape in ((1, 1), (1,))])
    if isinstance(optimizer, TorchOptimizer):
        cls, arguments = optimizer.constructor, dict(optimizer.options)
    else:
        cls = type(optimizer)
        if len(optimizer.param_groups) > 1:
            raise ConfigError(f"optimizer: {cls.__name__} has several parameter groups; servers support only one")
        parameters = inspect.signature(cls).parameters
        defaults = {name: parameter.default for name, parameter in parameters.items()}
        group = optimizer.param_groups[0]
        arguments = {name: value for name, value in group.items() if name in parameters and value != defaults[name]}
        arguments.pop("params")
    if not getattr(cls, "__module__", "").startswith("torch.optim."):
        raise ConfigError(f"optimizer: servers do not support {cls.__name__}; use one of neondist or torch.optim")
    arguments = {name: list(value) if isinstance(value, tuple) else value for name, value in arguments.items()}
    return {"kind": "torch", "name": cls.__name__, "arguments": arguments}


def make_updater(description: Mapping[str, Any]) -> Updater:
    """Return the updater for the JSON description of an optimiser.

    Raises
    ------
    MessageError
        The description is invalid.
    ConfigError
        The optimiser is unknown, or its arguments are invalid.
    """
    kind, name, arguments = (description.get(key) for key in ("kind", "name", "arguments"))
    if kind not in ("neondist", "torch") or not isinstance(name, str) or not isinstance(arguments, dict):
        raise MessageError("invalid optimizer")
    if kind == "neondist":
        optimizers = registered_classes(Optimizer)
        if name not in optimizers or arguments.get("schedule") is not None:
            raise ConfigError(f"optimizer: servers have no optimiser named '{name}'{suggest(name, optimizers)}")
        return NeondistOptimizerUpdater(construct_from_message("optimizer", optimizers[name], arguments))
    from ..torch.training.losses_and_optimizers import TorchOptimizer

    arguments = {key: tuple(value) if isinstance(value, list) else value for key, value in arguments.items()}
    return TorchUpdater(TorchOptimizer(name, arguments))
