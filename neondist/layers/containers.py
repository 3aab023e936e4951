"""Base class of containers, and chains of layers; branches.py has containers whose layers share one input."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from ..errors import ConfigError
from ..registry.arguments import describe_mismatch
from .base import Layer, Node, Shape


class Container(Node):
    """Base class of containers.

    All activations of one shape are divided into the same tiles, so branches match cell by cell.
    """

    def __init__(self, layers: Sequence[Node | Sequence[Any]], name: str | None = None) -> None:
        self.name, self.layers = name, [as_node(layer) for layer in layers]

    @abstractmethod
    def members_with_input_shapes(self, input_shape: Shape) -> Iterator[tuple[Node, Shape]]:
        """Yield the direct members with the shapes of their inputs."""

    def chains_with_input_shapes(self, input_shape: Shape) -> Iterator[list[tuple[Node, Shape]]]:
        """Yield the chains in all members."""
        for layer, shape in self.members_with_input_shapes(input_shape):
            yield from layer.chains_with_input_shapes(shape)

    def assign_names(self, prefix: str, counts: dict[str, int]) -> None:
        """Name the container, and its members with the container's name as prefix."""
        self._set_default_name(prefix, counts)
        inner_counts: dict[str, int] = {}
        for layer in self.layers:
            layer.assign_names(f"{self.name}.", inner_counts)

    def distributed_counterpart(self) -> Node:
        """Return a container of the members' distributed counterparts."""
        container: Node = type(self)([layer.distributed_counterpart() for layer in self.layers], name=self.name)
        return container

    @property
    def leaves(self) -> list[Layer]:
        """All layers in this container, in order."""
        return [leaf for layer in self.layers for leaf in layer.leaves]


class Sequential(Container):
    """A chain of layers; an empty one is the identity.

    Parameters
    ----------
    layers : sequence of layers or containers
        A list in this sequence stands for a Sequential.
    """

    def members_with_input_shapes(self, input_shape: Shape) -> Iterator[tuple[Node, Shape]]:
        """Yield every layer with the output shape of the previous one."""
        for layer in self.layers:
            yield layer, input_shape
            input_shape = layer.output_shape_for(input_shape)

    def chains_with_input_shapes(self, input_shape: Shape) -> Iterator[list[tuple[Node, Shape]]]:
        """Yield this chain, and the chains in its members."""
        yield list(self.members_with_input_shapes(input_shape))
        yield from super().chains_with_input_shapes(input_shape)

    def output_shape_for(self, input_shape: Shape) -> Shape:
        """Return the output shape of the last layer."""
        for layer in self.layers:
            input_shape = layer.output_shape_for(input_shape)
        return input_shape

    def lower(self, builder: Any, value: int) -> int:
        """Append every layer, applied to the output of the previous one."""
        for layer in self.layers:
            value = layer.lower(builder, value)
        return value


def as_node(layer: Any) -> Node:
    """Return a layer or container itself, a list as a Sequential; raise ConfigError for other objects."""
    if isinstance(layer, (list, tuple)):
        return Sequential(layer)
    if not isinstance(layer, Node):
        raise ConfigError(f"layers: {describe_mismatch(layer, Node)}")
    return layer
