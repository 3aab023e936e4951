"""PyTorch losses and optimisers, selected by name in files."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Container, Iterable, Mapping
from functools import cached_property
from types import ModuleType
from typing import Any

import torch

from ...costs.labels import are_dense_targets
from ...errors import ConfigError, UserError
from ...optim import Schedule, ScheduledOptimizer
from ...registry import Registered, suggest
from ...registry.functions import NamedFunction
from ..ir.registry import TRACING_LOCK

_REFUSED_OPTIMIZERS = {
    "Optimizer": "is a base class; name one of its subclasses",
    "LBFGS": "computes the loss itself in every step; use another optimiser, such as SGD",
    "SparseAdam": "needs sparse gradients, but those of several ranks are dense; use Adam",
}
"""Classes of torch.optim that cannot be used, and why."""


class TorchLoss(Registered):
    """A loss from torch.nn or from an imported module.

    Parameters
    ----------
    name : str or callable
        A class of torch.nn, such as CrossEntropyLoss, or in a YAML file also MODULE:NAME, a class or a function of
        (outputs, labels) in an imported module. Tensors have channels first.
    arguments : mapping, optional
        Arguments of the constructor, or further arguments of the function. Lists of numbers are converted to tensors.

    Notes
    -----
    The loss of an epoch or split is the mean over its batches, weighted by the number of samples in each batch.
    """

    def __init__(
        self, name: str | Callable[..., Any] = "CrossEntropyLoss", arguments: Mapping[str, Any] | None = None
    ) -> None:
        loss = _look_up(name, torch.nn, [key for key in dir(torch.nn) if key.endswith("Loss")])
        options = {
            key: torch.tensor(value, dtype=torch.float64) if isinstance(value, list) else value
            for key, value in (arguments or {}).items()
        }
        if isinstance(loss, type):
            loss, options = call_checked("arguments", loss, **options), {}
        self.criterion: Any = functools.partial(loss, **options) if options else loss
        self.ignore_index: int | None = getattr(self.criterion, "ignore_index", None)

    def check_output_shape(self, output_shape: tuple[int, ...], classes: int | None) -> None:
        """Do nothing, as PyTorch's losses check their inputs."""

    def denominator_per_sample(self, output_shape: tuple[int, ...]) -> int:
        """Return 1: the loss is already a mean."""
        return 1

    def check_labels(self, output: Any, labels: Any) -> None:
        """Raise DataError if labels of a classification loss are not classes of an output (N, C, ...)."""
        if self.ignore_index is None or not (isinstance(output, torch.Tensor) and isinstance(labels, torch.Tensor)):
            return
        if labels.shape != output.shape and output.ndim > 1:
            are_dense_targets((*labels.shape, output.shape[1]), labels.detach().cpu().numpy(), self.ignore_index)


class TorchOptimizer(ScheduledOptimizer, Registered):
    """An optimiser from torch.optim or from an imported module.

    Parameters
    ----------
    name : str or callable
        A class of torch.optim, such as SGD; in a YAML file also MODULE:NAME from an imported module.
    arguments : mapping, optional
        Arguments of the constructor other than the parameters, such as lr.
    schedule : Schedule, optional
        Multiplier of the learning rate that changes over the epochs.
    """

    def __init__(
        self,
        name: str | Callable[..., Any] = "SGD",
        arguments: Mapping[str, Any] | None = None,
        schedule: Schedule | None = None,
    ) -> None:
        if isinstance(name, str) and name in _REFUSED_OPTIMIZERS:
            raise ConfigError(f"name: {name} {_REFUSED_OPTIMIZERS[name]}")
        self.constructor = _look_up(name, torch.optim, [n for n, _ in inspect.getmembers(torch.optim, inspect.isclass)])
        self.options, self.schedule = dict(arguments or {}), schedule
        optimizer = self.create([torch.nn.Parameter(torch.zeros(1, 1))])  # reports errors when the file is read
        self.has_momentum = bool({"momentum", "betas"} & optimizer.defaults.keys())

    def create(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """Return the optimiser for a module's parameters."""
        parameter_list = list(parameters)
        optimizer = call_checked("arguments", self.constructor, parameter_list, **self.options)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(
                f"name: returned a {type(optimizer).__name__}, not a torch.optim.Optimizer; name a class or a"
                " function that returns an optimiser"
            )
        tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        if not {*map(id, tensors)} <= {*map(id, parameter_list)}:
            raise ConfigError("name: creates an optimiser of other parameters; select groups from its first argument")
        return optimizer

    @cached_property
    def elementwise(self) -> bool:
        """Whether updating two halves of a parameter equals updating the whole."""
        values = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(4, 6)
        whole, *halves = (torch.nn.Parameter(part.clone()) for part in (values, values[:2], values[2:]))
        parameter_lists: list[list[torch.nn.Parameter]] = [[whole], halves]
        for tensors in parameter_lists:
            optimizer = self.create(tensors)
            for step in range(2):
                gradient = (values.sin() + step).split(4 // len(tensors))
                for tensor, part in zip(tensors, gradient, strict=True):
                    tensor.grad = part.clone()
                with TRACING_LOCK:
                    optimizer.step()
        return torch.allclose(whole, torch.cat(tuple(halves)), rtol=1e-9, atol=0)

    @property
    def slots_per_parameter(self) -> int:
        """Number of state elements per trained element, in arrays shaped like the parameters."""
        parameter = torch.nn.Parameter(torch.zeros(2, 2))
        parameter.grad = torch.zeros(2, 2)
        optimizer = self.create([parameter])
        with TRACING_LOCK:
            optimizer.step()
        values = [value for state in optimizer.state.values() for value in state.values()]
        return sum(isinstance(value, torch.Tensor) and value.shape == parameter.shape for value in values)


def updates_any(optimizer: torch.optim.Optimizer, tensor_ids: Container[int]) -> bool:
    """Return whether an optimiser updates any of the tensors, given by their ids."""
    return any(id(tensor) in tensor_ids for group in optimizer.param_groups for tensor in group["params"])


def call_checked(field: str, function: Any, *args: Any, **arguments: Any) -> Any:
    """Call a function or class with arguments from a file; raise a ConfigError about `field` if that fails."""
    name = getattr(function, "__name__", type(function).__name__)
    try:
        parameters = dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # built-in
        parameters = {}
    arg_names = list(parameters)[len(args) :]
    if parameters and not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        for key in arguments:
            if key not in arg_names:
                raise ConfigError(
                    f"{field}: {name} has no argument '{key}'{suggest(key, arg_names) or '; it has none'}"
                )
    try:
        return function(*args, **arguments)
    except UserError:
        raise
    except Exception as error:
        raise ConfigError(f"{field}: {name} failed: {type(error).__name__}: {error}") from error


def unwrap_named_function(function: Any) -> Any:
    """Return the callable behind a function named in a file."""
    return function.call if isinstance(function, NamedFunction) else function


def _look_up(name: Any, package: ModuleType, class_names: list[str]) -> Any:
    if not isinstance(name, str):
        return unwrap_named_function(name)
    if name not in class_names:
        raise ConfigError(
            f"name: '{name}' is not in {package.__name__}{suggest(name, class_names)} (or MODULE:NAME, with"
            " --import MODULE)"
        )
    return getattr(package, name)
