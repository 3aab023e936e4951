"""Graph of a network: the list of steps to which containers of layers are lowered."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from ..errors import ShapeError, UserError
from ..geometry import Partition, hull_partition, needed_image_cells, part_range
from ..layers import Branches, Layer, Node, Shard, check_declarations, check_signatures, declared_with

Shape = tuple[int, ...]


class Step(NamedTuple):
    """One operation. Values are numbered: 0 is the network's input, and each step produces a new value.

    Attributes
    ----------
    layer : Layer or None
        Computes the output from one value.
    join : Branches or None
        Combines several values, if there is no layer.
    inputs : tuple of int
    output_value : int
    """

    layer: Layer | None
    join: Branches | None
    inputs: tuple[int, ...]
    output_value: int

    @property
    def saves_input(self) -> bool:
        """Whether the backward pass reads the input of the forward pass."""
        return self.layer is not None and self.layer.saves_input


class VectorRedistribution(NamedTuple):
    """Redistribution of a vector over a replica's ranks: an allgather or a reduce-scatter."""

    direction: str
    features: int
    is_reduce_scatter: bool = False

    def elements_sent_by(self, tiles: int, tile: int) -> int:
        """Return the elements per sample that the rank of a tile sends."""
        lo, hi = part_range(self.features, tiles, tile)
        return self.features - (hi - lo) if self.is_reduce_scatter else (tiles - 1) * (hi - lo)


class Graph:
    """The steps of a chain of nodes, in the order of the forward pass.

    Attributes
    ----------
    steps : list of Step
    shapes : list of tuple
        The global shape of every value, without the batch.
    node_ends : list of (int, int)
        Item n: number of steps, and output value, of the first n nodes.
    readers : list of list of int
        The steps that read each value.
    fused_activations : dict of step to step
        Activation layers fused into the step before them, which applies them in its own pass over memory; the
        intermediate value does not exist.
    deferred_relu_gradients : dict of step to step
        Steps with a ReLU whose gradient the following step applies, so that they need not reread their output. The
        following step is a pooling, which passes no gradient to non-positive maxima, or a convolution, whose view
        contains the ReLU's output.
    input_recomputation_steps : dict of step to step
        For each reader of a normalisation's output, the step that recomputes this output in the backward pass.
    always_replicated_value : int
        The vector that stays replicated even if its readers need only a shard; 0: none.
    sharded_vectors : set of int
        Vectors that are sharded over the ranks of a replica, because no reader needs more than its rank's range.
    """

    def __init__(
        self, steps: Sequence[Step], shapes: Sequence[Shape], ends: Sequence[tuple[int, int]], replicated_value: int = 0
    ) -> None:
        self.steps, self.shapes, self.node_ends = list(steps), list(shapes), list(ends)
        self.always_replicated_value = replicated_value
        self.output_value = self.node_ends[-1][1]
        self.readers: list[list[int]] = [[] for _ in self.shapes]
        for at, step in enumerate(self.steps):
            for value in step.inputs:
                self.readers[value].append(at)
        self.fused_activations = {at: at - 1 for at in range(1, len(self.steps)) if self._is_fused(at)}
        pairs = map(self._find_deferred_relu_gradient, range(1, len(self.steps)))
        self.deferred_relu_gradients = dict(filter(None, pairs))
        self.input_recomputation_steps: dict[int, int] = {}
        for at in range(len(self.steps)):
            recomputer = self._find_input_recomputation_step(at)
            # a step recomputes from its own input, which must not be recomputed itself
            if recomputer is not None and recomputer not in self.input_recomputation_steps:
                self.input_recomputation_steps[at] = recomputer
        self.sharded_vectors = {step.output_value for step in self.steps if self._stays_sharded(step)}

    def _is_fused(self, index: int) -> bool:
        layer, previous_step = self.steps[index].layer, self.steps[index - 1]
        value = previous_step.output_value
        if (
            layer is None
            or self.readers[value] != [index]
            or len(self.shapes[value]) < 2
            or not layer.is_activation_only
            or not declared_with(layer, "is_activation_only", "forward")
        ):
            return False
        producer = previous_step.layer or previous_step.join
        return producer is not None and layer.activation is not None and producer.can_fuse_activation(layer.activation)

    def _find_deferred_relu_gradient(self, index: int) -> tuple[int, int] | None:
        """Return the step that need not reread its output and step `index`, which follows it; None if there is none."""
        layer, previous_step = self.steps[index].layer, self.steps[index - 1]
        sole_reader = self.readers[previous_step.output_value] == [index]
        if layer is None or not layer.can_apply_input_relu_gradient or previous_step.layer is None or not sole_reader:
            return None
        relu_step, activation = self.fused_activations.get(index - 1, index - 1), previous_step.layer.activation
        relu_layer = self.steps[relu_step].layer
        needs_no_output = relu_layer is None or (relu_layer.saves_activated and not relu_layer.saves_output)
        is_relu = activation and all(declared_with(activation, "is_relu", method) for method in ("fprop", "bprop"))
        is_declared = all(
            declared_with(layer, "can_apply_input_relu_gradient", method) for method in ("forward", "backward")
        )
        is_exact = layer.scheme is None or (layer.scheme.exact and layer.scheme.gradients == "scatter")
        return (relu_step, index) if needs_no_output and is_relu and is_declared and is_exact else None

    def _find_input_recomputation_step(self, index: int) -> int | None:
        layer, (value, *_) = self.steps[index].layer, self.steps[index].inputs
        producer_index = self.producers.get(value)
        producer = None if producer_index is None else self.steps[producer_index].layer
        saving_readers = [reader for reader in self.readers[value] if self.steps[reader].saves_input]
        if layer is None or producer is None or saving_readers != [index] or self.producer_reads_output(value):
            return None
        attribute = "saved_bytes_and_elements"
        saves_input_only = layer.saved_bytes_and_elements == (0, 0) == declared_with(layer, attribute, "forward")
        restores = producer.can_recompute_output and declared_with(producer, "can_recompute_output", "forward")
        return producer_index if saves_input_only and restores else None

    def _stays_sharded(self, step: Step) -> bool:
        readers = self.readers[step.output_value]
        is_shardable = len(self.shapes[step.output_value]) == 1 and step.output_value != self.always_replicated_value
        outputs_shard = is_shardable and step.layer is not None and step.layer.output_may_stay_sharded
        return outputs_shard and bool(readers) and all(self.reads_only_own_shard(self.steps[at]) for at in readers)

    def reads_only_own_shard(self, step: Step) -> bool:
        """Return whether a step reads only this rank's range of a vector."""
        return step.layer is not None and step.layer.layout is Shard and len(self.shapes[step.inputs[0]]) == 1

    def redistributions(self, step: Step, needs_gradient: bool = True) -> list[VectorRedistribution]:
        """Return the redistributions of vectors for a step, forward and backward.

        Parameters
        ----------
        needs_gradient : bool
            Whether the gradient of the step's input is needed.
        """
        redistributions, (input_value, *_) = [], step.inputs
        if step.output_value in self.sharded_vectors and not (step.layer and step.layer.splits_outputs):
            (features,) = self.shapes[step.output_value]
            redistributions.append(VectorRedistribution("forward", features, is_reduce_scatter=True))
            redistributions.append(VectorRedistribution("backward", features))
        if needs_gradient and self.reads_only_own_shard(step) and input_value not in self.sharded_vectors:
            redistributions.append(VectorRedistribution("backward", self.shapes[input_value][0]))
        return redistributions

    @cached_property
    def producers(self) -> dict[int, int]:
        """Step that produces each value; for a fused activation, the step before it."""
        return {step.output_value: self.fused_activations.get(at, at) for at, step in enumerate(self.steps)}

    def producer_reads_output(self, value: int) -> bool:
        """Return whether the step that produced a value reads it again in the backward pass."""
        producer = self.producers.get(value)
        if producer is None or producer in self.deferred_relu_gradients:
            return False
        layer, is_fused = self.steps[producer].layer, value != self.steps[producer].output_value
        return is_fused if layer is None else layer.must_keep_output or (is_fused and layer.saves_activated)

    def subgraph(self, first: int, last: int) -> Graph:
        """Return the graph of the nodes [first, last), whose input becomes value 0."""
        (begin_step, base), (end_step, _) = self.node_ends[first], self.node_ends[last]
        steps = [
            step._replace(inputs=tuple(value - base for value in step.inputs), output_value=step.output_value - base)
            for step in self.steps[begin_step:end_step]
        ]
        node_ends = [(count - begin_step, value - base) for count, value in self.node_ends[first : last + 1]]
        return Graph(steps, self.shapes[base : base + len(steps) + 1], node_ends)


def trace_needed_cells(
    graph: Graph,
    output_cells: Partition,
    find_needed_cells: Callable[[Layer, Partition, int], Partition],
    extra_cells: Mapping[int, Partition] | None = None,
) -> list[Partition]:
    """Return the cells of every value that each part of the output needs.

    Parameters
    ----------
    output_cells : Partition
        The parts.
    find_needed_cells : callable
        Returns the cells of a value that a layer needs for parts of its output.
    extra_cells : dict of value to Partition
        Cells of a value that each part contains even if it does not need them.
    """
    regions = {graph.output_value: output_cells}
    for step in reversed(graph.steps):
        if extra_cells is not None and step.output_value in extra_cells:
            regions[step.output_value] = hull_partition(regions[step.output_value], extra_cells[step.output_value])
        output_parts = regions[step.output_value]
        for value in step.inputs:
            input_cells = output_parts if step.layer is None else find_needed_cells(step.layer, output_parts, value)
            regions[value] = hull_partition(regions[value], input_cells) if value in regions else input_cells
    return [regions[value] for value in range(len(graph.shapes))]


def needed_cells(layer: Layer, outputs: Partition, shape: tuple[int, ...]) -> Partition:
    """Return the cells of a layer's input, of shape `shape`, on which parts of its output depend."""
    receptive_window = layer.receptive_window_for(shape)
    assert receptive_window is not None
    if receptive_window.pointwise:
        return outputs  # empty stays empty: an activation's output may be its input
    return needed_image_cells(outputs, receptive_window, shape[:-1])


class GraphBuilder:
    """Builder of a graph, to which nodes append their steps; errors name the layer.

    Attributes
    ----------
    shapes : list of tuple
        Shapes of the values so far.
    """

    def __init__(self, nodes: Sequence[Node], input_shape: Shape) -> None:
        self.steps: list[Step] = []
        self.shapes = [input_shape]
        self.node_ends = [(0, 0)]
        for index, node in enumerate(nodes):
            self._current_node: Node = node
            try:
                value = node.lower(self, self.node_ends[-1][1])
            except UserError as error:
                raise prefix_error_with_layer(error, index, self._current_node) from error
            self.node_ends.append((len(self.steps), value))

    @property
    def graph(self) -> Graph:
        """The complete graph."""
        return Graph(self.steps, self.shapes, self.node_ends)

    def append_layer(self, layer: Layer, value: int) -> int:
        """Append a layer, and return its output value."""
        outer_node, self._current_node, shape = self._current_node, layer, self.shapes[value]
        check_signatures(layer)
        if len(shape) < 2 and (layer.needs_image or layer.window is not None):
            raise ShapeError(
                f"the layer needs an image, but its input is a vector of shape {shape}; put it before the fully"
                " connected or global pooling layer"
            )
        check_declarations(layer, shape)
        output = self._append(layer, None, (value,), layer.output_shape_for(shape))
        self._current_node = outer_node
        return output

    def append_join(self, join: Branches, values: Sequence[int], shape: Shape) -> int:
        """Append a join of several values, and return its output value."""
        return self._append(None, join, tuple(values), shape)

    def _append(self, layer: Layer | None, join: Branches | None, inputs: tuple[int, ...], shape: Shape) -> int:
        self.shapes.append(shape)
        self.steps.append(Step(layer, join, inputs, len(self.shapes) - 1))
        return len(self.shapes) - 1


def prefix_error_with_layer(error: UserError, index: int, layer: Node) -> UserError:
    """Return the error prefixed with the layer's index and name, with the layer as `subject`."""
    prefixed_error = type(error)(f"layer {index} '{layer.name}' ({type(layer).__name__}): {error}")
    prefixed_error.subject = layer
    return prefixed_error
