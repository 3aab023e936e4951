"""Executor of passes through a network: sequential, interleaved or repeated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from ..halo import HaloRecord, Phase
from ..layers import Layer, ModelContext
from ..plan import Graph, Plan
from ..registry import Registered
from ..system.memory import memory_trim_threshold
from .arena import BlockPool
from .layer_task import LayerTask
from .replay import PassGraphCache, PassGraphs
from .section import Section
from .stream import StripwisePass, StripwiseSection
from .strips import SegmentExecutor
from .workspace import SectionPass


class Pass:
    """One pass through a network.

    Attributes
    ----------
    output : array
        This rank's tile of the output, in the memory of the pass.
    last_section_pass : SectionPass or StripwisePass
        Pass through the last section, whose arrays are all in memory.
    checkpoints : list
        Checkpoints from which the backward pass runs the earlier sections again.
    """

    def __init__(self, current: SectionPass | StripwisePass, checkpoints: list[Any]) -> None:
        self.last_section_pass, self.checkpoints = current, checkpoints
        self.output, self.phase, self.samples = current.output, current.phase, current.samples

    @property
    def is_closed(self) -> bool:
        """Whether the memory has been released."""
        return self.last_section_pass.is_closed

    def close(self) -> None:
        """Release the memory; no backward pass is possible afterwards."""
        self.last_section_pass.close()
        self.checkpoints = []


class Executor:
    """Executor of a plan's steps on this rank, which owns all memory and state of its passes.

    If a plan has several sections, only the arrays of the last section are kept: the backward pass runs each earlier
    section forward again from its input (Chen et al. 2016, "Training deep nets with sublinear memory cost").

    Parameters
    ----------
    samples : int
        Samples of this rank in most passes, for which memory is allocated.
    """

    def __init__(
        self,
        compiled: Plan,
        context: ModelContext,
        samples: int,
        layer_task: Callable[[int, Graph, Layer], LayerTask] = LayerTask,
    ) -> None:
        self.compiled, self.graph, self.context = compiled, compiled.graph, context
        memory_limit = compiled.training.memory
        limit = None if memory_limit is None else memory_trim_threshold(memory_limit, compiled.training.backend)
        create_pool = partial(BlockPool, samples, context.dtype, context.backend, limit, lambda: compiled.needed_bytes)
        self.blocks, shared_blocks = create_pool(), create_pool()
        self.sections: list[Any] = []
        if compiled.stream is not None:
            self.sections.append(StripwiseSection(compiled.stream, context, shared_blocks, layer_task))
        for planned in compiled.sections:
            tasks = {at: SegmentExecutor(segment, context, shared_blocks) for at, segment in planned.segments.items()}
            self.sections.append(Section(planned, context, context.grid.tile, self.blocks, tasks, layer_task))
        #: whether a step needs all samples of a batch at once, so that micro-batches are run together
        self.spans_batch = any(section.spans_batch for section in self.sections)
        self.pass_graph_cache = PassGraphCache(context.backend.kernels, self._user_extensible_objects())

    def with_layer_tasks(self, layer_task: Callable[[int, Graph, Layer], LayerTask]) -> Executor:
        """Return an executor of the same plan with another layer task."""
        executor = Executor(self.compiled, self.context, self.blocks.samples, layer_task)
        executor.pass_graph_cache.is_usable = False  # debugging tasks check every step
        return executor

    def get_or_capture_graphs(self, samples: int, first: int, capture: Callable[[], PassGraphs]) -> PassGraphs | None:
        """Return the graphs of passes of this size that run backward to node `first`; None: run ordinary passes.

        Graphs are used if a pass consists only of kernel launches: on one rank, without observers, and with all arrays
        of the network in the same block of memory in every pass.
        """
        grid, plan = self.context.grid, self.compiled
        in_memory = len(self.sections) == 1 and plan.training.memory is None and not plan.sections[0].segments
        if grid.size > 1 or grid.observers or not in_memory or len(self.blocks.free_blocks) < self.blocks.block_count:
            return None
        return self.pass_graph_cache.get_or_capture((samples, first), capture)

    def forward(self, x: Any, phase: Phase, num_nodes: int | None = None) -> Pass:
        """Return a new pass for this rank's tile of the input, through `num_nodes` nodes (default: all)."""
        return self.forward_together([x], [phase], num_nodes)[0]

    def forward_together(self, xs: Sequence[Any], phases: Sequence[Phase], num_nodes: int | None = None) -> list[Pass]:
        """Return passes of micro-batches with common batch statistics; each step is run for all passes together."""
        num_nodes = self.sections[-1].stop_node if num_nodes is None else num_nodes
        checkpoints: list[list[Any]] = [[] for _ in xs]
        for section in self.sections:
            is_last = section.stop_node >= num_nodes
            own_phases = phases if is_last else [phase._replace(record=HaloRecord()) for phase in phases]
            passes = section.forward(xs, own_phases, min(num_nodes, section.stop_node) - section.first_node)
            if is_last:
                break
            outputs = [run.output.copy() for run in passes]
            for states, x, run in zip(checkpoints, xs, passes, strict=True):
                states.append(section.checkpoint(x, run))
            xs = outputs
        return [Pass(run, states) for run, states in zip(passes, checkpoints, strict=True)]

    def backward(self, run: Pass, dy: Any, first_node: int = 0) -> Any:
        """Return the gradient of this rank's tile of the input, given the output's gradient; fill in the layers' grads.

        The pass can be run backward again: arrays that a backward pass overwrites are copied.

        Parameters
        ----------
        first_node : int
            Node at which the backward pass stops; the result is the gradient of its input.
        """
        with run.last_section_pass.preserve_saved_arrays():
            (dx,) = self.backward_together([run], [dy], first_node, need_dx=True, close=False)
            return dx.copy()

    def backward_together(
        self,
        passes: Sequence[Pass],
        dys: Sequence[Any],
        first_node: int = 0,
        need_dx: bool = False,
        on_layer_done: Callable[[Layer], None] | None = None,
        close: bool = True,
    ) -> list[Any]:
        """Return each pass's input gradient (None without `need_dx`); a pass can be run backward only once.

        Parameters
        ----------
        on_layer_done : callable, optional
            Called with each layer when its gradients are complete.
        close : bool
            Whether the passes' memory is released as soon as possible.
        """
        section_passes, section_index = [run.last_section_pass for run in passes], len(passes[0].checkpoints)
        first_node = first_node if need_dx else max(first_node, self.compiled.num_nodes_without_backward)
        while True:
            section = self.sections[section_index]
            start, goes_on = section.first_node, section.first_node > first_node
            dxs = section.backward(section_passes, dys, max(0, first_node - start), need_dx or goes_on, on_layer_done)
            is_recomputed = section_index < len(passes[0].checkpoints)
            if goes_on or (is_recomputed and need_dx):
                dys = dxs = [dx.copy() for dx in dxs]
            if is_recomputed or (close and goes_on):
                for run in section_passes:
                    run.close()
            if not goes_on:
                return dxs
            section_index -= 1
            section_passes = self.sections[section_index].recompute([p.checkpoints[section_index] for p in passes])

    @contextmanager
    def forward_pass(self, x: Any, phase: Phase, num_nodes: int | None = None) -> Iterator[Pass]:
        """Run forward, and close the pass at the end of the block."""
        run = self.forward(x, phase, num_nodes)
        try:
            yield run
        finally:
            run.close()

    def _user_extensible_objects(self) -> Iterator[Registered]:
        """Yield the objects whose code passes run, and that users may have written."""
        for planned in self.compiled:
            layer = planned.layer
            yield from (layer, *(array.policy for array in layer.arrays))
            if layer.activation is not None:
                yield layer.activation
        for step in self.graph.steps:
            if step.join is not None:
                yield step.join
