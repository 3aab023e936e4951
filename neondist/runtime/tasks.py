"""Tasks, which execute the steps of a graph in passes: the base class, and tasks without communication."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from ..backends import Kernels
from ..geometry import Box
from ..halo import GlobalArray
from ..layers import Branches, Layer
from ..plan import Graph, Step
from .workspace import InitialStates, Passes, SectionPass


class Task(ABC):
    """Execution of a step of the graph on this rank, for all passes that run together."""

    #: whether the step needs all samples of a batch at once
    spans_batch = False
    #: name of the layer or container, for messages
    name = ""
    input_array: GlobalArray | None = None
    layers: Sequence[Layer] = ()

    def __init__(self, index: int, graph: Graph) -> None:
        step = graph.steps[index]
        self.index, self.inputs, self.output_value = index, step.inputs, step.output_value
        #: step of the activation fused into this one
        self.activation_step = graph.steps[index + 1] if graph.fused_activations.get(index + 1) == index else None
        #: step that differentiates this step's activation, and whether this step does so for an earlier step
        self.relu_gradient_step = graph.deferred_relu_gradients.get(index)
        self.applies_input_relu_gradient = index in graph.deferred_relu_gradients.values()

    def fused_activation(self, run: SectionPass) -> Step | None:
        """Return the step of the activation that a pass applies in this step."""
        return self.activation_step if run.num_steps > self.index + 1 else None

    def is_relu_gradient_deferred(self, run: SectionPass) -> bool:
        """Return whether the next step applies the activation's gradient, so that the output need not be reread."""
        return self.relu_gradient_step is not None and run.num_steps > self.relu_gradient_step

    def result_value(self, run: SectionPass) -> int:
        """Return the value in whose memory a pass stores the result."""
        activation_step = self.fused_activation(run)
        return self.output_value if activation_step is None else activation_step.output_value

    @abstractmethod
    def execute_forward(self, passes: Passes, inputs: Sequence[Sequence[Any]]) -> list[Any]:
        """Return this rank's tile of the value for each pass, given the inputs."""

    @abstractmethod
    def execute_backward(self, passes: Passes, dys: Sequence[Any], needs_dx: Sequence[bool]) -> list[Sequence[Any]]:
        """Return the gradients of each pass's inputs (None if not needed), given the gradient of the value."""

    def saved_state(self, run: SectionPass) -> Any:
        """Return the state that replaces this step's forward pass in a later backward pass."""
        return None

    def restore_saved_state(self, run: SectionPass, inputs: Sequence[Any], saved: Any) -> None:
        """Restore this step of a pass, except its values, from `saved_state`; missing inputs are None."""
        assert saved is None

    def unshard(self, y: Any) -> Any:
        """Return a value as seen outside passes: vectors are replicated. Collective over the tiles."""
        return y

    def shard(self, y: Any) -> Any:
        """Return a value as seen by its readers in a pass."""
        return y


class JoinTask(Task):
    """Join of several values."""

    def __init__(self, index: int, graph: Graph, join: Branches, kernels: Kernels, boxes: Sequence[Box]) -> None:
        super().__init__(index, graph)
        self.name = str(join.name)
        self.join, self.channels, self.kernels = join, [graph.shapes[value][-1] for value in self.inputs], kernels
        #: for inputs with more cells than the output: their shape, and the cells to join
        cells = boxes[self.output_value]
        self.inputs_with_extra_cells = {
            place: (boxes[value].shape, (slice(None), *cells.relative_to(boxes[value]).slices))
            for place, value in enumerate(self.inputs)
            if boxes[value] != cells
        }

    def execute_forward(self, passes: Passes, inputs: Sequence[Sequence[Any]]) -> list[Any]:
        """Write the joined values into the memory from which the next step reads them."""
        outputs = [run.workspace.value_array(self.result_value(run), run.samples) for run in passes]
        for run, values, y in zip(passes, inputs, outputs, strict=True):
            cells = [
                value[self.inputs_with_extra_cells[at][1]] if at in self.inputs_with_extra_cells else value
                for at, value in enumerate(values)
            ]
            if self.fused_activation(run) is None:
                self.join.combine(self.kernels, cells, y)
            else:
                self.join.combine(self.kernels, cells, y, clip=True)  # type: ignore[call-arg]
                if not self.is_relu_gradient_deferred(run):
                    run.join_outputs[self.index] = y if self.relu_gradient_step is None else y.copy()
        return outputs

    def execute_backward(self, passes: Passes, dys: Sequence[Any], needs_dx: Sequence[bool]) -> list[Sequence[Any]]:
        """Return parts of dy, or dy itself, with zeros in cells of inputs that are not joined."""
        gradients: list[Any] = [
            list(self.join.split(self._dy_of_join(run, dy), self.channels)) for run, dy in zip(passes, dys, strict=True)
        ]
        for parts in gradients:
            for at, (shape, cells) in self.inputs_with_extra_cells.items():
                gradient_part = parts[at]
                parts[at] = self.kernels.xp.zeros((len(gradient_part), *shape, self.channels[at]), gradient_part.dtype)
                parts[at][cells] = gradient_part
        return gradients

    def _dy_of_join(self, run: SectionPass, dy: Any) -> Any:
        """Return the gradient of the join, before its activation."""
        if self.fused_activation(run) is None or self.is_relu_gradient_deferred(run):
            return dy
        workspace = run.workspace
        in_place = self.index + 1 not in workspace.plan.gradient_ranges and workspace.arena.blocks.owns(dy)
        target = dy if in_place else workspace.gradient_array(self.index + 1, self.output_value, run.samples)
        return self.kernels.relu_backward(run.join_outputs[self.index], dy, target)


class FusedActivationTask(Task):
    """Activation that the previous step has applied."""

    def __init__(self, index: int, graph: Graph, layer: Layer) -> None:
        super().__init__(index, graph)
        self.layer, self.layers, self.observers = layer, layer.leaves, layer.context.grid.observers
        self.name = str(layer.name)

    def execute_forward(self, passes: Passes, inputs: Sequence[Sequence[Any]]) -> list[Any]:
        """Pass the values on."""
        outputs = [y for (y,) in inputs]
        self._notify_observers("forward", "output", outputs)
        return outputs

    def execute_backward(self, passes: Passes, dys: Sequence[Any], needs_dx: Sequence[bool]) -> list[Sequence[Any]]:
        """Pass the gradients on; the previous step applies the activation's backward."""
        self._notify_observers("backward", "gradient of the input", dys)
        return [[dy] for dy in dys]

    def _notify_observers(self, direction: str, quantity: str, arrays: Sequence[Any]) -> None:
        if self.observers:
            with self.observers.observe("layer", self.name, direction):
                pass
            for array in arrays:
                self.observers.on_value(self.layer, quantity, array)


class _HasInitialStates(Protocol):
    initial_states: InitialStates


def share_initial_states(passes: Sequence[_HasInitialStates], tasks: Iterable[Task]) -> None:
    """Let micro-batches share the initial states of layers that update their state once for all of them."""
    for task in tasks:
        if task.spans_batch:
            for run in passes[1:]:
                run.initial_states[task.index] = passes[0].initial_states[task.index]
