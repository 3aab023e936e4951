"""Containers whose layers all receive the same input: sums and concatenations, for residual networks and U-Nets."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from ..backends import Kernels
from ..errors import ConfigError, ShapeError
from .base import Node, Shape
from .containers import Container
from .functions import Activation
from .layout import declared_with


class Branches(Container):
    """Base class of containers whose layers all receive the same input; a branch is a layer, or a list of layers."""

    def __init__(self, layers: Sequence[Node | Sequence[Any]], *, name: str | None = None) -> None:
        super().__init__(layers, name)
        if not self.layers:
            raise ConfigError(f"layers: {type(self).__name__} has no branches; add at least one ([] is the identity)")

    def members_with_input_shapes(self, input_shape: Shape) -> Iterator[tuple[Node, Shape]]:
        """Yield every branch with the container's input."""
        for layer in self.layers:
            yield layer, input_shape

    def lower(self, builder: Any, value: int) -> int:
        """Append all branches, and the operation that joins them."""
        values = [layer.lower(builder, value) for layer in self.layers]
        result: int = builder.append_join(self, values, self.output_shape_for(builder.shapes[value]))
        return result

    def can_fuse_activation(self, activation: Activation) -> bool:
        """Return whether `combine` can apply the activation of a following layer, with its argument `clip`."""
        return False

    @abstractmethod
    def combine(self, kernels: Kernels, outputs: Sequence[Any], y: Any) -> None:
        """Write the combined values of the branches into y."""

    @abstractmethod
    def split(self, dy: Any, channels: Sequence[int]) -> Sequence[Any]:
        """Return the gradients of the branches' values with the given channels: dy itself, or parts of it."""

    def _branch_shapes(self, input_shape: Shape, compared_axes: slice) -> list[Shape]:
        """Return the branches' output shapes; ShapeError if they differ in the compared axes."""
        shapes = [layer.output_shape_for(input_shape) for layer in self.layers]
        for layer, shape in zip(self.layers, shapes, strict=True):
            if shape[compared_axes] != shapes[0][compared_axes] or len(shape) != len(shapes[0]):
                raise ShapeError(
                    f"{type(self).__name__} '{self.name}': branch {_node_label(self.layers[0])} outputs {shapes[0]},"
                    f" but branch {_node_label(layer)} outputs {shape}; use padding, stride or CropLayer"
                )
        return shapes


class Sum(Branches):
    """Sum of branches; `Sum([[conv, conv], []])` is a residual block: an empty list is the identity."""

    def output_shape_for(self, input_shape: Shape) -> Shape:
        """Return the common shape of all branches."""
        return self._branch_shapes(input_shape, slice(None))[0]

    def can_fuse_activation(self, activation: Activation) -> bool:
        """Return whether the activation is max(z, 0)."""
        return bool(declared_with(self, "accepts_clip", "combine") and declared_with(activation, "is_relu", "fprop"))

    accepts_clip = True

    def combine(self, kernels: Kernels, outputs: Sequence[Any], y: Any, clip: bool = False) -> None:
        """Write the sum of all branches, at least 0 if `clip`."""
        kernels.add(outputs, y, clip)

    def split(self, dy: Any, channels: Sequence[int]) -> Sequence[Any]:
        """Pass dy to every branch."""
        return [dy] * len(self.layers)


class Concat(Branches):
    """Concatenation of branches along the channels, such as the skip connections of a U-Net."""

    def output_shape_for(self, input_shape: Shape) -> Shape:
        """Return the common extent of all branches, and the sum of their channels."""
        shapes = self._branch_shapes(input_shape, slice(0, -1))
        return *shapes[0][:-1], sum(shape[-1] for shape in shapes)

    def combine(self, kernels: Kernels, outputs: Sequence[Any], y: Any) -> None:
        """Write the channels of all branches."""
        for y_channels, output in zip(self.split(y, [output.shape[-1] for output in outputs]), outputs, strict=True):
            kernels.copy(output, y_channels)

    def split(self, dy: Any, channels: Sequence[int]) -> Sequence[Any]:
        """Pass each branch the gradient of its channels."""
        return [dy[..., stop - n : stop] for n, stop in zip(channels, accumulate(channels), strict=True)]


def _node_label(node: Node) -> str:
    last_name = node.leaves[-1].name if node.leaves else None
    ending = "" if last_name == node.name else f" (ending with '{last_name}')" if last_name else " (the identity)"
    return f"'{node.name}'{ending}"
