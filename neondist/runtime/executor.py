"""Passes through a network: one after the other, interleaved, or again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from ..halo import Phase
from ..layers import Context, Layer, StepContext
from ..plan import Graph, Plan, Step
from .arena import Arena, ArenaSlot
from .tasks import JoinTask, LayerTask, Task


class Workspace:
    """The memory of one pass at a time: the arena, and the buffers of all views in it.

    Parameters
    ----------
    number : int
        Counts a network's workspaces. All but the first are there for passes that interleave.
    """

    def __init__(self, number: int, arena: Arena, shapes: list[tuple[int, ...]], tasks: Sequence[Task]) -> None:
        self.number, self.arena, self.plan, self.shapes = number, arena, arena.plan, shapes
        self.homes: dict[int, Any] = {value: tasks[at] for value, at in self.plan.homes.items()}
        self._arrays: dict[tuple[int, int], Any] = {}
        self._views: dict[tuple[int, int], Any] = {}

    def view(self, task: LayerTask, samples: int) -> Any:
        """Return the buffers of a step's view for batches of so many samples."""
        key = task.at, samples
        if key not in self._views:
            self._views[key] = task.array.buffer(samples, self.number, self._slots(task.at))
        return self._views[key]

    def value_place(self, value: int, samples: int) -> Any:
        """Return the array (samples, *tile, C) where a value is wanted."""
        task = self.homes.get(value)
        if task is not None:
            return self.view(task, samples).tile
        return self._array(self.plan.values[value], value, samples)

    def gradient_place(self, task: LayerTask, samples: int) -> Any:
        """Return the array where the gradient of a step's view is wanted; what lies there lasts until it is read."""
        if task.windowed:
            return self.view(task, samples).dview_place()
        return self._array(self.plan.gradients.get(task.at), task.inputs[0], samples)

    def sum_place(self, value: int, samples: int) -> Any:
        """Return the array for the sum of a value's gradients."""
        return self._array(self.plan.sums.get(value), value, samples)

    def _array(self, slot: int | None, value: int, samples: int) -> Any:
        """Return the array of a slot, of a value's shape; a new one, where none is planned."""
        shape = samples, *self.shapes[value]
        if slot is None:
            return self.arena.backend.xp.empty(shape, self.arena.dtype)
        key = slot, samples
        if key not in self._arrays:
            self._arrays[key] = self.arena.array(slot, shape)
        return self._arrays[key]

    def _slots(self, at: int) -> tuple[ArenaSlot | None, ArenaSlot | None]:
        view, gradient = self.plan.views[at], self.plan.gradients.get(at)
        return ArenaSlot(self.arena, view), None if gradient is None else ArenaSlot(self.arena, gradient)


class Pass:
    """One pass through a network, and all that is kept of it.

    Attributes
    ----------
    output : array
        This rank's tile of the output.
    phase : Phase
    samples : int
        Of this rank.
    steps, value : int
        How many steps it takes, and the value that they give.
    """

    def __init__(self, executor: Executor, workspace: Workspace, phase: Phase, samples: int, nodes: int) -> None:
        self.executor, self.phase, self.samples = executor, phase, samples
        self._workspace: Workspace | None = workspace
        self.steps, self.value = executor.graph.ends[nodes]
        self.contexts: list[StepContext | None] = [None] * self.steps
        self.output: Any = None

    @property
    def workspace(self) -> Workspace:
        """The memory of the pass, until it is closed."""
        assert self._workspace is not None
        return self._workspace

    @property
    def closed(self) -> bool:
        """Whether its memory has been given back."""
        return self._workspace is None

    def close(self) -> None:
        """Give the memory back; there is no way back through the pass any more."""
        if self._workspace is not None:
            self.executor.free.append(self._workspace)
            self._workspace, self.contexts = None, []

    def __del__(self) -> None:
        self.close()


class Executor:
    """Runs the steps of a graph on this rank, and owns all memory and state of its passes.

    Parameters
    ----------
    compiled : Plan
        Of built layers.
    context : Context
    samples : int
        Of this rank, in most passes: memory is made for so many.
    layer_task : type
        What runs a layer's step.
    """

    def __init__(
        self,
        compiled: Plan,
        context: Context,
        samples: int,
        layer_task: Callable[[int, Step, Layer, Graph], Task] = LayerTask,
    ) -> None:
        self.graph, self.context, self.samples = compiled.graph, context, samples
        self.tasks: list[Task] = []
        for at, step in enumerate(self.graph.steps):
            if step.layer is not None:
                self.tasks.append(layer_task(at, step, step.layer, self.graph))
            elif step.join is not None:
                channels = [self.graph.shapes[value][-1] for value in step.inputs]
                self.tasks.append(JoinTask(at, step, step.join, channels, context.backend.kernels))
        #: whether a step of training needs all samples at once somewhere: then micro-batches have to go together
        self.over_batch = any(task.over_batch for task in self.tasks)
        self.free: list[Workspace] = []
        self.made = 0
        self.shapes = compiled.tile_shapes(context.grid.tile)
        self.plan = compiled.live_ranges(context.grid.tile)
        self._last_reader = [max(readers, default=-1) for readers in self.graph.readers]

    # Passes.

    def forward(self, x: Any, phase: Phase, nodes: int | None = None) -> Pass:
        """Return a new pass for this rank's tile of the input, through the first so many nodes (default: all)."""
        return self.forward_together([x], [phase], nodes)[0]

    def forward_together(self, xs: Sequence[Any], phases: Sequence[Phase], nodes: int | None = None) -> list[Pass]:
        """Return passes that take each step together: micro-batches, which have the statistics of all of them."""
        nodes = len(self.graph.ends) - 1 if nodes is None else nodes
        runs = [Pass(self, self._workspace(), phase, len(x), nodes) for x, phase in zip(xs, phases, strict=True)]
        steps, last = self.graph.ends[nodes]
        values: list[dict[int, Any]] = [{0: x} for x in xs]
        for task in self.tasks[:steps]:
            found = task.forward(runs, [[held[value] for value in task.inputs] for held in values])
            for held, y in zip(values, found, strict=True):
                for value in task.inputs:
                    if self._last_reader[value] == task.at and value != last:
                        held.pop(value, None)
                held[task.output] = y
        for run, held in zip(runs, values, strict=True):
            run.output = self.tasks[steps - 1].whole(held[last]) if steps else held[last]
        return runs

    def backward(self, run: Pass, dy: Any, first: int = 0, wanted: bool = True, again: bool = True) -> Any:
        """Return the gradient of this rank's tile of the input, given that of the output; fill in the layers' grads.

        Parameters
        ----------
        first : int
            Go back no further than to the node of this number, whose input then stands for the network's.
        wanted : bool
            False: nobody needs the gradient of the input.
        again : bool
            Whether the pass may be gone back through again; costs a copy of what a way back uses up.
        """
        with run.workspace.arena.kept(run.samples) if again else nullcontext():
            contexts = run.contexts[:]
            (dx,) = self.backward_together([run], [dy], first, wanted)
            if again:
                run.contexts = contexts
            return dx.copy() if again and dx is not None else dx

    def backward_together(
        self,
        runs: Sequence[Pass],
        dys: Sequence[Any],
        first: int = 0,
        wanted: bool = False,
        done: Callable[[Layer], None] | None = None,
    ) -> list[Any]:
        """Return the same for each of the passes of `forward_together`, once.

        `done` is called for each layer when its gradients are complete.
        """
        stop, value = self.graph.ends[first]
        end = runs[0].steps
        gradients = [
            {run.value: self.tasks[end - 1].part(dy) if end else dy} for run, dy in zip(runs, dys, strict=True)
        ]
        for task in reversed(self.tasks[stop:end]):
            needed = [wanted or v != value for v in task.inputs]
            found = task.backward(runs, [held.pop(task.output) for held in gradients], needed)
            for run, held, dxs in zip(runs, gradients, found, strict=True):
                for v, dx, need in zip(task.inputs, dxs, needed, strict=True):
                    if need:
                        self._add(run, held, v, dx)
                run.contexts[task.at] = None
            layer = self.graph.steps[task.at].layer
            if done is not None and layer is not None:
                done(layer)
        return [held.get(value) if wanted else None for held in gradients]

    def _add(self, run: Pass, gradients: dict[int, Any], value: int, dx: Any) -> None:
        if len(self.graph.readers[value]) == 1:
            gradients[value] = dx
        elif value in gradients:
            gradients[value] += dx
        else:
            total = gradients[value] = run.workspace.sum_place(value, run.samples)
            self.context.backend.kernels.copy(dx, total)

    @contextmanager
    def passing(self, x: Any, phase: Phase, nodes: int | None = None) -> Iterator[Pass]:
        """Run forward, and close the pass at the end of the block."""
        run = self.forward(x, phase, nodes)
        try:
            yield run
        finally:
            run.close()

    def _workspace(self) -> Workspace:
        if self.free:
            self.free.sort(key=lambda space: -space.number)
            return self.free.pop()
        arena = Arena(self.plan, self.samples, self.context.dtype, self.context.backend)
        space = Workspace(self.made, arena, self.shapes, self.tasks)
        self.made += 1
        return space
