"""A network of layers in the making, value by value; then as containers of one another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from ...layers import Branches, Concat, GlobalAvgPoolingLayer, Layer, Node
from ...registry import Registered
from ..errors import UnsupportedOperator
from ..steps import Where

Shape = tuple[int, ...]
STATE = ("/mean", "/var")


class Tensor(NamedTuple):
    """A parameter or a buffer of the module; None: another tensor."""

    name: str
    data: torch.Tensor | None
    trained: bool


class Value(NamedTuple):
    """Result of a step.

    Attributes
    ----------
    at : int
        0 is the input of the network, and each step gives the next.
    shape : tuple of int
        Of the tensor (N, C, *spatial), or how that is regrouped now, such as (N, C * H * W).
    ours : tuple of int
        Of the layer's output, without the batch: (*spatial, C), or (C,).
    number : int
        The same for what is computed alike; layers that are the identity in evaluation are left out.
    """

    at: int
    shape: Shape
    ours: Shape
    number: int

    @property
    def ordered(self) -> bool:
        """Whether it is an image or a vector of the same shape in both."""
        return self.ours == (*self.shape[2:], *self.shape[1:2])


class Step(NamedTuple):
    """A layer, or several values joined by a container; `means` of the whole image may be a vector as well."""

    layer: Layer | None
    join: type[Branches] | None
    inputs: tuple[int, ...]
    where: Where
    means: bool = False


class Network:
    """The layers so far, and the operator at hand.

    Attributes
    ----------
    training : bool
        Whether the graph is that of training.
    where : Where
        Where in the user's program the operator stands.
    out : fake tensor
        What it gives, or the first of that.
    joined : dict of numbers to Value
        What values have been concatenated to.
    weights : dict of str to array
        '<layer>/<parameter>' to what the layers have from the module.
    """

    def __init__(self, input_shape: Shape, dtype: torch.dtype, training: bool, numbers: dict[Any, int]) -> None:
        self.dtype, self.training, self._numbers = dtype, training, numbers
        self.batch = input_shape[0]
        self.input = Value(0, input_shape, (*input_shape[2:], input_shape[1]), -1)
        self.where, self.out = Where("", "", ""), torch.empty(())
        self.steps: list[Step] = []
        self.joined: dict[tuple[int, ...], Value] = {}
        self.weights: dict[str, Any] = {}
        self._names: dict[str, int] = {}
        self._used: set[int] = set()

    def add(
        self,
        layer: Layer,
        x: Value,
        weights: Mapping[str, tuple[Any, Callable[[torch.Tensor], torch.Tensor] | None]] | None = None,
        *,
        means: bool = False,
        only_training: bool = False,
    ) -> Value:
        """Return what a layer gives.

        Parameters
        ----------
        weights : dict of str to (Tensor, function)
            The layer's arrays, as functions of the module's tensors.
        means : bool
            Whether it takes the mean of the whole image.
        only_training : bool
            Whether it is the identity in evaluation.
        """
        weights = weights or {}
        layer.name = self._name()
        for name, (tensor, how) in weights.items():
            self._take(f"{layer.name}/{name}", tensor, how)
        given = tuple((name, tensor.name) for name, (tensor, _) in weights.items())
        ours = layer.output_shape_for(x.ours)
        number = x.number if only_training else self._number(_text(layer), given, x.number)
        return self._made(Step(layer, None, (x.at,), self.where, means), ours, number)

    def join(self, kind: type[Branches], values: Sequence[Any]) -> Value:
        """Return what several values of the same extent come to."""
        for value in values:
            if not isinstance(value, Value):
                self.refuse("only values computed from the input have a layer")
        ours = values[0].ours
        if kind is Concat:
            ours = (*ours[:-1], sum(value.ours[-1] for value in values))
        number = self._number(kind.__name__, *(value.number for value in values))
        return self._made(Step(None, kind, tuple(value.at for value in values), self.where), ours, number)

    def regrouped(self, x: Value, shape: Shape) -> Value:
        """Return a value in another shape; numbers stay in PyTorch's order."""
        if len(shape) == 2 and len(x.ours) > 1 and prod(x.ours[:-1]) == 1:  # one cell is its own mean
            means = x.at > 0 and self.steps[x.at - 1].means
            at = self.steps[x.at - 1].inputs[0] if means else x.at
            layer = GlobalAvgPoolingLayer(name=self._name())
            return self._made(Step(layer, None, (at,), self.where), x.ours[-1:], self._number("vector", x.number))
        return x._replace(shape=tuple(shape))

    def shape_of(self, weight: Any) -> Shape:
        """Return the shape of a parameter; refuse what is none."""
        if not isinstance(weight, Tensor) or weight.data is None:
            return self.refuse("its weight is not a parameter of the module")
        return tuple(weight.data.shape)

    def refuse(self, why: str = "it has no corresponding layer", where: Where | None = None) -> Any:
        """Raise UnsupportedOperator."""
        raise UnsupportedOperator(
            where or self.where,
            why,
            cannot="become a layer",
            remedy="neondist.torch.distribute takes any module",
        )

    def nodes(self, last: Value) -> list[Node]:
        """Return the chain of layers and containers from the input to a value."""
        above = [0]
        depth = [0]
        for step in self.steps:  # the last value that all ways from the input to this one go through
            nearest = step.inputs[0]
            for other in step.inputs[1:]:
                while nearest != other:
                    if depth[nearest] < depth[other]:
                        nearest, other = other, nearest
                    nearest = above[nearest]
            above.append(nearest)
            depth.append(depth[nearest] + 1)
        done: set[int] = set()

        def chain(first: int, at: int) -> list[Node]:
            found: list[Node] = []
            while at != first:
                step = self.steps[at - 1]
                if step.layer is not None:
                    if at in done:
                        self.refuse("its result goes into branches that are not nested", step.where)
                    done.add(at)
                    found.append(step.layer)
                elif step.join is not None:
                    found.append(step.join([chain(above[at], value) for value in step.inputs]))
                at = above[at]
            return found[::-1]

        return chain(0, last.at)

    def _made(self, step: Step, ours: Shape, number: int) -> Value:
        shape = tuple(self.out.shape)
        ordered = ours == (*shape[2:], *shape[1:2])
        if not shape or shape[0] != self.batch or not (ordered or prod(shape[1:]) == prod(ours)):
            self.refuse(f"its output has shape {shape}, but a layer's would have {ours} for each sample")
        if self.out.dtype != self.dtype:
            self.refuse(f"its output is {self.out.dtype}, but the module's parameters are {self.dtype}")
        self.steps.append(step)
        return Value(len(self.steps), shape, ours, number)

    def _number(self, *what: Any) -> int:
        return self._numbers.setdefault(what, len(self._numbers))

    def _name(self) -> str:
        name = (self.where.module or self.where.operator.split(".")[1]).replace("/", "_")
        self._names[name] = self._names.get(name, 0) + 1
        return name if self._names[name] == 1 else f"{name}:{self._names[name]}"

    def _take(self, name: str, tensor: Any, how: Callable[[torch.Tensor], torch.Tensor] | None) -> Any:
        if not isinstance(tensor, Tensor) or tensor.data is None:
            return self.refuse(f"its {name.rpartition('/')[2]} is not a parameter or buffer of the module")
        if id(tensor.data) in self._used:
            self.refuse(f"'{tensor.name}' is used twice, but layers cannot share parameters")
        if tensor.trained == name.endswith(STATE):
            say = "is trained" if tensor.trained else "is not trained (requires_grad=False)"
            self.refuse(f"'{tensor.name}' {say}, unlike the layer's {name.rpartition('/')[2]}")
        self._used.add(id(tensor.data))
        data = tensor.data.detach().cpu()
        self.weights[name] = (data if how is None else how(data)).numpy().copy()


def _text(layer: Layer) -> str:
    arguments = {name: value for name, value in layer.arguments().items() if name != "name"}
    known = (f"{k}={type(v).__name__ if isinstance(v, Registered) else repr(v)}" for k, v in sorted(arguments.items()))
    return f"{type(layer).__name__}({', '.join(known)})"
