"""Section of a network: its steps in order, and the memory of its passes."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, TypeAlias

from ..errors import PassOrderError
from ..halo import Phase
from ..layers import Layer, ModelContext, StepContext
from ..plan import Graph, PlannedSection
from ..plan.section import INSIDE_SEGMENT
from ..system.memory import count_local_ranks, out_of_memory_error
from .arena import Arena, BlockPool
from .layer_task import LayerTask
from .tasks import FusedActivationTask, JoinTask, Task, share_initial_states
from .workspace import InitialStates, Passes, SectionPass, Workspace

SectionCheckpoint: TypeAlias = tuple[Any, list[Any], InitialStates, Phase]
"""Input of a pass, results of reductions, initial states of layers, and the pass's phase."""


class Section:
    """Consecutive nodes of a network on this rank: their steps, and the memory and state of passes.

    Parameters
    ----------
    tile : int
        Number of this rank's tile, or of a strip or block.
    blocks : BlockPool
        Memory shared with other sections.
    layer_replacements : dict of id to layer
        Objects executed in place of some layers.
    """

    def __init__(
        self,
        planned: PlannedSection,
        context: ModelContext,
        tile: int,
        blocks: BlockPool,
        layer_replacements: Mapping[int, Any],
        layer_task: Callable[[int, Graph, Layer], Task] = LayerTask,
    ) -> None:
        self.graph, self.context, self.blocks = planned.graph, context, blocks
        self.first_node, self.stop_node, self.runs_backward = planned.first_node, planned.stop_node, planned.backward
        self.tasks: list[Task] = []
        boxes = planned.value_boxes(tile)
        for at, step in enumerate(self.graph.steps):
            layer: Any = layer_replacements.get(id(step.layer), step.layer)
            if step.join is not None:
                self.tasks.append(JoinTask(at, self.graph, step.join, context.backend.kernels, boxes))
            elif at in self.graph.fused_activations:
                self.tasks.append(FusedActivationTask(at, self.graph, layer))
            else:
                self.tasks.append(layer_task(at, self.graph, layer))
        self.shapes, self.plan = planned.tile_shapes(tile), planned.memory_plan(tile)
        blocks.reserve(self.plan.num_elements)
        self.workspaces: dict[int, Workspace] = {}
        self._last_reader = [max(readers, default=-1) for readers in self.graph.readers]

    @property
    def spans_batch(self) -> bool:
        """Whether a step needs all samples of a batch at once."""
        return any(task.spans_batch for task in self.tasks)

    def acquire_workspace(self) -> Workspace:
        """Return unused memory for a pass."""
        block_number = self.blocks.acquire_block()
        if block_number not in self.workspaces:
            arena = Arena(self.plan, self.blocks, block_number)
            self.workspaces[block_number] = Workspace(arena, self.shapes, [task.input_array for task in self.tasks])
        return self.workspaces[block_number]

    def checkpoint(self, x: Any, run: SectionPass) -> SectionCheckpoint:
        """Return the checkpoint of a completed pass with this input; close the pass."""
        checkpoint = x, run.reduced, run.initial_states, run.phase
        run.close()
        return checkpoint

    def recompute(self, checkpoints: Sequence[SectionCheckpoint]) -> list[SectionPass]:
        """Return passes run again from their checkpoints."""
        inputs, reduced, states, phases = zip(*checkpoints, strict=True)
        return self.forward(inputs, [phase.repeated() for phase in phases], reduced=reduced, initial_states=states)

    def forward(
        self,
        xs: Sequence[Any],
        phases: Sequence[Phase],
        num_nodes: int | None = None,
        reduced: Sequence[Any] | None = None,
        initial_states: Sequence[InitialStates] = (),
    ) -> list[SectionPass]:
        """Return passes through the first `num_nodes` nodes (default: all); each step runs for all passes together."""
        num_nodes = self.stop_node - self.first_node if num_nodes is None else num_nodes
        known_reductions = [None] * len(xs) if reduced is None else reduced
        end = self.graph.node_ends[num_nodes]
        if end == INSIDE_SEGMENT:
            raise PassOrderError("a pass cannot end between layers that are executed in strips; leave out strips")
        passes = [
            SectionPass(self.acquire_workspace(), phase, len(x), end, r)
            for x, phase, r in zip(xs, phases, known_reductions, strict=True)
        ]
        share_initial_states(passes, self.tasks)
        for run, states in zip(passes, initial_states, strict=False):
            run.initial_states = states
        self._run(passes, xs)
        return passes

    def run_forward(self, run: SectionPass, x: Any, saved_states: Mapping[int, Any] | None = None) -> None:
        """Run a new pass forward to its end.

        Parameters
        ----------
        saved_states : dict of step to state, optional
            Result of `saved_states` for an earlier pass; these steps are skipped, and their values are missing.
        """
        run.saved_states_by_step = saved_states or {}
        self._run([run], [x])

    def saved_states(self, run: SectionPass, recomputed: Container[int]) -> dict[int, Any]:
        """Return the saved states of the steps of a pass, except those to be recomputed."""
        tasks = self.tasks[: run.num_steps]
        return {task.index: task.saved_state(run) for task in tasks if task.index not in recomputed}

    def _run(self, passes: Passes, xs: Sequence[Any]) -> None:
        num_steps, output_value = passes[0].num_steps, passes[0].output_value
        for run, held in zip(passes, self._run_steps(passes, xs, num_steps, output_value), strict=True):
            run.output = self.tasks[num_steps - 1].unshard(held.get(output_value)) if num_steps else held[output_value]

    def _run_steps(self, passes: Passes, xs: Sequence[Any], num_steps: int, last_value: int) -> list[dict[int, Any]]:
        """Return the values alive after the first `num_steps` steps, including `last_value`."""
        values: list[dict[int, Any]] = [{0: x} for x in xs]
        for task in self.tasks[:num_steps]:
            inputs = [[held.get(value) for value in task.inputs] for held in values]
            if task.index in passes[0].saved_states_by_step:
                for run, tiles in zip(passes, inputs, strict=True):
                    task.restore_saved_state(run, tiles, run.saved_states_by_step[task.index])
                continue
            outputs = self._run_step(task, "forward", passes, inputs)
            for held, y in zip(values, outputs, strict=True):
                for value in task.inputs:
                    if self._last_reader[value] == task.index and value != last_value:
                        held.pop(value, None)
                held[task.output_value] = y
            for run in passes if not self.runs_backward else ():
                run.contexts[task.index] = None
        return values

    def backward(
        self,
        passes: Passes,
        dys: Sequence[Any],
        first_node: int = 0,
        need_dx: bool = True,
        on_layer_done: Callable[[Layer], None] | None = None,
    ) -> list[Any]:
        """Return the gradient of the input of each pass, given its output's gradient; fill in the layers' grads.

        Parameters
        ----------
        first_node : int
            Node at which the backward pass stops; the result is the gradient of its input.
        on_layer_done : callable, optional
            Called with each layer when its gradients are complete.
        """
        stop, value = self.graph.node_ends[first_node]
        if need_dx and (stop in self.graph.fused_activations or stop in self.graph.deferred_relu_gradients.values()):
            raise PassOrderError("a backward pass cannot end between a layer and its activation; continue to the layer")
        gradients = [self._initial_gradients(run, dy) for run, dy in zip(passes, dys, strict=True)]
        steps = slice(stop, passes[0].num_steps)
        self._run_backward_steps(passes, gradients, steps, None if need_dx else value, on_layer_done)
        return [held.get(value) if need_dx else None for held in gradients]

    def _initial_gradients(self, run: SectionPass, dy: Any) -> dict[int, Any]:
        return {run.output_value: self.tasks[run.num_steps - 1].shard(dy) if run.num_steps else dy}

    def _run_backward_steps(
        self,
        passes: Passes,
        gradients: Sequence[dict[int, Any]],
        steps: slice,
        skipped_value: int | None = None,
        on_layer_done: Callable[[Layer], None] | None = None,
    ) -> None:
        """Run passes backward through some steps, updating the gradients by value, except that of `skipped_value`."""
        for task in reversed(self.tasks[steps]):
            needs_dx = [v != skipped_value for v in task.inputs]
            dys = [held.pop(task.output_value) for held in gradients]
            results = self._run_step(task, "backward", passes, dys, needs_dx)
            for run, held, dxs in zip(passes, gradients, results, strict=True):
                for v, dx, need in zip(task.inputs, dxs, needs_dx, strict=True):
                    if need:
                        self._add_value_gradient(run, held, v, dx)
                run.contexts[task.index] = None
            if on_layer_done is not None:
                for layer in task.layers:
                    on_layer_done(layer)

    def _run_step(self, task: Task, direction: str, *arguments: Any) -> list[Any]:
        """Run a task's step; if memory is exhausted, raise a ConfigError that names the layer."""
        try:
            results: list[Any] = getattr(task, f"execute_{direction}")(*arguments)
        except self.context.backend.kernels.memory_errors as error:
            num_ranks = self.context.grid.size
            room = self.context.backend.kernels.available_memory(count_local_ranks(num_ranks))
            planned_bytes, backend = self.blocks.planned_bytes(), self.context.backend.name
            raise out_of_memory_error(error, task.name, direction, planned_bytes, room, num_ranks, backend) from error
        return results

    # Partial passes, up to a reduction over several passes.

    def run_to_reduction(self, run: SectionPass, x: Any, step: int) -> tuple[StepContext, Any, Any]:
        """Run a new pass up to a step; return the step's context, view and partial result."""
        task: Any = self.tasks[step]
        (value,) = task.inputs
        (values,) = self._run_steps([run], [x], step, value)
        ctx, view = task.begin_forward(run, values[value])
        return ctx, view, task.compute_partial_result("forward", ctx, view)

    def run_back_to_reduction(
        self, run: SectionPass, dy: Any, step: int, need_dx: bool, keep: tuple[int, Callable[[Any], None]] | None = None
    ) -> Any:
        """Run a pass backward to a step; return the step's partial result.

        Parameters
        ----------
        keep : (int, callable), optional
            A number of nodes, and a function called with the gradient of their output.
        """
        task: Any = self.tasks[step]
        gradients, stop_step, skipped_value = self._initial_gradients(run, dy), run.num_steps, None if need_dx else 0
        if keep is not None:
            stop_step, value = self.graph.node_ends[keep[0]]
            self._run_backward_steps([run], [gradients], slice(stop_step, run.num_steps), skipped_value)
            keep[1](gradients[value])
        self._run_backward_steps([run], [gradients], slice(step + 1, stop_step), skipped_value)
        return task.compute_partial_result(
            "backward", *task.begin_backward(run, gradients[task.output_value], need_dx or task.inputs != (0,))
        )

    def _add_value_gradient(self, run: SectionPass, gradients: dict[int, Any], value: int, dx: Any) -> None:
        workspace = run.workspace
        if value in gradients:
            self.context.backend.kernels.add([gradients[value], dx], gradients[value])
        elif len(self.graph.readers[value]) == 1 or (
            value in workspace.plan.gradients_summed_in_place and workspace.arena.blocks.owns(dx)
        ):
            gradients[value] = dx
        else:
            gradient_sum = gradients[value] = workspace.gradient_sum_array(value, run.samples)
            self.context.backend.kernels.copy(dx, gradient_sum)
