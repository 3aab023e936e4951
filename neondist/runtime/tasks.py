"""Tasks of a graph's steps in a pass, forward and backward; those of branches, and without communication, are here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from ..backends import Kernels
from ..geometry import Box
from ..halo import GlobalArray
from ..layers import Branches, Layer
from ..plan import Graph, Step
from .workspace import SectionPass


class Task(ABC):
    """A step of the graph, on this rank, for all passes that go together."""

    #: whether it needs all samples of a batch at once
    over_batch = False
    #: of the layer or container, for messages
    name = ""
    array: GlobalArray | None = None
    layers: Sequence[Layer] = ()

    def __init__(self, at: int, graph: Graph) -> None:
        step = graph.steps[at]
        self.at, self.inputs, self.output = at, step.inputs, step.output
        #: the step of an activation that goes with this one
        self.behind = graph.steps[at + 1] if graph.absorbed.get(at + 1) == at else None
        #: the step of a pooling that takes gradients through its activation; and whether this one does so
        self.cleared_by, self.clears = graph.cleared.get(at), at in graph.cleared.values()

    def absorbed(self, run: SectionPass) -> Step | None:
        """Return the step behind this one that a pass takes with it."""
        return self.behind if run.steps > self.at + 1 else None

    def cleared(self, run: SectionPass) -> bool:
        """Return whether its backward pass does not read its output, because a pooling behind it does enough."""
        return self.cleared_by is not None and run.steps > self.cleared_by

    def gives(self, run: SectionPass) -> int:
        """Return the value in whose place a pass wants the result."""
        behind = self.absorbed(run)
        return self.output if behind is None else behind.output

    @abstractmethod
    def forward(self, runs: Sequence[SectionPass], inputs: Sequence[Sequence[Any]]) -> list[Any]:
        """Return, for each pass, this rank's tile of the value, given those of the inputs."""

    @abstractmethod
    def backward(self, runs: Sequence[SectionPass], dys: Sequence[Any], needed: Sequence[bool]) -> list[Sequence[Any]]:
        """Return the gradients of each pass's inputs, None for those not needed, given that of the value."""

    def left(self, run: SectionPass) -> Any:
        """Return what has to be kept of a pass, so that it can be gone back through without going forward again."""
        return None

    def resume(self, run: SectionPass, inputs: Sequence[Any], left: Any) -> None:
        """Let a pass be as if it had gone forward, but for its values; of inputs that are not there, None."""
        assert left is None

    def whole(self, y: Any) -> Any:
        """Return a value as one outside of passes has it: a vector whole; collective over the tiles."""
        return y

    def part(self, y: Any) -> Any:
        """Return a value as its readers in a pass have it."""
        return y


class JoinTask(Task):
    """Several values become one."""

    def __init__(self, at: int, graph: Graph, join: Branches, kernels: Kernels, boxes: Sequence[Box]) -> None:
        super().__init__(at, graph)
        self.name = str(join.name)
        self.join, self.channels, self.kernels = join, [graph.shapes[value][-1] for value in self.inputs], kernels
        #: of inputs of which others see more cells: their shape, and what is joined
        cells = boxes[self.output]
        self.wider = {
            place: (boxes[value].shape, (slice(None), *cells.relative_to(boxes[value]).slices))
            for place, value in enumerate(self.inputs)
            if boxes[value] != cells
        }

    def forward(self, runs: Sequence[SectionPass], inputs: Sequence[Sequence[Any]]) -> list[Any]:
        """Write the joined values where their reader wants them."""
        found = [run.workspace.value_place(self.gives(run), run.samples) for run in runs]
        for run, values, y in zip(runs, inputs, found, strict=True):
            seen = [value[self.wider[at][1]] if at in self.wider else value for at, value in enumerate(values)]
            if self.absorbed(run) is None:
                self.join.combine(self.kernels, seen, y)
            else:
                self.join.combine(self.kernels, seen, y, clip=True)  # type: ignore[call-arg]
                if not self.cleared(run):
                    run.joined[self.at] = y if self.cleared_by is None else y.copy()
        return found

    def backward(self, runs: Sequence[SectionPass], dys: Sequence[Any], needed: Sequence[bool]) -> list[Sequence[Any]]:
        """Return parts of dy, or dy itself."""
        found: list[Any] = [
            list(self.join.split(self._before(run, dy), self.channels)) for run, dy in zip(runs, dys, strict=True)
        ]
        for parts in found:
            for at, (shape, cells) in self.wider.items():
                part = parts[at]
                parts[at] = self.kernels.xp.zeros((len(part), *shape, self.channels[at]), part.dtype)
                parts[at][cells] = part
        return found

    def _before(self, run: SectionPass, dy: Any) -> Any:
        """Return the gradient of what was joined."""
        if self.absorbed(run) is None or self.cleared(run):
            return dy
        space = run.workspace
        mine = self.at + 1 not in space.plan.gradients and space.arena.blocks.owns(dy)
        place = dy if mine else space.gradient_place(self.at + 1, self.output, run.samples)
        return self.kernels.relu_backward(run.joined[self.at], dy, place)


class PassedTask(Task):
    """An activation that the step before has applied."""

    def __init__(self, at: int, graph: Graph, layer: Layer) -> None:
        super().__init__(at, graph)
        self.layer, self.layers, self.observers = layer, layer.leaves, layer.context.grid.observers
        self.name = str(layer.name)

    def forward(self, runs: Sequence[SectionPass], inputs: Sequence[Sequence[Any]]) -> list[Any]:
        """Hand on what comes."""
        found = [y for (y,) in inputs]
        self._tell("forward", "output", found)
        return found

    def backward(self, runs: Sequence[SectionPass], dys: Sequence[Any], needed: Sequence[bool]) -> list[Sequence[Any]]:
        """Hand on what comes; the step before makes of it the gradient of its own."""
        self._tell("backward", "gradient of the input", dys)
        return [[dy] for dy in dys]

    def _tell(self, direction: str, what: str, arrays: Sequence[Any]) -> None:
        if self.observers:
            with self.observers.during("layer", self.name, direction):
                pass
            for array in arrays:
                self.observers.value(self.layer, what, array)
