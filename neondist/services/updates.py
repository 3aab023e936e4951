"""Optimisers as servers apply them: flat arrays in place, of neondist or of PyTorch, described as JSON."""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import ConfigError
from ..optim import FlatLayout, Optimizer, Scheduled
from ..registry import registered, suggest
from .message import MessageError
from .placement import constructed

if TYPE_CHECKING:
    from ..torch.by_name import TorchOptimizer

Slots = dict[str, np.ndarray]
"""Arrays as long as the values, or of one number (shape ())."""


class Updater(ABC):
    """An update rule on flat arrays, which holds none of them."""

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
            Empty at the first update, which fills it.
        step : int
            Number of updates before this one.
        scale : float
            Factor on the learning rate.
        layout : FlatLayout, optional
            The parameters in the arrays. Default: one.
        """

    @abstractmethod
    def fills(self) -> dict[str, float]:
        """Return the first value of each slot that is as long as the values."""

    @abstractmethod
    def check_parts(self, whole: bool) -> None:
        """Raise ConfigError if parameters cannot be updated apart from each other, or (not `whole`) in parts."""

    def keeps_rest(self) -> bool:
        """Whether a zero gradient leaves a value as it is, after any other step: rows without one need no update."""
        values, slots = np.ones(1), Slots()
        self.update(values, np.ones(1), slots, 0, 1.0)
        before = values.copy()
        self.update(values, np.zeros(1), slots, 1, 1.0)
        return bool(values[0] == before[0])


class LayerUpdater(Updater):
    """An optimiser of neondist."""

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
            slots.update(self.optimizer.slots(values))
        with np.errstate(all="ignore"):  # workers push no gradients that are not finite
            self.optimizer.update(values, grads, slots, step, scale, layout)

    def fills(self) -> dict[str, float]:
        """Return zeros."""
        return dict.fromkeys(self.optimizer.kept, 0.0)

    def check_parts(self, whole: bool) -> None:
        """Refuse norms of parameters that are divided, or over all parameters."""
        if self.optimizer.clip_norm is not None:
            raise ConfigError("clip_norm: needs a norm over all servers; leave it out, and clip on the workers")
        if not whole and self.optimizer.norms_for(1):
            name = type(self.optimizer).__name__
            raise ConfigError(f"optimizer: {name} updates whole parameters; choose a strategy without partitions")


class TorchUpdater(Updater):
    """An optimiser of torch.optim whose update is elementwise."""

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
        made = self._optimizer.made([tensor])
        if slots:
            made.state[tensor] = {name: torch.from_numpy(array) for name, array in slots.items()}
        for group in made.param_groups:
            group["lr"] = group["lr"] * scale
        tensor.grad = torch.from_numpy(grads)
        made.step()
        for name, value in made.state[tensor].items():
            if isinstance(value, torch.Tensor):
                slots[name] = value.detach().numpy()

    def fills(self) -> dict[str, float]:
        """Return what a new optimiser keeps of a value 0 with gradient 0."""
        values, slots = np.zeros(1), Slots()
        self.update(values, np.zeros(1), slots, 0, 1.0)
        return {name: float(array[0]) for name, array in slots.items() if array.shape}

    def check_parts(self, whole: bool) -> None:
        """Refuse optimisers that need whole parameters."""
        if not self._optimizer.elementwise:
            name = self._optimizer.found.__name__
            raise ConfigError(f"optimizer: {name} updates whole parameters, but servers update elements independently")


def describe_optimizer(optimizer: Any) -> dict[str, Any]:
    """Return an optimiser as JSON, without its schedule, which workers apply.

    Parameters
    ----------
    optimizer : Optimizer, TorchOptimizer, or torch.optim.Optimizer
        One of torch.optim with parameters in a single group.

    Raises
    ------
    ConfigError
        It cannot be described, or its schedule changes the momentum.
    """
    if isinstance(optimizer, Scheduled) and optimizer.momentum_at(math.inf) is not None:
        raise ConfigError("schedule: servers cannot change the momentum; leave it out of the schedule")
    if isinstance(optimizer, Optimizer):
        arguments = {name: value for name, value in optimizer.arguments().items() if name != "schedule"}
        return {"kind": "neondist", "name": type(optimizer).__name__, "arguments": arguments}
    import torch

    from ..torch.by_name import TorchOptimizer

    if isinstance(optimizer, TorchOptimizer) and not isinstance(optimizer.found, type):
        # a function of parameters: weights and a bias show whether it makes groups of them
        optimizer = optimizer.made([torch.nn.Parameter(torch.zeros(shape)) for shape in ((1, 1), (1,))])
    if isinstance(optimizer, TorchOptimizer):
        found, arguments = optimizer.found, dict(optimizer.given)
    else:
        found = type(optimizer)
        if len(optimizer.param_groups) > 1:
            raise ConfigError(f"optimizer: {found.__name__} has several parameter groups, but servers support only one")
        taken = inspect.signature(found).parameters
        defaults = {name: parameter.default for name, parameter in taken.items()}
        group = optimizer.param_groups[0]
        arguments = {name: value for name, value in group.items() if name in taken and value != defaults[name]}
        arguments.pop("params")
    if not getattr(found, "__module__", "").startswith("torch.optim."):
        raise ConfigError("optimizer: servers support only optimisers of neondist and torch.optim")
    arguments = {name: list(value) if isinstance(value, tuple) else value for name, value in arguments.items()}
    return {"kind": "torch", "name": found.__name__, "arguments": arguments}


def make_updater(described: Mapping[str, Any]) -> Updater:
    """Return the updater that JSON describes.

    Raises
    ------
    MessageError
        It describes none.
    ConfigError
        Unknown optimiser, or invalid arguments.
    """
    kind, name, arguments = (described.get(key) for key in ("kind", "name", "arguments"))
    if kind not in ("neondist", "torch") or not isinstance(name, str) or not isinstance(arguments, dict):
        raise MessageError("invalid optimizer")
    if kind == "neondist":
        known = registered(Optimizer)
        if name not in known or arguments.get("schedule") is not None:
            raise ConfigError(f"optimizer: servers have no optimiser named '{name}'{suggest(name, known)}")
        return LayerUpdater(constructed("optimizer", known[name], arguments))
    from ..torch.by_name import TorchOptimizer

    arguments = {key: tuple(value) if isinstance(value, list) else value for key, value in arguments.items()}
    return TorchUpdater(TorchOptimizer(name, arguments))
