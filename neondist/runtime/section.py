"""A section of a network: its steps in their order, and the memory of its passes."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

from ..errors import PassError
from ..halo import Phase
from ..layers import Context, Layer, StepContext
from ..plan import Graph, PlannedSection
from ..plan.section import NOWHERE
from ..system.memory import out_of_memory, ranks_here
from .arena import Arena, Blocks
from .layer_task import LayerTask
from .tasks import JoinTask, PassedTask, Task
from .workspace import SectionPass, Workspace


class Section:
    """Some nodes of a network, one after the other, on this rank: their steps, and the memory and state of passes.

    Parameters
    ----------
    planned : PlannedSection
        Of built layers.
    context : Context
    tile : int
        Of this rank; or a strip of it.
    blocks : Blocks
        The memory that it shares with other sections.
    instead : dict of id to layer
        What is executed instead of some layers.
    layer_task : type
        What runs a layer's step.
    """

    def __init__(
        self,
        planned: PlannedSection,
        context: Context,
        tile: int,
        blocks: Blocks,
        instead: Mapping[int, Any],
        layer_task: Callable[[int, Graph, Layer], Task] = LayerTask,
    ) -> None:
        self.graph, self.context, self.blocks = planned.graph, context, blocks
        self.first, self.last, self.backwards = planned.first, planned.last, planned.backward
        self.tasks: list[Task] = []
        boxes = planned.boxes(tile)
        for at, step in enumerate(self.graph.steps):
            layer: Any = instead.get(id(step.layer), step.layer)
            if step.join is not None:
                self.tasks.append(JoinTask(at, self.graph, step.join, context.backend.kernels, boxes))
            elif at in self.graph.absorbed:
                self.tasks.append(PassedTask(at, self.graph, layer))
            else:
                self.tasks.append(layer_task(at, self.graph, layer))
        self.shapes, self.plan = planned.tile_shapes(tile), planned.live_ranges(tile)
        blocks.provide(self.plan.length)
        self.workspaces: dict[int, Workspace] = {}
        self._last_reader = [max(readers, default=-1) for readers in self.graph.readers]

    @property
    def over_batch(self) -> bool:
        """Whether a step needs all samples of a batch at once."""
        return any(task.over_batch for task in self.tasks)

    def workspace(self) -> Workspace:
        """Return unused memory for a pass."""
        number = self.blocks.take()
        if number not in self.workspaces:
            arena = Arena(self.plan, self.blocks, number)
            self.workspaces[number] = Workspace(arena, self.shapes, [task.array for task in self.tasks])
        return self.workspaces[number]

    def leave(self, x: Any, run: SectionPass) -> tuple[Any, list[Any]]:
        """Return what is kept of a pass whose output is known: its input, and what its reductions came to."""
        kept = x, run.reduced
        run.close()
        return kept

    def recompute(self, kept: Sequence[tuple[Any, list[Any]]], phases: Sequence[Phase]) -> list[SectionPass]:
        """Return the passes of which that was kept, run again."""
        inputs, reduced = zip(*kept, strict=True)
        return self.forward(inputs, phases, given=reduced)

    def forward(
        self, xs: Sequence[Any], phases: Sequence[Phase], nodes: int | None = None, given: Sequence[Any] | None = None
    ) -> list[SectionPass]:
        """Return passes that take each step together, through the first so many nodes (default: all)."""
        nodes = self.last - self.first if nodes is None else nodes
        again = [None] * len(xs) if given is None else given
        end = self.graph.ends[nodes]
        if end == NOWHERE:
            raise PassError("a pass cannot end between layers that are executed in strips; leave out strips")
        runs = [
            SectionPass(self.workspace(), phase, len(x), end, g) for x, phase, g in zip(xs, phases, again, strict=True)
        ]
        self._run(runs, xs)
        return runs

    def run(self, run: SectionPass, x: Any, left: Mapping[int, Any] | None = None) -> None:
        """Take a new pass forward to its end.

        Parameters
        ----------
        left : what `left` has returned of a pass before: its steps are not taken, and their values not known
        """
        run.left = left or {}
        self._run([run], [x])

    def left(self, run: SectionPass, again: Container[int]) -> dict[int, Any]:
        """Return what is kept of the steps of a pass, but for those that are to be taken again."""
        return {task.at: task.left(run) for task in self.tasks[: run.steps] if task.at not in again}

    def _run(self, runs: Sequence[SectionPass], xs: Sequence[Any]) -> None:
        steps, last = runs[0].steps, runs[0].value
        for run, held in zip(runs, self._through(runs, xs, steps, last), strict=True):
            run.output = self.tasks[steps - 1].whole(held.get(last)) if steps else held[last]

    def _through(self, runs: Sequence[SectionPass], xs: Sequence[Any], steps: int, last: int) -> list[dict[int, Any]]:
        """Return the values that are there after the first so many steps, `last` among them."""
        values: list[dict[int, Any]] = [{0: x} for x in xs]
        for task in self.tasks[:steps]:
            inputs = [[held.get(value) for value in task.inputs] for held in values]
            if task.at in runs[0].left:
                for run, given in zip(runs, inputs, strict=True):
                    task.resume(run, given, run.left[task.at])
                continue
            found = self._step(task, "forward", runs, inputs)
            for held, y in zip(values, found, strict=True):
                for value in task.inputs:
                    if self._last_reader[value] == task.at and value != last:
                        held.pop(value, None)
                held[task.output] = y
            for run in runs if not self.backwards else ():
                run.contexts[task.at] = None
        return values

    def backward(
        self,
        runs: Sequence[SectionPass],
        dys: Sequence[Any],
        first: int = 0,
        wanted: bool = True,
        done: Callable[[Layer], None] | None = None,
    ) -> list[Any]:
        """Return the gradient of the input of each pass, given that of its output; fill in the layers' grads.

        Parameters
        ----------
        first : int
            Go back no further than to the node of this number, whose input then stands for the section's.
        wanted : bool
            False: the gradient of the input is not needed.
        done : callable, optional
            Is called for each layer when its gradients are complete.
        """
        stop, value = self.graph.ends[first]
        if wanted and (stop in self.graph.absorbed or stop in self.graph.cleared.values()):
            raise PassError("a backward pass cannot end between a layer and its activation; continue to the layer")
        end, gradients = runs[0].steps, [self._start(run, dy) for run, dy in zip(runs, dys, strict=True)]
        self._back(runs, gradients, slice(stop, end), None if wanted else value, done)
        return [held.get(value) if wanted else None for held in gradients]

    def _start(self, run: SectionPass, dy: Any) -> dict[int, Any]:
        """Return the gradients that are known before a way back."""
        return {run.value: self.tasks[run.steps - 1].part(dy) if run.steps else dy}

    def _back(
        self,
        runs: Sequence[SectionPass],
        gradients: Sequence[dict[int, Any]],
        steps: slice,
        unwanted: int | None = None,
        done: Callable[[Layer], None] | None = None,
    ) -> None:
        """Take passes back through some steps: from the known gradients of values to those below, but for one."""
        for task in reversed(self.tasks[steps]):
            needed = [v != unwanted for v in task.inputs]
            found = self._step(task, "backward", runs, [held.pop(task.output) for held in gradients], needed)
            for run, held, dxs in zip(runs, gradients, found, strict=True):
                for v, dx, need in zip(task.inputs, dxs, needed, strict=True):
                    if need:
                        self._add(run, held, v, dx)
                run.contexts[task.at] = None
            if done is not None:
                for layer in task.layers:
                    done(layer)

    def _step(self, task: Task, direction: str, *given: Any) -> list[Any]:
        """Take a task's step; ConfigError names its layer where there is no memory for it."""
        try:
            found: list[Any] = getattr(task, direction)(*given)
        except self.context.backend.kernels.memory_errors as error:
            ranks = self.context.grid.size
            room = self.context.backend.kernels.room(ranks_here(ranks))
            raise out_of_memory(error, task.name, direction, self.blocks.planned(), room, ranks) from error
        return found

    # Up to a reduction, in one pass of several that are reduced together.

    def partial_result(self, run: SectionPass, x: Any, at: int) -> tuple[StepContext, Any, Any]:
        """Take a new pass up to a step; return its call, its view and its partial result."""
        task: Any = self.tasks[at]
        (value,) = task.inputs
        (held,) = self._through([run], [x], at, value)
        ctx, view = task.called(run, held[value])
        return ctx, view, task.partial_result("forward", ctx, view)

    def partial_result_back(
        self, run: SectionPass, dy: Any, at: int, wanted: bool, keep: tuple[int, Callable[[Any], None]] | None = None
    ) -> Any:
        """Take a pass back to a step; return its partial result.

        Parameters
        ----------
        wanted : bool
            Whether the gradient of the section's input is.
        keep : (int, callable), optional
            Is called with the gradient of the value behind so many nodes.
        """
        task: Any = self.tasks[at]
        gradients, end, unwanted = self._start(run, dy), run.steps, None if wanted else 0
        if keep is not None:
            end, value = self.graph.ends[keep[0]]
            self._back([run], [gradients], slice(end, run.steps), unwanted)
            keep[1](gradients[value])
        self._back([run], [gradients], slice(at + 1, end), unwanted)
        return task.partial_result(
            "backward", *task.called_back(run, gradients[task.output], wanted or task.inputs != (0,))
        )

    def _add(self, run: SectionPass, gradients: dict[int, Any], value: int, dx: Any) -> None:
        space = run.workspace
        if value in gradients:
            self.context.backend.kernels.add([gradients[value], dx], gradients[value])
        elif len(self.graph.readers[value]) == 1 or (value in space.plan.begun and space.arena.blocks.owns(dx)):
            gradients[value] = dx
        else:
            total = gradients[value] = space.sum_place(value, run.samples)
            self.context.backend.kernels.copy(dx, total)
