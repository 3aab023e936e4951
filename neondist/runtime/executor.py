"""Passes through a network: one after the other, interleaved, or again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..halo import Phase
from ..layers import Context, Layer
from ..plan import Graph, Plan
from ..registry import Registered
from ..system.memory import most_held
from .arena import Blocks
from .layer_task import LayerTask
from .replay import PassGraphs, Replays
from .section import Section
from .stream import Streamed, StreamPass
from .strips import Strips
from .workspace import SectionPass


class Pass:
    """One pass through a network.

    Attributes
    ----------
    output : array
        This rank's tile of the output; memory of the pass.
    phase : Phase
    samples : int
        Of this rank.
    current : SectionPass
        Through the last section: it is there whole.
    kept : list
        Of each section before: from what it is run again.
    """

    def __init__(self, current: SectionPass | StreamPass, kept: list[Any]) -> None:
        self.current, self.kept = current, kept
        self.output, self.phase, self.samples = current.output, current.phase, current.samples

    @property
    def closed(self) -> bool:
        """Whether its memory has been given back."""
        return self.current.closed

    def close(self) -> None:
        """Give the memory back; there is no way back through the pass any more."""
        self.current.close()
        self.kept = []


class Executor:
    """Runs a plan's steps on this rank, and owns all memory and state of its passes.

    Of a plan with several sections only the last one's arrays are kept: on the way back each section before is run
    forward again, from its input (Chen et al. 2016, "Training deep nets with sublinear memory cost").

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
        layer_task: Callable[[int, Graph, Layer], LayerTask] = LayerTask,
    ) -> None:
        self.compiled, self.graph, self.context = compiled, compiled.graph, context
        memory = compiled.training.memory
        most = None if memory is None else most_held(memory)
        self.blocks, shared = (
            Blocks(samples, context.dtype, context.backend, most, lambda: compiled.needed) for _ in range(2)
        )
        self.sections: list[Any] = []
        if compiled.stream is not None:
            self.sections.append(Streamed(compiled.stream, context, shared, layer_task))
        for planned in compiled.sections:
            strips = {at: Strips(segment, context, shared) for at, segment in planned.segments.items()}
            self.sections.append(Section(planned, context, context.grid.tile, self.blocks, strips, layer_task))
        #: whether a step of training needs all samples at once somewhere: then micro-batches have to go together
        self.over_batch = any(section.over_batch for section in self.sections)
        self.replays = Replays(context.backend.kernels, self._parts())

    def with_tasks(self, layer_task: Callable[[int, Graph, Layer], LayerTask]) -> Executor:
        """Return one of the same plan in which something else runs a layer's step."""
        found = Executor(self.compiled, self.context, self.blocks.samples, layer_task)
        found.replays.usable = False  # what looks for mistakes looks in every step
        return found

    def graphs(self, samples: int, first: int, make: Callable[[], PassGraphs]) -> PassGraphs | None:
        """Return the graphs of passes of so many samples that go back to a node; None: such passes are ordinary.

        Graphs are used where a pass consists of launches alone: on one rank without observers, with all arrays of the
        network in memory, in the same block every time.
        """
        grid, plan = self.context.grid, self.compiled
        roomy = len(self.sections) == 1 and plan.training.memory is None and not plan.sections[0].segments
        if grid.size > 1 or grid.observers or not roomy or len(self.blocks.free) < self.blocks.made:
            return None
        return self.replays.of((samples, first), make)

    def forward(self, x: Any, phase: Phase, nodes: int | None = None) -> Pass:
        """Return a new pass for this rank's tile of the input, through the first so many nodes (default: all)."""
        return self.forward_together([x], [phase], nodes)[0]

    def forward_together(self, xs: Sequence[Any], phases: Sequence[Phase], nodes: int | None = None) -> list[Pass]:
        """Return passes that take each step together: micro-batches, which have the statistics of all of them."""
        nodes = self.sections[-1].last if nodes is None else nodes
        kept: list[list[Any]] = [[] for _ in xs]
        for section in self.sections:
            runs = section.forward(xs, phases, min(nodes, section.last) - section.first)
            if section.last >= nodes:
                break
            following = [run.output.copy() for run in runs]
            for before, x, run in zip(kept, xs, runs, strict=True):
                before.append(section.leave(x, run))
            xs = following
        return [Pass(run, before) for run, before in zip(runs, kept, strict=True)]

    def backward(self, run: Pass, dy: Any, first: int = 0) -> Any:
        """Return the gradient of this rank's tile of the input, given that of the output; fill in the layers' grads.

        The pass may be gone back through again, for which what a way back uses up is copied.

        Parameters
        ----------
        first : int
            Go back no further than to the node of this number, whose input then stands for the network's.
        """
        with run.current.kept():
            (dx,) = self.backward_together([run], [dy], first, wanted=True, close=False)
            return dx.copy()

    def backward_together(
        self,
        runs: Sequence[Pass],
        dys: Sequence[Any],
        first: int = 0,
        wanted: bool = False,
        done: Callable[[Layer], None] | None = None,
        close: bool = True,
    ) -> list[Any]:
        """Return the same for each of the passes of `forward_together`, once.

        Parameters
        ----------
        wanted : bool
            False: the gradient of the input is not needed.
        done : callable, optional
            Is called for each layer when its gradients are complete.
        close : bool
            Whether the passes' memory is given back as soon as it can be.
        """
        here, at = [run.current for run in runs], len(runs[0].kept)
        first = first if wanted else max(first, self.compiled.idle)
        while True:
            section = self.sections[at]
            more = section.first > first
            dxs = section.backward(here, dys, max(0, first - section.first), wanted or more, done)
            again = at < len(runs[0].kept)
            if more or (again and wanted):
                dys = dxs = [dx.copy() for dx in dxs]
            if again or (close and more):
                _close(here)
            if not more:
                return dxs
            at -= 1
            here = self.sections[at].recompute([run.kept[at] for run in runs], [run.phase for run in runs])

    @contextmanager
    def passing(self, x: Any, phase: Phase, nodes: int | None = None) -> Iterator[Pass]:
        """Run forward, and close the pass at the end of the block."""
        run = self.forward(x, phase, nodes)
        try:
            yield run
        finally:
            run.close()

    def _parts(self) -> Iterator[Registered]:
        """Yield what has code that passes run, and that a user may have written."""
        for planned in self.compiled:
            layer = planned.layer
            yield from (layer, *(array.policy for array in layer.arrays))
            if layer.activation is not None:
                yield layer.activation
        for step in self.graph.steps:
            if step.join is not None:
                yield step.join


def _close(runs: Sequence[Any]) -> None:
    for run in runs:
        run.close()
