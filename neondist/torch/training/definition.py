"""Model-definition files: a PyTorch model with its loss, optimiser and feed, under ElasticDL's names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from ...data.records import FeedFunction
from ...errors import ConfigError
from ...metrics import Metric
from .experiment import TorchModel
from .losses_and_optimizers import TorchLoss, TorchOptimizer
from .module_inputs import channels_first

REQUIRED_FUNCTIONS = {
    "loss": "loss(labels, predictions)",
    "optimizer": "optimizer(parameters, lr=...)",
    "feed": "feed(records, mode)",
    "model": "a torch.nn.Module class or custom_model()",
}


class ModelDefinition:
    """Model, loss, optimiser and data functions of a model-definition file.

    Parameters
    ----------
    module : module
        Module with a torch.nn.Module class or custom_model(), loss(labels, predictions), optimizer(parameters) (or
        optimizer(lr=...), which returns a function of the parameters), and feed(records, mode) or dataset_fn. It may
        also define eval_metrics_fn(), callbacks(), custom_data_reader(source) and PredictionOutputsProcessor.
    path : str
        Path of the file, as given by the user.
    names : mapping of str to str, optional
        Names that the file uses for these objects, if they differ.

    Raises
    ------
    ConfigError
        A name is missing or not callable, several classes could be the model, or loss takes other arguments.
    """

    def __init__(self, module: ModuleType, path: str, names: Mapping[str, str] | None = None) -> None:
        self.module, self.path, self._names = module, path, dict(names or {})
        for name, actual in self._names.items():
            if not hasattr(module, actual):
                raise ConfigError(
                    f"{path}: has no {actual}, given as {name}; the file defines"
                    f" {', '.join(self._public_names()) or 'nothing'}"
                )
        candidates = {name: self._optional_function(name) for name in ("loss", "optimizer", "feed")}
        candidates["feed"] = candidates["feed"] or self._optional_function("dataset_fn")
        candidates["model"] = self._find_model()
        functions = {name: function for name, function in candidates.items() if function is not None}
        missing = [name for name in REQUIRED_FUNCTIONS if name not in functions]
        if missing:
            required_signatures = [REQUIRED_FUNCTIONS[name] for name in missing]
            raise ConfigError(
                f"{path}: has no {' and no '.join(missing)}; the file defines"
                f" {', '.join(self._public_names()) or 'nothing'}. Define {', '.join(required_signatures)}"
            )
        self._loss, self._optimizer, self._feed, self.factory = (functions[name] for name in REQUIRED_FUNCTIONS)
        try:
            with suppress(ValueError):  # a function in C without a signature
                inspect.signature(self._loss).bind("labels", "predictions")
        except TypeError as error:
            source_line = self._source_line(self._loss)
            raise ConfigError(f"{source_line}: loss(labels, predictions) cannot be called: {error}") from None

    def create_model(self, seed: int = 0, has_integer_inputs: bool = False) -> TorchModel:
        """Return the model for the training loop; in float64 if all parameters of the module are float64."""
        factory = self.factory

        def create_module() -> nn.Module:
            module = self._call_user_function(factory)
            if not isinstance(module, nn.Module):
                source_line, name = self._source_line(factory), type(module).__name__
                raise ConfigError(f"{source_line}: {factory.__name__} returned a {name}; return a torch.nn.Module")
            return module

        with torch.random.fork_rng(devices=[]):
            dtypes = {parameter.dtype for parameter in create_module().parameters()}
        loss = self._loss

        def criterion(outputs: Any, labels: Any) -> Any:
            return loss(labels, outputs)

        module_function = _rename_function(factory, create_module)
        model = TorchModel(
            module_function,
            loss=TorchLoss(criterion),
            optimizer=self._make_optimizer(),
            seed=seed,
            dtype="float64" if dtypes == {torch.float64} else "float32",
        )
        model.has_integer_inputs = has_integer_inputs
        return model

    def check_loss(self, output_shape: Sequence[int], images: np.ndarray, labels: np.ndarray | None) -> None:
        """Check the type of the loss for predictions that are 0 and of this shape, channels last.

        Raises
        ------
        ConfigError
            The loss is not a scalar tensor with a gradient.
        """
        shape = len(images), output_shape[-1], *output_shape[:-1]
        predictions = torch.zeros(shape, requires_grad=True)
        with torch.random.fork_rng(devices=[]):
            try:
                value = self._loss(channels_first(images, labels, np.float32)[1], predictions)
            except Exception:  # the module may return several predictions, or the loss may reject 0
                return
        problem = ""
        if not isinstance(value, torch.Tensor):
            problem = f"a {type(value).__name__}"
        elif value.ndim:
            problem = f"a tensor of shape {tuple(value.shape)}"
        elif not value.requires_grad:
            problem = "a tensor without a gradient"
        if problem:
            raise ConfigError(
                f"{self._source_line(self._loss)}: loss returned {problem}; return a scalar tensor computed from"
                " predictions: the mean over the records"
            )

    def feed_function(self) -> FeedFunction:
        """Return the function that maps records to features and labels."""
        function = self._feed
        arity = len(inspect.signature(function).parameters)
        if arity > 2:  # in ElasticDL, the third argument is metadata of the reader
            return FeedFunction(
                _rename_function(function, lambda records, mode: function(records, mode, None)),
                self._source_line(function),
            )
        return FeedFunction(function, self._source_line(function))

    def metrics(self) -> list[Metric]:
        """Return the metrics of eval_metrics_fn."""
        function = self._optional_function("eval_metrics_fn")
        functions = {} if function is None else self._call_user_function(function)
        if not isinstance(functions, dict) or not all(callable(metric) for metric in functions.values()):
            raise ConfigError(f"{self.path}: eval_metrics_fn must return a dict of functions of (labels, predictions)")
        return [_FunctionMetric(name, metric, self._source_line(metric)) for name, metric in functions.items()]

    def callbacks(self, hook_type: type) -> list[Any]:
        """Return the hooks of callbacks(), which must be instances of `hook_type`."""
        function = self._optional_function("callbacks")
        hooks = [] if function is None else self._call_user_function(function)
        if not isinstance(hooks, list | tuple) or not all(isinstance(hook, hook_type) for hook in hooks):
            raise ConfigError(f"{self._source_line(function)}: callbacks must return a list of nd.Hook objects")
        return list(hooks)

    def custom_reader(self, source: str) -> Any:
        """Return the reader of custom_data_reader for a source, or None if the file has none."""
        function = self._optional_function("custom_data_reader")
        reader = None if function is None else self._call_user_function(function, source)
        if reader is not None and not (hasattr(reader, "__len__") and hasattr(reader, "__getitem__")):
            raise ConfigError(
                f"{self._source_line(function)}: custom_data_reader returned a {type(reader).__name__}; return an"
                " object with __len__ and __getitem__, such as a list"
            )
        return reader

    def create_processor(self) -> Any:
        """Return a PredictionOutputsProcessor, or None if the file has none."""
        cls = self._optional_function("PredictionOutputsProcessor")
        return None if cls is None else self._call_user_function(cls)

    def _optional_function(self, name: str) -> Callable[..., Any] | None:
        value = getattr(self.module, self._names.get(name, name), None)
        if value is not None and not callable(value):
            raise ConfigError(f"{self.path}: {name} is a {type(value).__name__}; define a function")
        return value

    def _public_names(self) -> list[str]:
        """Return the public names that the file itself defines."""
        members = inspect.getmembers(self.module)
        return [n for n, value in members if n[0] != "_" and getattr(value, "__module__", None) == self.module.__name__]

    def _find_model(self) -> Callable[..., Any] | None:
        if (function := self._optional_function("custom_model")) is not None:
            return function
        public_objects = {name: getattr(self.module, name) for name in self._public_names()}
        classes = {n: v for n, v in public_objects.items() if isinstance(v, type) and issubclass(v, nn.Module)}
        if "CustomModel" in classes or len(classes) == 1:
            return classes.get("CustomModel", next(iter(classes.values())))
        if classes:
            raise ConfigError(
                f"{self.path}: has several models, {', '.join(classes)}; name one CustomModel, or define custom_model()"
            )
        return None

    def _source_line(self, function: Any) -> str:
        code = getattr(function, "__code__", None) or getattr(getattr(function, "__init__", None), "__code__", None)
        return self.path if code is None else f"{self.path}:{code.co_firstlineno}"

    def _call_user_function(self, function: Any, *args: Any) -> Any:
        try:
            return function(*args)
        except Exception as error:
            message = f"{function.__name__} failed: {type(error).__name__}: {error}"
            raise ConfigError(f"{self._source_line(function)}: {message}") from error

    def _make_optimizer(self) -> TorchOptimizer:
        function = self._optimizer
        arguments = list(inspect.signature(function).parameters.values())
        takes_parameters = bool(arguments) and arguments[0].default is arguments[0].empty
        source_line = self._source_line(function)

        def optimizer(parameters: Any) -> torch.optim.Optimizer:
            result: Any = self._call_user_function(function, *([parameters] if takes_parameters else []))
            if not takes_parameters and callable(result) and not isinstance(result, torch.optim.Optimizer):
                result = result(parameters)
            elif not takes_parameters:
                raise ConfigError(
                    f"{source_line}: optimizer does not take the model's parameters, so it must return a function that"
                    " does, such as lambda parameters: torch.optim.SGD(parameters, lr)"
                )
            if not isinstance(result, torch.optim.Optimizer):
                raise ConfigError(
                    f"{source_line}: optimizer must return a torch.optim.Optimizer, got {type(result).__name__}"
                )
            return result

        return TorchOptimizer(optimizer)


class _FunctionMetric(Metric):
    """A function of the labels and predictions of an evaluation batch, averaged over samples."""

    def __init__(self, name: str, function: Callable[..., Any], source_line: str) -> None:
        self.name, self._function, self._source_line = name, function, source_line

    def local_sums(self, y: np.ndarray, targets: np.ndarray) -> Sequence[float]:
        """Return the function's value times the number of samples, and that number."""
        if not len(y):
            return 0.0, 0.0
        outputs, labels = channels_first(y, targets) if y.ndim > 2 else (torch.from_numpy(y), torch.from_numpy(targets))
        try:
            value = float(torch.as_tensor(self._function(labels, outputs), dtype=torch.float64).mean())
        except Exception as error:
            raise ConfigError(f"{self._source_line}: {self.name} failed: {type(error).__name__}: {error}") from error
        return value * len(y), len(y)


def _rename_function(original: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    function.__name__ = original.__name__
    return function


def preload_capture_imports() -> None:
    """Trigger the imports that PyTorch defers until the first capture."""
    torch.export.export(nn.Identity(), (torch.zeros(1),), strict=False)
