"""A section of a network: its steps in their order, and the memory of its passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..errors import PassError
from ..halo import Phase
from ..layers import Context, Layer, StepContext
from ..plan import Graph, PlannedSection, Step
from ..plan.strips import NOWHERE
from .arena import Arena, ArenaSlot, Blocks
from .strips import Strips
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


class SectionPass:
    """One pass through a section, and all that is kept of it.

    Attributes
    ----------
    output : array
        This rank's tile of the value that the section gives; memory of the pass.
    phase : Phase
    samples : int
        Of this rank.
    steps, value : int
        How many steps it takes, and the value that they give.
    given : list or None
        For a pass that is run again: what the reductions of each step came to.
    """

    def __init__(self, section: Section, phase: Phase, samples: int, nodes: int, given: list[Any] | None) -> None:
        self.section, self.phase, self.samples, self.given = section, phase, samples, given
        self._workspace: Workspace | None = section.workspace()
        self.steps, self.value = section.graph.ends[nodes]
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

    @property
    def reduced(self) -> list[Any]:
        """What the reductions of each step came to."""
        return [None if ctx is None else ctx.reduced for ctx in self.contexts]

    def close(self) -> None:
        """Give the memory back; there is no way back through the pass any more."""
        if self._workspace is not None:
            self.section.blocks.give_back(self._workspace.number)
            self._workspace, self.contexts = None, []

    def __del__(self) -> None:
        self.close()


class Section:
    """Some nodes of a network, one after the other, on this rank: their steps, and the memory and state of passes.

    Parameters
    ----------
    planned : PlannedSection
        Of built layers.
    context : Context
    blocks : Blocks
        The memory that it shares with other sections.
    strips : Blocks
        The memory that all strips share: one is executed at a time.
    layer_task : type
        What runs a layer's step.
    """

    def __init__(
        self,
        planned: PlannedSection,
        context: Context,
        blocks: Blocks,
        strips: Blocks,
        layer_task: Callable[[int, Step, Layer, Graph], Task] = LayerTask,
    ) -> None:
        self.graph, self.context, self.blocks = planned.graph, context, blocks
        self.first, self.last = planned.first, planned.last
        self.tasks: list[Task] = []
        self.layers: list[list[Layer]] = []
        for at, step in enumerate(self.graph.steps):
            if (segment := planned.segments.get(id(step.layer))) is not None:
                layers: Any = Strips(segment, context, strips, Section)
                self.tasks.append(layer_task(at, step, layers, self.graph))
                self.layers.append(layers.layers)
            elif step.layer is not None:
                self.tasks.append(layer_task(at, step, step.layer, self.graph))
                self.layers.append([step.layer])
            elif step.join is not None:
                channels = [self.graph.shapes[value][-1] for value in step.inputs]
                self.tasks.append(JoinTask(at, step, step.join, channels, context.backend.kernels))
                self.layers.append([])
        tile = context.grid.tile
        self.shapes, self.plan = planned.tile_shapes(tile), planned.live_ranges(tile)
        blocks.provide(self.plan.length)
        self.workspaces: dict[int, Workspace] = {}
        self._last_reader = [max(readers, default=-1) for readers in self.graph.readers]

    def workspace(self) -> Workspace:
        """Return memory for a pass that nobody uses."""
        number = self.blocks.take()
        if number not in self.workspaces:
            arena = Arena(self.plan, self.blocks, number)
            self.workspaces[number] = Workspace(number, arena, self.shapes, self.tasks)
        return self.workspaces[number]

    def forward(
        self, xs: Sequence[Any], phases: Sequence[Phase], nodes: int | None = None, given: Sequence[Any] | None = None
    ) -> list[SectionPass]:
        """Return passes that take each step together, through the first so many nodes (default: all)."""
        nodes = self.last - self.first if nodes is None else nodes
        again = [None] * len(xs) if given is None else given
        runs = [SectionPass(self, phase, len(x), nodes, g) for x, phase, g in zip(xs, phases, again, strict=True)]
        steps, last = self.graph.ends[nodes]
        if (steps, last) == NOWHERE:
            raise PassError("a pass cannot end between layers that are executed in strips; leave out strips")
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
            False: nobody needs the gradient of the input.
        done : callable, optional
            Is called for each layer when its gradients are complete.
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
            if done is not None:
                for layer in self.layers[task.at]:
                    done(layer)
        return [held.get(value) if wanted else None for held in gradients]

    def _add(self, run: SectionPass, gradients: dict[int, Any], value: int, dx: Any) -> None:
        if len(self.graph.readers[value]) == 1:
            gradients[value] = dx
        elif value in gradients:
            gradients[value] += dx
        else:
            total = gradients[value] = run.workspace.sum_place(value, run.samples)
            self.context.backend.kernels.copy(dx, total)
