"""Containers of layers, and chains; branches.py has those whose layers all see the same input."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from ..errors import ConfigError
from ..registry.arguments import expected
from .base import Layer, Node, Shape


class Container(Node):
    """Base of the containers.

    All activations of one shape are cut into the same tiles, so what meets in a container fits cell by cell.
    """

    def __init__(self, layers: Sequence[Node | Sequence[Any]], name: str | None = None) -> None:
        self.name, self.layers = name, [as_node(layer) for layer in layers]

    @abstractmethod
    def inputs(self, input_shape: Shape) -> Iterator[tuple[Node, Shape]]:
        """Yield what is directly inside, with the shape of its input."""

    def chains(self, input_shape: Shape) -> Iterator[list[tuple[Node, Shape]]]:
        """Yield the chains of all that is inside."""
        for layer, shape in self.inputs(input_shape):
            yield from layer.chains(shape)

    def give_names(self, prefix: str, counts: dict[str, int]) -> None:
        """Name the container, and what is inside with the container's name in front."""
        self._name_itself(prefix, counts)
        inside: dict[str, int] = {}
        for layer in self.layers:
            layer.give_names(f"{self.name}.", inside)

    def twin(self) -> Node:
        """Return the container of the twins."""
        made: Node = type(self)([layer.twin() for layer in self.layers], name=self.name)
        return made

    @property
    def leaves(self) -> list[Layer]:
        """All single layers inside, in order."""
        return [leaf for layer in self.layers for leaf in layer.leaves]


class Sequential(Container):
    """A chain of layers; an empty one is the identity.

    Parameters
    ----------
    layers : sequence of layers or containers
        A list inside stands for a Sequential.
    """

    def inputs(self, input_shape: Shape) -> Iterator[tuple[Node, Shape]]:
        """Yield every layer with the output shape of the previous one."""
        for layer in self.layers:
            yield layer, input_shape
            input_shape = layer.output_shape_for(input_shape)

    def chains(self, input_shape: Shape) -> Iterator[list[tuple[Node, Shape]]]:
        """Yield this chain, and those inside of it."""
        yield list(self.inputs(input_shape))
        yield from super().chains(input_shape)

    def output_shape_for(self, input_shape: Shape) -> Shape:
        """Return the output shape of the last layer."""
        for layer in self.layers:
            input_shape = layer.output_shape_for(input_shape)
        return input_shape

    def lower(self, graph: Any, value: int) -> int:
        """Append every layer, applied to the output of the previous one."""
        for layer in self.layers:
            value = layer.lower(graph, value)
        return value


def as_node(layer: Any) -> Node:
    """Return the layer; a list of layers becomes a Sequential. ConfigError for what is not a layer."""
    if isinstance(layer, (list, tuple)):
        return Sequential(layer)
    if not isinstance(layer, Node):
        raise ConfigError(f"layers: {expected(layer, Node)}")
    return layer
