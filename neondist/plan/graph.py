"""A network as a list of steps: what containers of layers come to."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from ..errors import ShapeError, UserError
from ..geometry import split
from ..layers import Branches, Layer, Node, Shard, declared_with

Shape = tuple[int, ...]


class Step(NamedTuple):
    """One operation. Values are numbered: 0 is the network's input, and each step makes a new one.

    Attributes
    ----------
    layer : Layer or None
        What computes it from one value.
    join : Branches or None
        What joins several values, where no layer computes.
    inputs, output : values
    """

    layer: Layer | None
    join: Branches | None
    inputs: tuple[int, ...]
    output: int

    @property
    def saves_input(self) -> bool:
        """Whether its backward pass reads what the forward pass read."""
        return self.layer is not None and self.layer.saves_input


class Cut(NamedTuple):
    """A vector that is cut over a replica's ranks becomes whole; or, if it `adds`, ranks' vectors become cut sums."""

    direction: str
    features: int
    adds: bool = False

    def sent(self, tiles: int, tile: int) -> int:
        """Return how many numbers of a sample the rank of a tile sends."""
        lo, hi = split(self.features, tiles, tile)
        return self.features - (hi - lo) if self.adds else (tiles - 1) * (hi - lo)


class Graph:
    """The steps of a chain of nodes, in the order of the forward pass.

    Attributes
    ----------
    steps : list of Step
    shapes : list of tuple
        The global shape of every value, without the batch.
    ends : list of (int, int)
        For every number of nodes: how many steps they are, and the value that they give.
    readers : list of list of int
        The steps that read each value.
    absorbed : dict of step to step
        Layers that do nothing but activate, each by the step before it, which does so in its own pass over memory: its
        result is what both give, and no value by itself.
    cleared : dict of step to step
        Steps whose max(z, 0) is gone back through by what is behind them: a pooling, which keeps no place of what is
        not positive, or a convolution, which has it as its view. They do not look at what they gave.
    restored : dict of step to step
        Steps that read what a normalisation gives, by the step of that: on the way back it gives it again.
    whole : int
        A vector that each rank has whole, whoever reads it.
    shards : set of int
        Vectors that each rank of a replica has its range of alone, since all who read them want no more.
    """

    def __init__(
        self, steps: Sequence[Step], shapes: Sequence[Shape], ends: Sequence[tuple[int, int]], whole: int = 0
    ) -> None:
        self.steps, self.shapes, self.ends, self.whole = list(steps), list(shapes), list(ends), whole
        self.output = self.ends[-1][1]
        self.readers: list[list[int]] = [[] for _ in self.shapes]
        for at, step in enumerate(self.steps):
            for value in step.inputs:
                self.readers[value].append(at)
        self.absorbed = {at: at - 1 for at in range(1, len(self.steps)) if self._absorbed(at)}
        self.cleared = dict(found for at in range(1, len(self.steps)) if (found := self._cleared(at)))
        self.restored: dict[int, int] = {}
        for at in range(len(self.steps)):
            if (by := self._restored(at)) is not None and by not in self.restored:  # which needs its own input
                self.restored[at] = by
        self.shards = {step.output for step in self.steps if self._stays_cut(step)}

    def _absorbed(self, at: int) -> bool:
        layer, before = self.steps[at].layer, self.steps[at - 1]
        alone = self.readers[before.output] == [at] and len(self.shapes[before.output]) > 1
        if (
            layer is None
            or not alone
            or not layer.only_activates
            or not declared_with(layer, "only_activates", "forward")
        ):
            return False
        by = before.layer or before.join
        return by is not None and layer.activation is not None and by.can_absorb(layer.activation)

    def _cleared(self, at: int) -> tuple[int, int] | None:
        """Return the step that the one behind it spares a look at its output, and that one."""
        layer, before = self.steps[at].layer, self.steps[at - 1]
        if layer is None or not layer.clears or before.layer is None or self.readers[before.output] != [at]:
            return None
        by, activation = self.absorbed.get(at - 1, at - 1), before.layer.activation
        maker = self.steps[by].layer
        keeps = maker is None or (maker.saves_activated and not maker.saves_output)
        clips = activation and all(declared_with(activation, "clips", method) for method in ("fprop", "bprop"))
        said = all(declared_with(layer, "clears", method) for method in ("forward", "backward"))
        exact = layer.scheme is None or (layer.scheme.exact and layer.scheme.gradients == "scatter")
        return (by, at) if keeps and clips and said and exact else None

    def _restored(self, at: int) -> int | None:
        layer, (value, *_) = self.steps[at].layer, self.steps[at].inputs
        by = self.made.get(value)
        maker = None if by is None else self.steps[by].layer
        saving = [reader for reader in self.readers[value] if self.steps[reader].saves_input]
        if layer is None or maker is None or saving != [at] or self.looked_at(value):
            return None
        saves_it_alone = layer.saves_beside == (0, 0) == declared_with(layer, "saves_beside", "forward")
        return by if saves_it_alone and maker.restores and declared_with(maker, "restores", "forward") else None

    def _stays_cut(self, step: Step) -> bool:
        readers = self.readers[step.output]
        vector = len(self.shapes[step.output]) == 1 and step.output != self.whole
        gives = vector and step.layer is not None and step.layer.gives_shards
        return gives and bool(readers) and all(self.wants_shard(self.steps[at]) for at in readers)

    def wants_shard(self, step: Step) -> bool:
        """Return whether a step wants this rank's range of a vector alone."""
        return step.layer is not None and step.layer.layout is Shard and len(self.shapes[step.inputs[0]]) == 1

    def redistributions(self, step: Step, needed: bool = True) -> list[Cut]:
        """Return how vectors are redistributed for a step, forward and backward.

        Parameters
        ----------
        needed : bool
            Whether the gradient of its input is needed.
        """
        found, (first, *_) = [], step.inputs
        if step.output in self.shards and not (step.layer and step.layer.splits_outputs):
            (features,) = self.shapes[step.output]
            found += [Cut("forward", features, adds=True), Cut("backward", features)]
        if needed and self.wants_shard(step) and first not in self.shards:
            found.append(Cut("backward", self.shapes[first][0]))
        return found

    @cached_property
    def made(self) -> dict[int, int]:
        """The step that makes each value: of an activation that goes with the step before it, that one."""
        return {step.output: self.absorbed.get(at, at) for at, step in enumerate(self.steps)}

    def looked_at(self, value: int) -> bool:
        """Return whether what made a value looks at it again on the way back."""
        at = self.made.get(value)
        if at is None or at in self.cleared:
            return False
        layer, absorbs = self.steps[at].layer, value != self.steps[at].output
        return absorbs if layer is None else layer.keeps_output or (absorbs and layer.saves_activated)

    def part(self, first: int, last: int) -> Graph:
        """Return the steps of the nodes from `first` up to `last`, whose input is value 0 then."""
        (begin, zero), (end, _) = self.ends[first], self.ends[last]
        steps = [
            step._replace(inputs=tuple(value - zero for value in step.inputs), output=step.output - zero)
            for step in self.steps[begin:end]
        ]
        ends = [(count - begin, value - zero) for count, value in self.ends[first : last + 1]]
        return Graph(steps, self.shapes[zero : zero + len(steps) + 1], ends)


class Lowering:
    """Makes a graph of nodes, which append their steps to it; an error names the layer.

    Attributes
    ----------
    shapes : list of tuple
        Of the values so far.
    """

    def __init__(self, nodes: Sequence[Node], input_shape: Shape) -> None:
        self.steps: list[Step] = []
        self.shapes = [input_shape]
        self.ends = [(0, 0)]
        for index, node in enumerate(nodes):
            self._about: Node = node
            try:
                value = node.lower(self, self.ends[-1][1])
            except UserError as error:
                raise of_layer(error, index, self._about) from error
            self.ends.append((len(self.steps), value))

    @property
    def graph(self) -> Graph:
        """All of it."""
        return Graph(self.steps, self.shapes, self.ends)

    def layer(self, layer: Layer, value: int) -> int:
        """Append a layer, and return the value that it gives."""
        outer, self._about, shape = self._about, layer, self.shapes[value]
        if len(shape) < 2 and (layer.needs_image or layer.window is not None):
            raise ShapeError(
                f"needs an image, but its input is a vector of shape {shape}; put it before the fully connected or"
                " global pooling layer"
            )
        found = self._append(layer, None, (value,), layer.output_shape_for(shape))
        self._about = outer
        return found

    def join(self, join: Branches, values: Sequence[int], shape: Shape) -> int:
        """Append what joins several values."""
        return self._append(None, join, tuple(values), shape)

    def _append(self, layer: Layer | None, join: Branches | None, inputs: tuple[int, ...], shape: Shape) -> int:
        self.shapes.append(shape)
        self.steps.append(Step(layer, join, inputs, len(self.shapes) - 1))
        return len(self.shapes) - 1


def of_layer(error: UserError, index: int, layer: Node) -> UserError:
    """Return the error with the layer's place in front and the layer as `subject`."""
    named = type(error)(f"layer {index} '{layer.name}' ({type(layer).__name__}): {error}")
    named.subject = layer
    return named
