"""The same network in PyTorch's autograd, as one would write it for a CPU: channels-last, in-place ReLUs.

Runs as a process of its own, `python -m neondist.bench.torch_twin FOLDER`, with threads and memory of its own. The
folder holds the network and the batch; requests come as lines of JSON, and are answered so.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from torch.nn import functional

from . import memory
from .network import Network, NodeRecord, read

Tensor = torch.Tensor
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "Identity": lambda z: z,
    "ReLU": lambda z: functional.relu(z, inplace=True),
    "Logistic": torch.sigmoid,
    "Tanh": torch.tanh,
}
_PAD_MODES = {"zeros": "constant", "wrap": "circular"}


class TorchTwin:
    """A network with weights, an optimiser, and one batch to train on."""

    def __init__(self, network: Network, x: np.ndarray, targets: np.ndarray) -> None:
        self.before = memory.resident()
        memory.forget_peak()
        self.network = network
        self.x = torch.from_numpy(x).movedim(-1, 1)
        self.targets = torch.from_numpy(targets)
        self.tensors = {name: _inward(name, torch.tensor(array)) for name, array in network.weights.items()}
        self.trained = {name: self.tensors[name].requires_grad_() for name in network.trained}
        self.optimizer = _optimizer(network, list(self.trained.values()))
        self.dropout = False

    def step(self, update: bool = True) -> float:
        """Train on the batch once and return the loss."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = functional.cross_entropy(self._through(self.network.parts, self.x), self.targets)
        loss.backward()
        if update:
            self.optimizer.step()
        return float(loss.detach())

    def check(self, file: str) -> float:
        """Return the loss, and write all gradients to a file; without dropout, and nothing changes."""
        kept = {name: tensor.detach().clone() for name, tensor in self.tensors.items()}
        loss = self.step(update=False)
        for name, tensor in self.tensors.items():
            tensor.data.copy_(kept[name])
        self.dropout = True
        gradients: dict[str, Any] = {name: _outward(name, tensor.grad) for name, tensor in self.trained.items()}
        np.savez(file, **gradients)
        return loss

    def time(self, steps: int) -> tuple[float, int]:
        """Return the seconds of so many steps, and the most memory above that of the process without network."""
        begin = time.perf_counter()
        for _ in range(steps):
            self.step()
        return time.perf_counter() - begin, memory.peak() - self.before

    def _through(self, parts: list[NodeRecord], x: Tensor) -> Tensor:
        for part in parts:
            x = _ACTIVATIONS[part.activation](self._apply(part, x))
        return x

    def _apply(self, part: NodeRecord, x: Tensor) -> Tensor:
        if part.kind == "Sequential":
            return self._through(part.inside, x)
        if part.kind in ("Sum", "Concat"):
            branches = [self._through([branch], x) for branch in part.inside]
            return torch.cat(branches, 1) if part.kind == "Concat" else sum(branches[1:], branches[0])
        if part.kind == "DropoutLayer":
            return functional.dropout(x, part.arguments["rate"], training=self.dropout)
        own = {n.rpartition("/")[2]: t for n, t in self.tensors.items() if n.rpartition("/")[0] == part.name}
        return _LAYERS[part.kind](x, part.arguments, own)


def _conv(x: Tensor, how: dict[str, Any], own: dict[str, Tensor]) -> Tensor:
    x, padding = _padded(x, how, _PAD_MODES.get(how["mode"], how["mode"]))
    bias = own.get("bias")
    conv = (functional.conv1d, functional.conv2d, functional.conv3d)[x.ndim - 3]
    return conv(x, own["weights"], bias, how["stride"], padding, how["dilation"], how["groups"])


def _max_pool(x: Tensor, how: dict[str, Any], own: dict[str, Tensor]) -> Tensor:
    x, padding = _padded(x, how, "constant")
    pool = (functional.max_pool1d, functional.max_pool2d, functional.max_pool3d)[x.ndim - 3]
    return pool(x, how["kernel"], how["stride"], padding)


def _avg_pool(x: Tensor, how: dict[str, Any], own: dict[str, Tensor]) -> Tensor:
    counted = how["count_include_pad"]
    x, padding = _padded(x, how, "constant")
    pool = (functional.avg_pool1d, functional.avg_pool2d, functional.avg_pool3d)[x.ndim - 3]
    return pool(x, how["kernel"], how["stride"], padding, count_include_pad=counted)


def _global_avg_pool(x: Tensor, how: dict[str, Any], own: dict[str, Tensor]) -> Tensor:
    return x.mean(tuple(range(2, x.ndim)))


def _fc(x: Tensor, how: dict[str, Any], own: dict[str, Tensor]) -> Tensor:
    return functional.linear(x.movedim(1, -1).flatten(1), own["weights"], own.get("bias"))


def _batch_norm(x: Tensor, how: dict[str, Any], own: dict[str, Tensor]) -> Tensor:
    running = own["mean"], own["var"]
    return functional.batch_norm(x, *running, own["gamma"], own["beta"], True, how["momentum"], how["eps"])


def _activation(x: Tensor, how: dict[str, Any], own: dict[str, Tensor]) -> Tensor:
    return x.clone()


_LAYERS: dict[str, Callable[[Tensor, dict[str, Any], dict[str, Tensor]], Tensor]] = {
    "ConvLayer": _conv, "MaxPoolingLayer": _max_pool, "AvgPoolingLayer": _avg_pool, "FCLayer": _fc,
    "GlobalAvgPoolingLayer": _global_avg_pool, "BatchNormLayer": _batch_norm, "ActivationLayer": _activation,
}  # fmt: skip


def _padded(x: Tensor, how: dict[str, Any], mode: str) -> tuple[Tensor, tuple[int, ...]]:
    """Return x and the padding that is left to the kernel: all of it, where it is the same on both sides."""
    sides = how["padding"]
    if mode == "constant" and all(before == after for before, after in sides):
        return x, tuple(before for before, _ in sides)
    flat = [p for before, after in reversed(sides) for p in (before, after)]
    constant = {"value": how["fill"]} if mode == "constant" else {}
    return functional.pad(x, flat, mode=mode, **constant), (0,) * len(sides)


def _inward(name: str, array: Tensor) -> Tensor:
    """Return a parameter as PyTorch keeps it."""
    if not name.endswith("/weights"):
        return array
    turned = array.movedim((-1, -2), (0, 1))
    return turned.contiguous(memory_format=_FORMATS.get(array.ndim, torch.contiguous_format))


def _outward(name: str, array: Any) -> np.ndarray:
    return (array.movedim((0, 1), (-1, -2)) if name.endswith("/weights") else array).numpy()


def _optimizer(network: Network, tensors: list[Tensor]) -> torch.optim.Optimizer:
    how = dict(network.optimizer_arguments)
    rate = how.pop("learning_rate")
    if network.optimizer == "SGD":
        return torch.optim.SGD(tensors, rate, **how)
    betas = how.pop("beta1"), how.pop("beta2")
    return torch.optim.Adam(tensors, rate, betas, **how)


def serve(folder: Path, requests: TextIO, answers: TextIO) -> None:
    """Make the twin that a folder describes; then call what each request names."""
    network, (x, targets) = read(folder)
    twin = TorchTwin(network, x, targets)
    for line in requests:
        name, *arguments = json.loads(line)
        answers.write(json.dumps(getattr(twin, name)(*arguments)) + "\n")
        answers.flush()


if __name__ == "__main__":
    serve(Path(sys.argv[1]), sys.stdin, sys.stdout)
