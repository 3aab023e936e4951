"""Losses and optimisers of PyTorch as files name them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any

import torch

from ..costs.labels import is_dense
from ..errors import ConfigError, UserError
from ..optim import Schedule, Scheduled
from ..registry import Registered, suggest
from ..registry.functions import Function
from .registry import TRACING

REFUSED = "Optimizer", "LBFGS", "SparseAdam"
"""No optimiser; and those that want to run the model themselves, or gradients that are not dense."""


class TorchLoss(Registered):
    """A loss from torch.nn or from an imported module.

    Parameters
    ----------
    name : str or callable
        A class of torch.nn, such as CrossEntropyLoss. In a YAML file also MODULE:NAME from an imported module: a class,
        or a function of (outputs, labels), tensors with channels first.
    arguments : mapping, optional
        Arguments of the constructor, or further arguments of the function. A list of numbers becomes a tensor.

    Notes
    -----
    The loss of an epoch or split is the mean over its batches, weighted by their numbers of samples.
    """

    def __init__(
        self, name: str | Callable[..., Any] = "CrossEntropyLoss", arguments: Mapping[str, Any] | None = None
    ) -> None:
        found = _found(name, "torch.nn", torch.nn, [one for one in dir(torch.nn) if one.endswith("Loss")])
        given = {key: _tensor(value) for key, value in (arguments or {}).items()}
        if isinstance(found, type):
            found, given = called("arguments", found, **given), {}
        self.criterion: Any = functools.partial(found, **given) if given else found
        self.ignore_index: int | None = getattr(self.criterion, "ignore_index", None)

    def check(self, output_shape: tuple[int, ...], classes: int | None) -> None:
        """Do nothing; PyTorch checks its own losses."""

    def cells(self, output_shape: tuple[int, ...]) -> int:
        """Return 1: the loss is already a mean."""
        return 1

    def check_labels(self, output: Any, labels: Any) -> None:
        """Raise DataError if a classification loss gets labels that are not classes of an output (N, C, ...)."""
        if self.ignore_index is None or not (isinstance(output, torch.Tensor) and isinstance(labels, torch.Tensor)):
            return
        if labels.shape != output.shape and output.ndim > 1:
            is_dense((*labels.shape, output.shape[1]), labels.detach().cpu().numpy(), self.ignore_index)


class TorchOptimizer(Scheduled, Registered):
    """An optimizer from torch.optim or from an imported module.

    Parameters
    ----------
    name : str or callable
        A class of torch.optim, such as SGD; in a YAML file also MODULE:NAME from an imported module.
    arguments : mapping, optional
        Arguments of the constructor other than the parameters, such as lr.
    schedule : Schedule, optional
        Factor on the learning rate over the epochs.
    """

    def __init__(
        self,
        name: str | Callable[..., Any] = "SGD",
        arguments: Mapping[str, Any] | None = None,
        schedule: Schedule | None = None,
    ) -> None:
        names = [one for one in dir(torch.optim) if isinstance(getattr(torch.optim, one), type) and one not in REFUSED]
        self.found = _found(name, "torch.optim", torch.optim, names)
        self.given, self.schedule = dict(arguments or {}), schedule
        made = self.made([torch.nn.Parameter(torch.zeros(1, 1))])  # so that mistakes are found with the file
        self.has_momentum = bool({"momentum", "betas"} & made.defaults.keys())

    def made(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """Return the optimizer for a module's parameters."""
        optimizer = called("arguments", self.found, list(parameters), **self.given)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(f"name: created a {type(optimizer).__name__}, not a torch.optim.Optimizer")
        return optimizer

    @cached_property
    def elementwise(self) -> bool:
        """Whether an update of two halves of a parameter is that of the whole."""
        values = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(4, 6)
        whole, *halves = (torch.nn.Parameter(part.clone()) for part in (values, values[:2], values[2:]))
        groups: list[list[torch.nn.Parameter]] = [[whole], halves]
        for tensors in groups:
            optimizer = self.made(tensors)
            for step in range(2):
                gradient = (values.sin() + step).split(4 // len(tensors))
                for tensor, part in zip(tensors, gradient, strict=True):
                    tensor.grad = part.clone()
                with TRACING:
                    optimizer.step()
        return torch.allclose(whole, torch.cat(tuple(halves)), rtol=1e-9, atol=0)

    @property
    def kept(self) -> int:
        """Number of state elements per trained element, in arrays shaped like the parameters."""
        parameter = torch.nn.Parameter(torch.zeros(2, 2))
        parameter.grad = torch.zeros(2, 2)
        optimizer = self.made([parameter])
        with TRACING:
            optimizer.step()
        found = [value for state in optimizer.state.values() for value in state.values()]
        return sum(isinstance(value, torch.Tensor) and value.shape == parameter.shape for value in found)


def called(field: str, function: Any, *given: Any, **arguments: Any) -> Any:
    """Return what a function or class gives for arguments that a file says; ConfigError, about `field`, if it fails."""
    who = getattr(function, "__name__", type(function).__name__)
    try:
        known = dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # built-in
        known = {}
    names = list(known)[len(given) :]
    if known and not any(one.kind is inspect.Parameter.VAR_KEYWORD for one in known.values()):
        for name in arguments:
            if name not in names:
                raise ConfigError(f"{field}: {who} has no argument '{name}'{suggest(name, names) or '; it has none'}")
    try:
        return function(*given, **arguments)
    except UserError:
        raise
    except Exception as error:
        raise ConfigError(f"{field}: {who} failed: {type(error).__name__}: {error}") from error


def unwrapped(function: Any) -> Any:
    """Return what a function that a file has named is."""
    return function.call if isinstance(function, Function) else function


def _found(name: Any, where: str, package: Any, names: list[str]) -> Any:
    if not isinstance(name, str):
        return unwrapped(name)
    if name not in names:
        raise ConfigError(
            f"name: '{name}' is not in {where}{suggest(name, names)} (or MODULE:NAME of a module given by --import)"
        )
    return getattr(package, name)


def _tensor(value: Any) -> Any:
    return torch.tensor(value, dtype=torch.float64) if isinstance(value, list) else value
