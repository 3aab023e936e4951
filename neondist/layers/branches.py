"""Containers whose layers all see the same input: sums and concatenations, for residual networks and U-Nets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..arrays import Room
from ..errors import ConfigError, ShapeError
from .containers import Container
from .node import Context, Node, Phase, Shape, Taker


class BranchEnd(NamedTuple):
    """Where a branch writes what it gives, until the container has taken it on; it stands where a next layer would."""

    container: Branches
    branch: int

    def input_place(self, samples: int) -> Any | None:
        """Return the place of the branch."""
        return self.container.place(Branches.ENDS + self.branch, samples)


class Branches(Container):
    """Base of the containers whose layers all see the same input; a branch is a layer, or a list of layers.

    Attributes
    ----------
    rooms : sequence of (Room or None)
        Where input, output, the input's gradient, and the output of each branch live; None, or no rooms: in memory of
        their own.
    """

    INPUT, OUTPUT, GRADIENT, ENDS = range(4)
    """indices of `rooms`"""
    writes_early = True
    rooms: Sequence[Room | None] = ()
    preceding: Node | None = None
    following: Taker | None = None

    def __init__(self, layers: Sequence[Any], name: str | None = None) -> None:
        super().__init__(layers, name)
        if not self.layers:
            raise ConfigError(f"layers: {type(self).__name__} has no branch; give one, [] for the identity")

    def build(self, input_shape: Shape, context: Context) -> None:
        """Build every layer inside."""
        super().build(input_shape, context)
        self.kernels, self.dtype = context.backend, context.dtype
        self.local_shapes = [
            (*context.grid.tile_box(shape[:-1]).shape, shape[-1]) for shape in self.shapes_for(input_shape)
        ]

    def shapes_for(self, input_shape: Shape) -> list[Shape]:
        """Return the global shapes of what lives in `rooms`, without the batch."""
        ends = [layer.output_shape_for(input_shape) for layer in self.layers]
        return [input_shape, self.output_shape_for(input_shape), input_shape, *ends]

    def inputs(self, input_shape: Shape) -> Iterator[tuple[Node, Shape]]:
        """Yield every branch with the container's input."""
        for layer in self.layers:
            yield layer, input_shape

    def joins(self, input_shape: Shape) -> Iterator[tuple[Branches, Shape]]:
        """Yield this one, and those inside."""
        yield self, input_shape
        yield from super().joins(input_shape)

    def connect(self, preceding: Node | None, following: Taker | None) -> None:
        """Connect every branch with its end alone: the container hands round what comes in, and combines what comes."""
        self.preceding, self.following = preceding, following
        for branch, layer in enumerate(self.layers):
            layer.connect(None, BranchEnd(self, branch))

    def place(self, which: int, samples: int) -> Any | None:
        """Return the array (samples, *tile, C) of one of `rooms`; None if there is none."""
        room = self.rooms[which] if self.rooms else None
        return None if room is None else room.array((samples, *self.local_shapes[which]))

    def input_place(self, samples: int) -> Any | None:
        """Return an array that lives as long as a branch may need its input."""
        return self.place(self.INPUT, samples)

    def new_output(self, samples: int) -> Any:
        """Return an array for the output: where the next layer wants it, if there is one."""
        wanted = self.following.input_place(samples) if self.following else self.place(self.OUTPUT, samples)
        return self._empty(self.OUTPUT, samples) if wanted is None else wanted

    def _empty(self, which: int, samples: int) -> Any:
        return self.kernels.empty((samples, *self.local_shapes[which]), self.dtype)

    def _shapes(self, input_shape: Shape, compared: slice) -> list[Shape]:
        """Return the branches' output shapes; ShapeError if they differ in the axes compared."""
        shapes = [layer.output_shape_for(input_shape) for layer in self.layers]
        for layer, shape in zip(self.layers, shapes, strict=True):
            if shape[compared] != shapes[0][compared] or len(shape) != len(shapes[0]):
                raise ShapeError(
                    f"{type(self).__name__} '{self.name}': branch {_tell(self.layers[0])} gives {shapes[0]}, but branch"
                    f" {_tell(layer)} gives {shape}; make them agree, with padding, stride or a Crop"
                )
        return shapes

    def _back(self, gradients: Sequence[Any]) -> Any:
        """Return the sum of what the branches send back."""
        total: Any = None
        for layer, dy in reversed(list(zip(self.layers, gradients, strict=True))):  # as `lifetimes` has it
            layer.needs_input_gradient = self.needs_input_gradient
            dx = layer.bprop(dy)
            if dx is not None and total is None:
                place = self.place(self.GRADIENT, len(dx))
                total = self._empty(self.GRADIENT, len(dx)) if place is None else place
                self.kernels.copy(dx, total)
            elif dx is not None:
                total += dx
        return total


class Sum(Branches):
    """The sum of its branches; `Sum([[conv, conv], []])` is a residual block: an empty list is the identity."""

    def output_shape_for(self, input_shape: Shape) -> Shape:
        """Return the shape that all branches must give."""
        return self._shapes(input_shape, slice(None))[0]

    def fprop(self, x: Any, phase: Phase) -> Any:
        """Return the sum of all branches."""
        total = self.new_output(len(x))
        self.kernels.copy(self.layers[0].fprop(x, phase), total)
        for layer in self.layers[1:]:
            total += layer.fprop(x, phase)
        return total

    def bprop(self, dy: Any) -> Any:
        """Give dy to every branch."""
        return self._back([dy] * len(self.layers))


class Concat(Branches):
    """Its branches side by side along the channels, such as the skip connections of a U-Net."""

    def output_shape_for(self, input_shape: Shape) -> Shape:
        """Return the extent that all branches must give, and the sum of their channels."""
        shapes = self._shapes(input_shape, slice(0, -1))
        return *shapes[0][:-1], sum(shape[-1] for shape in shapes)

    def fprop(self, x: Any, phase: Phase) -> Any:
        """Return all branches' channels."""
        whole, start, self.borders = self.new_output(len(x)), 0, []
        for layer in self.layers:
            part = layer.fprop(x, phase)
            self.kernels.copy(part, whole[..., start : start + part.shape[-1]])
            start += part.shape[-1]
            self.borders.append(start)
        return whole

    def bprop(self, dy: Any) -> Any:
        """Give every branch the gradient of its channels."""
        return self._back(np.split(dy, self.borders[:-1], axis=-1))


def _tell(node: Node) -> str:
    return f"'{node.name}'" if node.leaves else f"'{node.name}' (the identity)"
