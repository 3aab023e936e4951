"""Model-definition files: a PyTorch model with its loss, optimiser and feed, by the names that ElasticDL gave them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from ..data.records import Feed
from ..errors import ConfigError
from ..metrics import Metric
from .by_name import TorchLoss, TorchOptimizer
from .experiment import TorchModel
from .feeding import channels_first

REQUIRED = {
    "loss": "loss(labels, predictions)",
    "optimizer": "optimizer(parameters, lr=...)",
    "feed": "feed(records, mode)",
}


class ModelDefinition:
    """The names of a module that say what is trained and how.

    Parameters
    ----------
    module : module
        Has a torch.nn.Module class or custom_model(), loss(labels, predictions), optimizer(parameters) or a function of
        the learning rate that returns a function of the parameters, and feed(records, mode) or dataset_fn. It may have
        eval_metrics_fn(), callbacks(), custom_data_reader(source) and PredictionOutputsProcessor.
    path : str
        The file as the user has named it.
    names : mapping of str to str, optional
        The file's own names of these, where they differ.

    Raises
    ------
    ConfigError
        A name is missing, or means something else; the message lists what the file has.
    """

    def __init__(self, module: ModuleType, path: str, names: Mapping[str, str] | None = None) -> None:
        self.module, self.path, self._names = module, path, dict(names or {})
        for name, own in self._names.items():
            if not hasattr(module, own):
                raise ConfigError(
                    f"{path}: has no {own}, given as {name}; it has {', '.join(self._own()) or 'nothing'}"
                )
        self._feed = self._optional("feed") or self._optional("dataset_fn")
        found = {name: self._feed if name == "feed" else self._optional(name) for name in REQUIRED}
        self.factory = self._model()
        missing = [name for name, function in found.items() if function is None]
        if missing or self.factory is None:
            absent = [*missing, *(["model"] if self.factory is None else [])]
            wanted = [REQUIRED.get(name, "a torch.nn.Module class or custom_model()") for name in absent]
            raise ConfigError(
                f"{path}: has no {' and no '.join(absent)}; it has {', '.join(self._own()) or 'nothing'}. Define"
                f" {', '.join(wanted)}"
            )
        self._loss, self._optimizer = found["loss"], found["optimizer"]

    def model(self, seed: int = 0) -> TorchModel:
        """Return the model that the training loop trains."""
        assert self.factory is not None
        return TorchModel(self.factory, loss=TorchLoss(self._criterion()), optimizer=self._made(), seed=seed)

    def feed(self) -> Feed:
        """Return the function from records to features and labels."""
        function = self._feed
        assert function is not None
        takes = len(inspect.signature(function).parameters)
        if takes > 2:  # ElasticDL's third argument is metadata of the reader
            return Feed(_named(function, lambda records, mode: function(records, mode, None)), self._place(function))
        return Feed(function, self._place(function))

    def metrics(self) -> list[Metric]:
        """Return the metrics of eval_metrics_fn."""
        function = self._optional("eval_metrics_fn")
        found = {} if function is None else self._called(function)
        if not isinstance(found, dict) or not all(callable(one) for one in found.values()):
            raise ConfigError(f"{self.path}: eval_metrics_fn must return a dict of functions of (labels, predictions)")
        return [_FunctionMetric(name, one, self._place(one)) for name, one in found.items()]

    def callbacks(self) -> list[Any]:
        """Return the hooks of callbacks()."""
        function = self._optional("callbacks")
        return [] if function is None else list(self._called(function))

    def custom_reader(self, source: str) -> Any:
        """Return what custom_data_reader returns for a source; None without such a function."""
        function = self._optional("custom_data_reader")
        return None if function is None else self._called(function, source)

    def processor(self) -> Any:
        """Return a PredictionOutputsProcessor; None without such a class."""
        cls = self._optional("PredictionOutputsProcessor")
        return None if cls is None else self._called(cls)

    # Inner.

    def _optional(self, name: str) -> Callable[..., Any] | None:
        found = getattr(self.module, self._names.get(name, name), None)
        if found is not None and not callable(found):
            raise ConfigError(f"{self.path}: {name} is a {type(found).__name__}; define a function")
        return found

    def _own(self) -> list[str]:
        """Return the public names that the file itself defines."""
        found = inspect.getmembers(self.module)
        return [n for n, one in found if n[0] != "_" and getattr(one, "__module__", None) == self.module.__name__]

    def _model(self) -> Callable[..., Any] | None:
        if (function := self._optional("custom_model")) is not None:
            return function
        own = {name: getattr(self.module, name) for name in self._own()}
        classes = {n: one for n, one in own.items() if isinstance(one, type) and issubclass(one, nn.Module)}
        if "CustomModel" in classes or len(classes) == 1:
            return classes.get("CustomModel", next(iter(classes.values())))
        if classes:
            raise ConfigError(
                f"{self.path}: has several models, {', '.join(classes)}; name one CustomModel, or define custom_model()"
            )
        return None

    def _place(self, function: Any) -> str:
        code = getattr(function, "__code__", None)
        return self.path if code is None else f"{self.path}:{code.co_firstlineno}"

    def _called(self, function: Any, *given: Any) -> Any:
        try:
            return function(*given)
        except Exception as error:
            what = f"{function.__name__} failed: {type(error).__name__}: {error}"
            raise ConfigError(f"{self._place(function)}: {what}") from error

    def _criterion(self) -> Callable[..., Any]:
        loss = self._loss
        assert loss is not None

        def criterion(outputs: Any, labels: Any) -> Any:
            return loss(labels, outputs)

        return criterion

    def _made(self) -> TorchOptimizer:
        function = self._optimizer
        assert function is not None
        given = list(inspect.signature(function).parameters.values())
        takes_parameters = bool(given) and given[0].default is given[0].empty
        place = self._place(function)

        def optimizer(parameters: Any) -> torch.optim.Optimizer:
            made: Any = self._called(function, *([parameters] if takes_parameters else []))
            if not takes_parameters and callable(made) and not isinstance(made, torch.optim.Optimizer):
                made = made(parameters)
            elif not takes_parameters:
                raise ConfigError(
                    f"{place}: optimizer takes no parameters, so it must return a function of them, such as lambda"
                    " parameters: torch.optim.SGD(parameters, lr)"
                )
            if not isinstance(made, torch.optim.Optimizer):
                raise ConfigError(f"{place}: optimizer returned a {type(made).__name__}, not a torch.optim.Optimizer")
            return made

        return TorchOptimizer(optimizer)


class _FunctionMetric(Metric):
    """A function of labels and predictions, averaged over samples; of batches as the evaluation has them."""

    def __init__(self, name: str, function: Callable[..., Any], place: str) -> None:
        self.name, self._function, self._place = name, function, place

    def measure(self, y: np.ndarray, targets: np.ndarray) -> Sequence[float]:
        """Return the function's value times the samples, and their number."""
        if not len(y):
            return 0.0, 0.0
        outputs, labels = channels_first(y, targets) if y.ndim > 2 else (torch.from_numpy(y), torch.from_numpy(targets))
        try:
            value = float(torch.as_tensor(self._function(labels, outputs), dtype=torch.float64).mean())
        except Exception as error:
            raise ConfigError(f"{self._place}: {self.name} failed: {type(error).__name__}: {error}") from error
        return value * len(y), len(y)


def _named(like: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    function.__name__ = like.__name__
    return function


def load_capture() -> None:
    """Let PyTorch import what it does not before a module is first captured."""
    torch.export.export(nn.Identity(), (torch.zeros(1),), strict=False)
