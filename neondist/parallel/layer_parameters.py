"""The arrays of layers as views of flat buffers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

from ..arrays import rng
from ..arrays.namespace import namespace
from ..errors import ConfigError, ShapeError, set_error_subject
from ..layers import Layer, ModelContext, Parameter
from ..strategies.shares import OwnerBoxes
from .parameters import Parameters
from .shard import ParameterShard
from .sync import AllReduce, GradientSync


class BufferViews(dict[str, Any]):
    """Arrays of a layer by name, as views of a flat buffer: assignment copies values into the view."""

    def __init__(self, layer: Layer, attribute: str) -> None:
        super().__init__()
        self._layer, self._attribute = layer, attribute

    def __missing__(self, name: str) -> Any:
        with set_error_subject(self._layer):
            raise ConfigError(f"{self._describe(name)}: is not declared; declared: {', '.join(self) or 'none'}")

    def _describe(self, name: str) -> str:
        return f"layer '{self._layer.name}' ({type(self._layer).__name__}): {self._attribute}['{name}']"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise ConfigError: a copy would hold arrays that are not part of the buffers."""
        raise ConfigError(
            "a built model, its layers and their arrays can be neither copied nor pickled; copy model.state(), and load"
            " it into a model created with new layers"
        )

    def update(self, *values: Any, **arrays: Any) -> None:
        """Copy the values of a mapping, and those of keyword arguments, into the arrays."""
        for name, array in dict(*values, **arrays).items():
            self[name] = array

    def __ior__(self, values: Any) -> Any:  # type: ignore[misc]  # dict.__or__ returns a dict
        self.update(values)
        return self

    def __setitem__(self, name: str, values: Any) -> None:
        array, values = self._find_array_and_convert_values(name, values)
        if values is not array:  # params[name] += values assigns the same array
            array[...] = values

    def _find_array_and_convert_values(self, name: str, values: Any) -> tuple[Any, Any]:
        """Return the array with a name, and values in its namespace; ConfigError or ShapeError if they do not match."""
        array = super().__getitem__(name)
        if values is None:
            with set_error_subject(self._layer):
                raise ConfigError(f"{self._describe(name)}: is None; assign an array of shape {array.shape}")
        values = namespace(array).asarray(values)
        if values.shape != array.shape:
            with set_error_subject(self._layer):
                raise ShapeError(f"{self._describe(name)}: has shape {values.shape}; expected {array.shape}")
        return array, values


class AccumulatedGradients(BufferViews):
    """Gradients by name: assigned values are added to the values assigned since `reset`."""

    def __init__(self, layer: Layer) -> None:
        super().__init__(layer, "grads")
        self.names_to_zero: set[str] = set()

    def reset(self) -> None:
        """Set all gradients to zero; zeros are written only into arrays that are read before they are assigned."""
        self.names_to_zero.update(self)

    def __setitem__(self, name: str, values: Any) -> None:
        array, values = self._find_array_and_convert_values(name, values)
        if name in self.names_to_zero:
            self.names_to_zero.discard(name)
            array[...] = values
        elif values is not array:  # grads[name] += values assigns the same array
            array += values

    def __getitem__(self, name: str) -> Any:
        array = super().__getitem__(name)
        if name in self.names_to_zero:
            self.names_to_zero.discard(name)
            array[...] = 0
        return array

    def zero_unassigned(self) -> None:
        """Zero the arrays that have not been assigned since `reset`."""
        for name in list(self.names_to_zero):
            self[name]


class LayerParameters(Parameters):
    """The arrays of all layers.

    Binds `params`, `grads` and `state` of every layer to views of the buffers, and fills in initial values. They depend
    only on the seed, the names of layer and array, the initialiser, and an element's index in the whole array.

    Attributes
    ----------
    untrained_values : flat array
        State that is kept but not trained.
    version_of_gradients : int
        `version` of the values whose gradients `ModelPass.backward` last computed; -1 before its first call.
    """

    version_of_gradients = -1

    def __init__(
        self,
        layers: Iterable[Layer],
        context: ModelContext,
        sync: type[GradientSync] = AllReduce,
        shares: Mapping[str, OwnerBoxes] | None = None,
        gradient_compressors: Mapping[str, str] | None = None,
    ) -> None:
        self.context = context
        self.layers = {str(layer.name): layer for layer in layers}
        trained_shards = self._create_shards(
            {name: layer.parameters_for(layer.input_shape) for name, layer in self.layers.items()}
        )
        kept = self._create_shards({name: layer.state_for(layer.input_shape) for name, layer in self.layers.items()})
        super().__init__(context.grid, trained_shards, self._allocate_zeros, sync, shares, gradient_compressors)
        self.untrained_shards = kept
        self.untrained_values = self._allocate_zeros(sum(prod(shard.local_shape) for shard in kept))
        self._flat_ranges_by_layer: dict[str, list[tuple[int, int]]] = {layer: [] for layer in self.layers}
        for shard, span in zip(self.trained_shards[: self.first_owned_index], self.spans, strict=False):
            self._flat_ranges_by_layer[shard.layer_name].append(span)
        for layer in self.layers.values():
            layer.params, layer.state = (BufferViews(layer, attribute) for attribute in ("params", "state"))
            layer.grads = AccumulatedGradients(layer)
        for shard, value, gradient in zip(
            self.trained_shards, self.split_flat(self.values), self.split_flat(self.grads), strict=True
        ):
            dict.__setitem__(self.layers[shard.layer_name].params, shard.name, value)
            dict.__setitem__(self.layers[shard.layer_name].grads, shard.name, gradient)
        for shard, value in zip(
            self.untrained_shards, self.split_flat(self.untrained_values, self.untrained_shards), strict=True
        ):
            dict.__setitem__(self.layers[shard.layer_name].state, shard.name, value)
        for shard, value in self.arrays():
            self._fill_initial_values(shard, value)

    def check_layers_not_rebuilt(self) -> None:
        """Raise ConfigError if a layer has been built into another model since this model was built."""
        for name, layer in self.layers.items():
            if layer.context is not self.context:
                raise ConfigError(
                    f"layer '{name}' has since been built into another model, which holds its arrays; create layers"
                    " for each model, or build this model again"
                )

    def reset_gradients(self) -> None:
        """Set all gradients to zero."""
        self.sync.begin_step()
        for layer in self.layers.values():
            layer.grads.reset()

    def mark_gradients_ready(self, layer: Layer) -> None:
        """Mark this rank's shares of a layer's gradients as complete."""
        layer.grads.zero_unassigned()
        for span in self._flat_ranges_by_layer[str(layer.name)]:
            self.sync.mark_ready(span)

    def zero_unassigned(self) -> None:
        """Zero the gradients that have not been assigned since `reset_gradients`."""
        for layer in self.layers.values():
            layer.grads.zero_unassigned()

    def mark_all_gradients_written(self) -> None:
        """Mark all gradients as written: a replayed device graph writes gradients without assignment."""
        for layer in self.layers.values():
            layer.grads.names_to_zero.clear()

    def sum_gradients(self, to_owners: bool = False, loss_scale: float = 1.0) -> None:
        """Sum the gradients over all ranks; those of parameters partitioned over tiles, over replicas only."""
        self.zero_unassigned()
        super().sum_gradients(to_owners, loss_scale)

    def arrays(self) -> list[tuple[ParameterShard, Any]]:
        """Return all trained arrays and all layer state: views of this rank's parts."""
        trained = [(shard, self.layers[shard.layer_name].params[shard.name]) for shard in self.trained_shards]
        return trained + [(shard, self.layers[shard.layer_name].state[shard.name]) for shard in self.untrained_shards]

    def gradients(self) -> list[tuple[ParameterShard, Any]]:
        """Return the gradients of all trained arrays: views of this rank's parts."""
        return [(shard, self.layers[shard.layer_name].grads[shard.name]) for shard in self.trained_shards]

    def _create_shards(self, parameters_by_layer: Mapping[str, Mapping[str, Parameter]]) -> list[ParameterShard]:
        return [
            ParameterShard(layer, name, parameter, self.context.grid)
            for layer, parameters in parameters_by_layer.items()
            for name, parameter in parameters.items()
        ]

    def _allocate_zeros(self, size: int) -> Any:
        return self.context.backend.xp.zeros((size,), self.context.dtype)

    def _fill_initial_values(self, shard: ParameterShard, array: Any) -> None:
        random_stream = rng.key(self.context.seed, "weights", shard.layer_name, shard.name)
        parameter = shard.parameter
        index = rng.row_major_indices(shard.unflattened_shape, shard.box.slices).reshape(array.shape)
        values = parameter.initializer.values(random_stream, index, parameter.fan_in, parameter.fan_out)
        value_shape = getattr(values, "shape", None)
        if not isinstance(values, float) and (value_shape != index.shape or values.dtype.kind not in "iuf"):
            kind = type(values).__name__ if value_shape is None else f"shape {value_shape} and dtype {values.dtype}"
            with set_error_subject(parameter.initializer):
                raise ConfigError(
                    f"{type(parameter.initializer).__name__}.values returns {kind}; expected float64 values of the"
                    f" shape {index.shape} of the indices"
                )
        array[...] = self.context.backend.from_host(values, array.dtype)
