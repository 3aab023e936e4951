"""Builder of a network of layers from operators, and nesting of the layers into containers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from ...layers import Branches, Concat, GlobalAvgPoolingLayer, Layer, Node
from ...registry import Registered
from ..ir.errors import UnsupportedOperator
from ..lowering.steps import OperatorPosition

Shape = tuple[int, ...]
BATCH_STATISTICS_SUFFIXES = ("/mean", "/var")


class ModuleTensor(NamedTuple):
    """A tensor of the module; `data` is None unless it is a parameter or a persistent buffer."""

    name: str
    data: torch.Tensor | None
    is_trained: bool


class TracedValue(NamedTuple):
    """Result of a step.

    Attributes
    ----------
    step_index : int
        Index of the step that computes the value; 0 is the network's input.
    shape : tuple of int
        Shape of the tensor (N, C, *spatial), or its current reshape, such as (N, C * H * W).
    layer_shape : tuple of int
        Shape of the layer's output without the batch: (*spatial, C), or (C,).
    value_number : int
        Number of the computation: equal for equal computations, ignoring layers that are the identity in evaluation.
    """

    step_index: int
    shape: Shape
    layer_shape: Shape
    value_number: int

    @property
    def matches_layer_axes(self) -> bool:
        """Whether the tensor and the layer's output have the same axes, up to their order."""
        return self.layer_shape == (*self.shape[2:], *self.shape[1:2])


class Step(NamedTuple):
    """A layer, or a container that joins values; `is_global_mean`: the layer takes the mean of the whole image."""

    layer: Layer | None
    join_class: type[Branches] | None
    input_steps: tuple[int, ...]
    where: OperatorPosition
    is_global_mean: bool = False


class NetworkBuilder:
    """The layers converted so far, and the operator being converted.

    Attributes
    ----------
    training : bool
        Whether the graph was captured in training mode.
    where : OperatorPosition
        Location of the operator in the user's program.
    fake_out : fake tensor
        Result of the operator, or its first result.
    joined_values : dict of tuple of int to TracedValue
        Existing concatenations, by the steps of the concatenated values.
    weights : dict of str to array
        Arrays from the module by '<layer>/<parameter>'.
    """

    def __init__(self, input_shape: Shape, dtype: torch.dtype, training: bool, value_numbers: dict[Any, int]) -> None:
        self.dtype, self.training, self._value_numbers = dtype, training, value_numbers
        self.batch_size = input_shape[0]
        self.input = TracedValue(0, input_shape, (*input_shape[2:], input_shape[1]), -1)
        self.where = OperatorPosition("", "", "")
        self.fake_out = torch.empty(())
        self.steps: list[Step] = []
        self.joined_values: dict[tuple[int, ...], TracedValue] = {}
        self.weights: dict[str, Any] = {}
        self._name_counts: dict[str, int] = {}
        self._used_tensor_ids: set[int] = set()

    def append(
        self,
        layer: Layer,
        x: TracedValue,
        weights: Mapping[str, tuple[Any, Callable[[torch.Tensor], torch.Tensor] | None]] | None = None,
        *,
        is_global_mean: bool = False,
        identity_in_eval: bool = False,
    ) -> TracedValue:
        """Append a layer, and return its output.

        Parameters
        ----------
        weights : dict of str to (ModuleTensor, function)
            The layer's arrays, as functions of the module's tensors.
        is_global_mean : bool
            Whether the layer takes the mean of the whole image.
        identity_in_eval : bool
            Whether the layer is the identity in evaluation.
        """
        weights = weights or {}
        layer.name = self._new_layer_name()
        for name, (tensor, transform) in weights.items():
            self._add_weight(f"{layer.name}/{name}", tensor, transform)
        weight_sources = tuple((name, tensor.name) for name, (tensor, _) in weights.items())
        layer_shape = layer.output_shape_for(x.layer_shape)
        value_number = x.value_number
        if not identity_in_eval:
            value_number = self._value_number(_layer_key(layer), weight_sources, x.value_number)
        return self._append(Step(layer, None, (x.step_index,), self.where, is_global_mean), layer_shape, value_number)

    def join_values(self, join_class: type[Branches], values: Sequence[Any]) -> TracedValue:
        """Append a container that joins values of the same extent, and return its output."""
        for value in values:
            if not isinstance(value, TracedValue):
                self.refuse("only values computed from the input can be converted to layers")
        layer_shape = values[0].layer_shape
        if join_class is Concat:
            layer_shape = (*layer_shape[:-1], sum(value.layer_shape[-1] for value in values))
        value_number = self._value_number(join_class.__name__, *(value.value_number for value in values))
        step = Step(None, join_class, tuple(value.step_index for value in values), self.where)
        return self._append(step, layer_shape, value_number)

    def reshape(self, x: TracedValue, shape: Shape) -> TracedValue:
        """Return a value with another shape, whose elements are in PyTorch's order."""
        if len(shape) == 2 and len(x.layer_shape) > 1 and prod(x.layer_shape[:-1]) == 1:  # one cell is its own mean
            follows_global_mean = x.step_index > 0 and self.steps[x.step_index - 1].is_global_mean
            input_step = self.steps[x.step_index - 1].input_steps[0] if follows_global_mean else x.step_index
            step = Step(GlobalAvgPoolingLayer(name=self._new_layer_name()), None, (input_step,), self.where)
            return self._append(step, x.layer_shape[-1:], self._value_number("vector", x.value_number))
        return x._replace(shape=tuple(shape))

    def parameter_shape(self, weight: Any) -> Shape:
        """Return the shape of a parameter; reject other tensors."""
        if not isinstance(weight, ModuleTensor) or weight.data is None:
            return self.refuse("its weight is not a parameter of the module")
        return tuple(weight.data.shape)

    def refuse(self, why: str = "it has no corresponding layer", where: OperatorPosition | None = None) -> Any:
        """Raise UnsupportedOperator for the current operator, or for the operator at `where`."""
        raise UnsupportedOperator(
            where or self.where, why, action="become a layer", remedy="use neondist.torch.distribute, without layers"
        )

    def nest_into_nodes(self, output: TracedValue) -> list[Node]:
        """Return the chain of layers and containers from the input to a value."""
        dominators = [0]
        depths = [0]
        for step in self.steps:  # the dominator is the nearest value on all paths from the input
            dominator = step.input_steps[0]
            for other in step.input_steps[1:]:
                while dominator != other:
                    if depths[dominator] < depths[other]:
                        dominator, other = other, dominator
                    dominator = dominators[dominator]
            dominators.append(dominator)
            depths.append(depths[dominator] + 1)
        done_positions: set[int] = set()

        def nest_chain(start_position: int, position: int) -> list[Node]:
            nodes: list[Node] = []
            while position != start_position:
                step = self.steps[position - 1]
                if step.layer is not None:
                    if position in done_positions:
                        self.refuse("its result is used in branches that are not nested", step.where)
                    done_positions.add(position)
                    nodes.append(step.layer)
                elif step.join_class is not None:
                    branches = [nest_chain(dominators[position], input_step) for input_step in step.input_steps]
                    nodes.append(step.join_class(branches))
                position = dominators[position]
            return nodes[::-1]

        return nest_chain(0, output.step_index)

    def _append(self, step: Step, layer_shape: Shape, value_number: int) -> TracedValue:
        shape = tuple(self.fake_out.shape)
        matches_layer_axes = layer_shape == (*shape[2:], *shape[1:2])
        if not shape or shape[0] != self.batch_size or not (matches_layer_axes or prod(shape[1:]) == prod(layer_shape)):
            self.refuse(f"its output has shape {shape}, but the layer's output is {layer_shape} for each sample")
        if self.fake_out.dtype != self.dtype:
            self.refuse(f"its output is {self.fake_out.dtype}, but the module's parameters are {self.dtype}")
        self.steps.append(step)
        return TracedValue(len(self.steps), shape, layer_shape, value_number)

    def _value_number(self, *key: Any) -> int:
        return self._value_numbers.setdefault(key, len(self._value_numbers))

    def _new_layer_name(self) -> str:
        name = (self.where.module or self.where.operator.split(".")[1]).replace("/", "_")
        self._name_counts[name] = self._name_counts.get(name, 0) + 1
        return name if self._name_counts[name] == 1 else f"{name}:{self._name_counts[name]}"

    def _add_weight(self, name: str, tensor: Any, transform: Callable[[torch.Tensor], torch.Tensor] | None) -> Any:
        if not isinstance(tensor, ModuleTensor) or tensor.data is None:
            return self.refuse(f"its {name.rpartition('/')[2]} is not a parameter or buffer of the module")
        if id(tensor.data) in self._used_tensor_ids:
            self.refuse(f"its parameter '{tensor.name}' is used twice, but layers cannot share parameters")
        if tensor.is_trained == name.endswith(BATCH_STATISTICS_SUFFIXES):
            state_text = "is trained" if tensor.is_trained else "is not trained (requires_grad=False)"
            self.refuse(f"its tensor '{tensor.name}' {state_text}, unlike the layer's {name.rpartition('/')[2]}")
        self._used_tensor_ids.add(id(tensor.data))
        data = tensor.data.detach().cpu()
        self.weights[name] = (data if transform is None else transform(data)).numpy().copy()


def _layer_key(layer: Layer) -> str:
    arguments = {name: value for name, value in layer.arguments().items() if name != "name"}
    fields = (f"{k}={type(v).__name__ if isinstance(v, Registered) else repr(v)}" for k, v in sorted(arguments.items()))
    return f"{type(layer).__name__}({', '.join(fields)})"
