"""All arrays of a model in flat buffers: one update, one allreduce, whatever the number of layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from typing import Any

import numpy as np

from .. import rng
from ..backends import Backend
from ..comm import ProcessGrid
from ..errors import ShapeError
from ..layers import Layer, Parameter


class Views(dict[str, Any]):
    """Arrays by name that live in a flat buffer: assigning copies the values in, so they stay there."""

    def __setitem__(self, name: str, values: Any) -> None:
        if name not in self:
            raise KeyError(f"no array '{name}'; this layer has {', '.join(self) or 'none'}")
        if np.shape(values) != self[name].shape:
            raise ShapeError(f"'{name}' of shape {np.shape(values)}: expected {self[name].shape}")
        self[name][...] = values


class Parameters:
    """The trained arrays of all layers, their gradients and the arrays that are kept beside them.

    Binds `params`, `grads` and `state` of every layer to views of the buffers, and fills in first values, which depend
    on the seed, the layer's name and the entry's index alone.
    """

    def __init__(self, layers: Iterable[Layer], seed: int, dtype: np.dtype, backend: Backend) -> None:
        self.layers, self.seed = list(layers), seed
        trained = {layer: layer.parameters_for(layer.input_shape) for layer in self.layers}
        kept = {layer: layer.state_for(layer.input_shape) for layer in self.layers}
        self.values = backend.zeros((_size(trained.values()),), dtype)
        self.grads = backend.zeros(self.values.shape, dtype)
        self._kept = backend.zeros((_size(kept.values()),), dtype)
        for layer, views in _views(self.values, trained):
            layer.params = views
        for layer, views in _views(self.grads, trained):
            layer.grads = views
        for layer, views in _views(self._kept, kept):
            layer.state = views
        for layer in self.layers:
            for name, parameter in trained[layer].items():
                layer.params[name] = self._first(layer, name, parameter)
            for name, parameter in kept[layer].items():
                layer.state[name] = self._first(layer, name, parameter)

    def _first(self, layer: Layer, name: str, parameter: Parameter) -> np.ndarray:
        stream = rng.key(self.seed, "weights", str(layer.name), name)
        index = np.arange(prod(parameter.shape), dtype=np.uint64).reshape(parameter.shape)
        return parameter.initializer.values(stream, index, parameter.fan_in, parameter.fan_out)

    def sum_gradients(self, grid: ProcessGrid) -> None:
        """Add up every rank's share: tiles and replicas, in one allreduce."""
        grid.world.allreduce(self.grads)

    def arrays(self) -> dict[str, Any]:
        """Return all arrays by '<layer name>/<name>': views, not copies."""
        return {
            f"{layer.name}/{name}": array
            for layer in self.layers
            for name, array in (*layer.params.items(), *layer.state.items())
        }

    def named_slots(self, slots: dict[str, Any]) -> dict[str, Any]:
        """Return an optimiser's flat slots as views by '<layer name>/<parameter>/<slot>'."""
        trained = {layer: layer.parameters_for(layer.input_shape) for layer in self.layers}
        return {
            f"{layer.name}/{name}/{slot}": array
            for slot, flat in slots.items()
            for layer, views in _views(flat, trained)
            for name, array in views.items()
        }


def load(arrays: dict[str, Any], values: dict[str, Any], what: str) -> None:
    """Copy `values` into `arrays` of the same names; ShapeError, before anything is copied, if they do not fit."""
    missing, unknown = sorted(arrays.keys() - values.keys()), sorted(values.keys() - arrays.keys())
    if missing or unknown:
        raise ShapeError(
            f"{what} does not fit the model: missing {', '.join(missing) or 'none'};"
            f" unknown {', '.join(unknown) or 'none'}"
        )
    for name, array in arrays.items():
        if np.shape(values[name]) != array.shape:
            raise ShapeError(f"{what}: '{name}' has shape {np.shape(values[name])}, but the model's has {array.shape}")
    for name, array in arrays.items():
        array[...] = values[name]


def _size(specs: Iterable[dict[str, Parameter]]) -> int:
    return sum(prod(p.shape) for spec in specs for p in spec.values())


def _views(flat: Any, specs: dict[Layer, dict[str, Parameter]]) -> Iterator[tuple[Layer, Views]]:
    start = 0
    for layer, spec in specs.items():
        views = Views()
        for name, parameter in spec.items():
            stop = start + prod(parameter.shape)
            dict.__setitem__(views, name, flat[start:stop].reshape(parameter.shape))
            start = stop
        yield layer, views
