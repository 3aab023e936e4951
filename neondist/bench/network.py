"""A built network as plain data, so that another program can build it again."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

from ..errors import ConfigError
from ..layers import Layer, Node
from ..layers.containers import Container
from ..models import Model
from ..registry import serial_class

LAYERS = (
    "ConvLayer", "MaxPoolingLayer", "AvgPoolingLayer", "GlobalAvgPoolingLayer", "FCLayer", "BatchNormLayer",
    "DropoutLayer", "ActivationLayer",
)  # fmt: skip
CONTAINERS = ("Sequential", "Sum", "Concat")
ACTIVATIONS = ("Identity", "ReLU", "Logistic", "Tanh")
COSTS = ("CrossEntropy", "SoftmaxCrossEntropy")
OPTIMIZERS = ("SGD", "Adam")


@dataclass
class NodeRecord:
    """A layer or container: the serial class, its arguments, its window's numbers, and what is inside."""

    kind: str
    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    activation: str = "Identity"
    inside: list[NodeRecord] = field(default_factory=list)


@dataclass
class Network:
    """What it takes to train the same: weights are whole, by '<layer>/<parameter>'."""

    parts: list[NodeRecord]
    weights: dict[str, Any]
    trained: list[str]
    optimizer: str
    optimizer_arguments: dict[str, Any]
    dtype: str


def write(folder: Path, network: Network, batch: tuple[np.ndarray, np.ndarray]) -> None:
    """Write a network and a batch into a folder, for another process."""
    plain = asdict(network)
    np.savez(folder / "weights.npz", **plain.pop("weights"))
    (folder / "network.json").write_text(json.dumps(plain), encoding="utf-8")
    np.savez(folder / "batch.npz", *batch)


def read(folder: Path) -> tuple[Network, tuple[np.ndarray, np.ndarray]]:
    """Return what `write` wrote."""
    plain = json.loads((folder / "network.json").read_text(encoding="utf-8"))
    plain["parts"] = [_read_part(part) for part in plain["parts"]]
    with np.load(folder / "weights.npz") as weights, np.load(folder / "batch.npz") as batch:
        return Network(weights=dict(weights), **plain), (batch["arr_0"], batch["arr_1"])


def _read_part(plain: dict[str, Any]) -> NodeRecord:
    return NodeRecord(**plain | {"inside": [_read_part(part) for part in plain["inside"]]})


def network(model: Model) -> Network:
    """Return a built model as plain data; ConfigError if PyTorch's side of the bench has no such piece."""
    known(model.cost, COSTS)
    known(model.optimizer, OPTIMIZERS)
    return Network(
        [_part(node) for node in model.layers],
        model.state(),
        list(model.gradients()),
        type(model.optimizer).__name__,
        {k: v for k, v in model.optimizer.arguments().items() if k != "schedule"},
        str(model.dtype),
    )


def known(piece: Any, names: tuple[str, ...]) -> str:
    """Return the piece's serial class, or raise ConfigError."""
    name = serial_class(type(piece)).__name__
    if name not in names:
        about = f"'{piece.name}' ({name})" if getattr(piece, "name", None) else name
        raise ConfigError(f"--against torch: {about} has no counterpart; there are {', '.join(names)}; leave it out")
    return name


def _part(node: Node) -> NodeRecord:
    kind = known(node, LAYERS + CONTAINERS)
    if kind in CONTAINERS:
        return NodeRecord(kind, str(node.name), inside=[_part(child) for child in cast(Container, node).layers])
    (layer,) = node.leaves
    activation = known(layer.activation, ACTIVATIONS) if layer.activation is not None else "Identity"
    return NodeRecord(kind, str(layer.name), _arguments(layer), activation)


def _arguments(layer: Layer) -> dict[str, Any]:
    """Return the plain arguments, with the window's numbers for every axis and side."""
    plain = {k: v for k, v in layer.arguments().items() if isinstance(v, (bool, int, float, str, type(None)))}
    return plain | (asdict(layer.window) if layer.window is not None else {})
