"""A model's network in PyTorch with autograd, optimised for CPUs: channels-last, with in-place ReLUs.

`python -m neondist.bench.torch_twin FOLDER` runs it in a process with its own threads and memory. The folder contains
the model, its weights and the batch; requests and responses are lines of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import neondist.train  # noqa: F401 - registers the classes of models

from ..config import load_experiment
from ..errors import ConfigError, UserError
from ..models import Model
from ..registry import serial_class
from ..torch.convert.to_torch import SumModule, module_with_weights
from . import memory

Arrays = dict[str, np.ndarray]
_MEMORY_FORMAT_BY_NDIM: dict[int, Any] = {4: torch.channels_last, 5: torch.channels_last_3d}
_BACKWARD_WITHOUT_OUTPUT = (
    nn.modules.conv._ConvNd, nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.Linear, SumModule,
)  # fmt: skip
"""modules whose backward pass does not use their output, so that a ReLU may overwrite it"""
SUPPORTED_COSTS, SUPPORTED_OPTIMIZERS = ("CrossEntropy", "SoftmaxCrossEntropy"), ("SGD", "Adam")


class TorchTwin:
    """A network with weights, an optimiser, and one batch to train on.

    Parameters
    ----------
    model : Model
        Model that is not built.
    state : dict of name to array
        Whole arrays of the model.
    trained : list of str
        Names of the trained arrays.
    x, targets : array
        The whole batch: (N, *spatial, C), and labels.

    Raises
    ------
    ConfigError
        A layer, the cost or the optimiser has no counterpart in PyTorch.
    """

    def __init__(self, model: Model, state: Arrays, trained: list[str], x: np.ndarray, targets: np.ndarray) -> None:
        self.empty_process_bytes = memory.resident_bytes()
        memory.reset_peak_memory()
        _name_of_torch_counterpart(model.cost, SUPPORTED_COSTS)
        self.model, self.shape = model, x.shape[1:]
        self.module = module_with_weights(model, self.shape, state)
        if x.ndim in _MEMORY_FORMAT_BY_NDIM:
            self.module.to(memory_format=_MEMORY_FORMAT_BY_NDIM[x.ndim])  # type: ignore[call-overload]
        for part in self.module.modules():
            _set_inplace(part)
        tensors = dict(zip(self._parameter_names(state), self.module.parameters(), strict=True))
        for name, tensor in tensors.items():
            tensor.requires_grad_(name in trained)
        self.trained = {name: tensors[name] for name in trained}
        self.x, self.targets = torch.from_numpy(x).movedim(-1, 1), torch.from_numpy(targets)
        self.optimizer = _create_optimizer(model, list(self.trained.values()))
        self.executed_module: Any = self.module

    def compile(self) -> str:
        """Use torch.compile from now on; return the error message, or ''."""
        self.executed_module = torch.compile(self.module)
        try:
            self.step()
        except Exception as error:  # compilers raise many types
            return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        return ""

    def step(self, update: bool = True) -> float:
        """Train on the batch once and return the loss."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = functional.cross_entropy(self.executed_module(self.x), self.targets)
        loss.backward()
        if update:
            self.optimizer.step()
        return float(loss.detach())

    def compare_gradients(self, file: str) -> tuple[float, float, str]:
        """Return the loss without dropout, and the error and name of the gradient that differs most from the file.

        The module's parameters and buffers are unchanged. The file contains all arrays of the model, with gradients in
        place of trained arrays.
        """
        state_dict = {name: tensor.clone() for name, tensor in self.module.state_dict().items()}
        dropouts = [part for part in self.module.modules() if isinstance(part, nn.Dropout)]
        for part in dropouts:
            part.eval()
        loss = self.step(update=False)
        for part in dropouts:
            part.train()
        self.module.load_state_dict(state_dict)
        with np.load(file) as arrays:
            state = dict(arrays)
        references = dict(
            zip(
                self._parameter_names(state),
                module_with_weights(self.model, self.shape, state).parameters(),
                strict=True,
            )
        )
        gradients = {name: tensor.grad for name, tensor in self.trained.items() if tensor.grad is not None}
        return loss, *worst_gradient({name: references[name].detach() for name in gradients}, gradients)

    def time_steps(self, steps: int) -> tuple[list[float], int, int]:
        """Return the seconds of each step, and the peak memory: beyond that of an empty process, and total."""
        taken = []
        for _ in range(steps):
            begin = time.perf_counter()
            self.step()
            taken.append(time.perf_counter() - begin)
        return taken, memory.peak_bytes() - self.empty_process_bytes, memory.peak_bytes()

    def _parameter_names(self, state: Arrays) -> list[str]:
        """Return neondist's names of the module's parameters, found by converting numbered arrays."""
        position_arrays = {name: np.full(array.shape, float(at)) for at, (name, array) in enumerate(state.items())}
        module = module_with_weights(self.model, self.shape, position_arrays)
        return [list(state)[int(parameter.detach().flatten()[0])] for parameter in module.parameters()]


def worst_gradient(gradients: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> tuple[float, str]:
    """Return the largest relative error and its gradient's name; tiny gradients (before a batch norm) count less."""
    norms = {name: float(gradient.norm()) for name, gradient in expected.items()}
    least = 1e-3 * max(norms.values())
    return max((float((gradients[name] - expected[name]).norm()) / max(norms[name], least), name) for name in expected)


def _set_inplace(part: nn.Module) -> None:
    children = list(part) if isinstance(part, nn.Sequential) else []
    for before, after in pairwise(children):
        if (
            isinstance(after, nn.ReLU)
            and isinstance(before, _BACKWARD_WITHOUT_OUTPUT)
            and len(getattr(before, "branches", "ab")) > 1
        ):
            after.inplace = True


def _name_of_torch_counterpart(piece: Any, names: tuple[str, ...]) -> str:
    name = serial_class(type(piece)).__name__
    if name not in names:
        raise ConfigError(f"{name} has no counterpart in PyTorch; choose from {', '.join(names)}")
    return name


def _create_optimizer(model: Model, tensors: list[torch.Tensor]) -> torch.optim.Optimizer:
    kind, settings = _name_of_torch_counterpart(model.optimizer, SUPPORTED_OPTIMIZERS), model.optimizer.arguments()
    for name, neutral in (("decay_all", True), ("clip_norm", None), ("ema", None)):
        if settings.pop(name) != neutral:
            raise ConfigError(f"{name}: PyTorch's {kind} has no such option; leave {name} out")
    settings.pop("schedule")
    learning_rate = settings.pop("learning_rate")
    if kind == "SGD":
        return torch.optim.SGD(tensors, learning_rate, **settings)
    betas = settings.pop("beta1"), settings.pop("beta2")
    return torch.optim.Adam(tensors, learning_rate, betas, **settings)


def read_twin(folder: Path) -> TorchTwin:
    """Return the twin described by a folder."""
    model = load_experiment(folder / "model.yaml", top="Model")
    trained = json.loads((folder / "trained.json").read_text(encoding="utf-8"))
    with np.load(folder / "weights.npz") as weights, np.load(folder / "batch.npz") as batch:
        return TorchTwin(model, dict(weights), trained, batch["x"], batch["targets"])


def serve_requests(folder: Path, requests: TextIO, answers: TextIO) -> None:
    """Create the twin, then answer each request with the result of the method that it names."""
    twin, problem = None, ""
    try:
        twin = read_twin(folder)
    except UserError as error:
        problem = str(error)
    for line in requests:
        name, *arguments = json.loads(line)
        answer = {"error": problem} if twin is None else {"made": getattr(twin, name)(*arguments)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    serve_requests(Path(sys.argv[1]), sys.stdin, sys.stdout)
