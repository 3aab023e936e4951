"""Execution of a stream: a section whose passes hold one strip of the image in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from ..errors import PassOrderError
from ..geometry import Box
from ..halo import Phase
from ..layers import Layer, ModelContext
from ..plan import Graph, StripwisePlan
from .arena import BlockPool
from .layer_task import LayerTask
from .reduce import combine_micro_batches
from .section import Section
from .strips import section_of_strip_or_block
from .tasks import share_initial_states
from .workspace import InitialStates, SectionPass

CellIndex = tuple[slice, ...]


class StripwisePass:
    """One pass through a stream: its input, the results of its reductions, and the last strip, if kept.

    Attributes
    ----------
    output : array
        This rank's tile of the stream's output, or the output vector.
    reduced : dict of direction to list
        Results of the reductions of each step.
    """

    output: Any = None

    def __init__(self, x: Any, phase: Phase, num_steps: int) -> None:
        #: saved states of the steps that are not recomputed, by strip
        self.saved_states_by_strip: dict[int, dict[int, Any]] = {}
        self.x, self.phase, self.samples = x, phase, len(x)
        self.initial_states: InitialStates = [{} for _ in range(num_steps)]
        self.reduced: dict[str, list[Any]] = {"forward": [None] * num_steps, "backward": [None] * num_steps}
        self.last_strip_pass: SectionPass | None = None
        self.is_closed = False

    @contextmanager
    def preserve_saved_arrays(self) -> Iterator[None]:
        """Do nothing, because a backward pass inside the block does not overwrite this pass."""
        yield

    def close(self) -> None:
        """Release the memory; no backward pass is possible afterwards."""
        self.is_closed, self.saved_states_by_strip = True, {}
        if self.last_strip_pass is not None:
            self.last_strip_pass.close()
            self.last_strip_pass = None


class _BackwardStrips(NamedTuple):
    """Strips of a part of a stream that run backward together, and the output gradient of each pass."""

    part: StripwiseSection
    strip_numbers: Sequence[int]
    dys: Sequence[Any]


class StripwiseSection:
    """Executor of the nodes of a stream on this rank.

    Parameters
    ----------
    blocks : BlockPool
        Memory of a strip.
    image_box : Box, optional
        This rank's cells of the image; default: the cells that the stream needs.
    """

    def __init__(
        self,
        planned: StripwisePlan,
        context: ModelContext,
        blocks: BlockPool,
        layer_task: Callable[[int, Graph, Layer], LayerTask],
        image_box: Box | None = None,
    ) -> None:
        self.planned, self.context, self.blocks, self.layer_task = planned, context, blocks, layer_task
        self.first_node, self.stop_node, graph, tile = 0, planned.num_nodes, planned.graph, context.grid.tile
        #: tasks of whole tiles, which combine the partial results of ranks
        self.tasks: dict[int, LayerTask] = {
            at: layer_task(at, graph, step.layer) for at, step in enumerate(graph.steps) if step.layer is not None
        }
        self.strip_numbers, self.num_steps = planned.strips(tile), len(graph.steps)
        self._strips_with_kept_gradients = planned.strips_with_kept_gradients(tile)
        self._checkpointed_strips = self.strip_numbers[max(0, len(self.strip_numbers) - planned.checkpointed_strips) :]
        blocks.reserve(planned.max_strip_buffer_elements(tile))
        self._sections: dict[int, Section] = {}
        self._current_strip = -1
        self._output_box, self._image_box = planned.output_box(tile), image_box or planned.tile_cells[0].box(tile)
        self._image_shape = (*self._image_box.shape, graph.shapes[0][-1])
        extent = () if self._output_box is None else self._output_box.shape
        self._output_shape = (*extent, graph.shapes[graph.output_value][-1])
        lower_plan = planned.stream_below_cut
        #: executor of the nodes below the last value whose gradient is kept
        executor_args = context, blocks, layer_task, self._image_box
        self.section_below = None if lower_plan is None else StripwiseSection(lower_plan, *executor_args)
        layer_names = [task.name for task in self.tasks.values()]
        self.name = f"{layer_names[0]} to {layer_names[-1]}"

    @property
    def spans_batch(self) -> bool:
        """Whether a step needs all samples of a batch at once."""
        return any(task.spans_batch for task in self.tasks.values())

    def checkpoint(self, x: Any, run: StripwisePass) -> StripwisePass:
        """Return the checkpoint of a completed pass: the pass itself."""
        return run

    def recompute(self, checkpoints: Sequence[StripwisePass]) -> Sequence[StripwisePass]:
        """Return the passes of these checkpoints."""
        return checkpoints

    def forward(self, xs: Sequence[Any], phases: Sequence[Phase], num_nodes: int | None = None) -> list[StripwisePass]:
        """Return one pass for each input; each step is executed for all passes together."""
        if num_nodes not in (None, self.stop_node):
            raise PassOrderError(
                "a pass cannot end between layers that are executed in strips; leave out strips, and give enough"
                " memory for whole images"
            )
        passes = [StripwisePass(x, phase, self.num_steps) for x, phase in zip(xs, phases, strict=True)]
        share_initial_states(passes, self.tasks.values())
        with self.context.grid.observers.observe("layer", self.name, "forward"):
            for step in self.planned.reduction_steps("forward"):
                self._run_to_reduction(passes, step)
            if self._output_box is not None:
                self._compute_output_strips(passes)
        return passes

    def backward(
        self,
        passes: Sequence[StripwisePass],
        dys: Sequence[Any],
        first_node: int = 0,
        need_dx: bool = True,
        on_layer_done: Callable[[Layer], None] | None = None,
    ) -> list[Any]:
        """Return the gradient of the input of each pass, given its output's gradient; fill in the layers' grads.

        For each layer with a reduction, all strips are run forward again and back to that layer. Strips whose gradients
        are kept at a cut are not run again above the cut.
        """
        with self.context.grid.observers.observe("layer", self.name, "backward"):
            strip_groups, stop_step = [_BackwardStrips(self, self.strip_numbers, dys)], self.num_steps
            for at in reversed(self.planned.reduction_steps("backward")):
                parts: list[list[Any]] = [[] for _ in passes]
                lower = [g.part._run_back_to_reduction(passes, g, at, stop_step, need_dx, parts) for g in strip_groups]
                self._combine_reductions("backward", at, passes, parts)
                strip_groups, stop_step = [group for groups in lower for group in groups], at
            dxs = [self._zero_image_gradient(run.samples) if need_dx else None for run in passes]
            for group in strip_groups:
                group.part._run_back_to_image(passes, group, stop_step, dxs)
        if on_layer_done is not None:
            for task in reversed(self.tasks.values()):
                for layer in task.layers:
                    on_layer_done(layer)
        return dxs

    def _run_to_reduction(self, passes: Sequence[StripwisePass], reduction_step: int) -> None:
        """Run all strips up to a step's `reduce`, and combine the results.

        If the step is the last step of a stream with a vector output, this output is also computed.
        """
        is_last = reduction_step == self.num_steps - 1 and self._output_box is None
        partials_by_pass: list[list[Any]] = [[] for _ in passes]
        for strip in self.strip_numbers:
            section = self._section(strip)
            for run, partials in zip(passes, partials_by_pass, strict=True):
                strip_pass = self._new_strip_pass(section, run)
                strip_pass.keeps_states = is_last and run.phase.training and strip in self._checkpointed_strips
                image = self._image_of_strip(run.x, strip)
                ctx, view, partial_result = section.run_to_reduction(strip_pass, image, reduction_step)
                partials.append(partial_result)
                if strip_pass.keeps_states:
                    run.saved_states_by_strip[strip] = section.saved_states(strip_pass, self.planned.recomputed_steps)
                if is_last and strip == self.strip_numbers[-1]:
                    run.last_strip_pass, run.output = strip_pass, (ctx, view)
                else:
                    strip_pass.close()
            if not is_last and all(partials[0] is None for partials in partials_by_pass):
                break  # no reduction in this pass
        self._combine_reductions("forward", reduction_step, passes, partials_by_pass)
        for run in passes if is_last else ():
            ctx, view = run.output
            ctx.set_reduced(run.reduced["forward"][reduction_step])
            task: Any = self._section(self.strip_numbers[-1]).tasks[reduction_step]
            run.output = task.finish_forward(ctx, view)

    def _run_back_to_reduction(
        self,
        passes: Sequence[StripwisePass],
        group: _BackwardStrips,
        at: int,
        stop_step: int,
        need_dx: bool,
        partials_by_pass: list[list[Any]],
    ) -> list[_BackwardStrips]:
        """Run strips backward to a step's `reduce_backward`, append their partial results, and return the next groups.

        At a cut, the strips' gradients of the cut value are summed and kept.
        """
        lower_section = self.section_below if at == self.planned.backward_sweep_stops[-1] else None
        if lower_section is None:
            kept_gradients, other_strips, next_groups = [None] * len(passes), group.strip_numbers, []
        else:
            kept_gradients = [lower_section.zero_output_gradient(run.samples) for run in passes]
            other_strips = [strip for strip in group.strip_numbers if strip not in self._strips_with_kept_gradients]
            next_groups = [_BackwardStrips(lower_section, lower_section.strip_numbers, kept_gradients)]
        backward_calls = self._backward_order(group.strip_numbers, passes, partials_by_pass, group.dys, kept_gradients)
        for strip, run, partials, dy, gradient_sum in backward_calls:
            section, strip_pass = self._rerun_strip(strip, run, stop_step)
            keep = None
            if lower_section is not None and strip not in other_strips:
                keep = lower_section.stop_node, partial(self._add_gradient_at_cut, strip, lower_section, gradient_sum)
            partials.append(section.run_back_to_reduction(strip_pass, self._dy_of_strip(dy, strip), at, need_dx, keep))
            strip_pass.close()
        self._release_scatter_buffers()
        return [*([group._replace(strip_numbers=other_strips)] if other_strips else []), *next_groups]

    def zero_output_gradient(self, samples: int) -> Any:
        """Return a zero array for the gradient of this rank's output."""
        return self.context.backend.xp.zeros((samples, *self._output_shape), self.context.dtype)

    def _zero_image_gradient(self, samples: int) -> Any:
        return self.context.backend.xp.zeros((samples, *self._image_shape), self.context.dtype)

    def _add_gradient_at_cut(self, strip: int, lower_section: StripwiseSection, total: Any, dy: Any) -> None:
        """Add a strip's gradient of the output of `lower_section` to the total gradient of this output."""
        strip_box = self.planned.strip_partitions[lower_section.planned.graph.output_value].box(strip)
        total[(slice(None), *strip_box.relative_to(lower_section._output_box).slices)] += dy  # type: ignore[arg-type]

    def _run_back_to_image(
        self, passes: Sequence[StripwisePass], group: _BackwardStrips, stop_step: int, dxs: Sequence[Any]
    ) -> None:
        """Run strips backward to the image, and sum the gradients of cells that several strips share."""
        for strip, run, dx, dy in self._backward_order(group.strip_numbers, passes, dxs, group.dys):
            section, strip_pass = self._rerun_strip(strip, run, stop_step)
            (image_gradient,) = section.backward([strip_pass], [self._dy_of_strip(dy, strip)], need_dx=dx is not None)
            if dx is not None:
                dx[self._image_cells_of_strip(strip)] += image_gradient
            strip_pass.close()
        self._release_scatter_buffers()

    def _backward_order(
        self, strip_numbers: Sequence[int], passes: Sequence[StripwisePass], *items_by_pass: Sequence[Any]
    ) -> Iterator[tuple[Any, ...]]:
        """Yield (strip, run, *items of the run); the last strip comes first, because its pass may have been kept."""
        for strip in reversed(strip_numbers):
            for items_of_pass in zip(passes, *items_by_pass, strict=True):
                yield strip, *items_of_pass

    def _combine_reductions(
        self, direction: str, step: int, passes: Sequence[StripwisePass], partials_by_pass: Sequence[Sequence[Any]]
    ) -> None:
        task = self.tasks[step]
        reduction = task.reductions[direction]
        partials = [combine_micro_batches(reduction, strip_partials) for strip_partials in partials_by_pass]
        results = task.combine_partials(direction, partials, [run.samples for run in passes])
        for run, reduced in zip(passes, results, strict=True):
            run.reduced[direction][step] = reduced

    def _compute_output_strips(self, passes: Sequence[StripwisePass]) -> None:
        """Write the output, strip by strip."""
        for run in passes:
            output_shape = run.samples, *self._output_shape
            run.output = self.context.backend.xp.empty(output_shape, self.context.dtype)
        for strip in self.strip_numbers:
            section = self._section(strip)
            for run in passes:
                strip_pass = self._new_strip_pass(section, run)
                strip_pass.keeps_states = run.phase.training and strip in self._checkpointed_strips
                section.run_forward(strip_pass, self._image_of_strip(run.x, strip))
                if strip_pass.keeps_states:
                    run.saved_states_by_strip[strip] = section.saved_states(strip_pass, self.planned.recomputed_steps)
                self.context.backend.kernels.copy(strip_pass.output, run.output[self._output_cells_of_strip(strip)])
                if strip == self.strip_numbers[-1]:
                    run.last_strip_pass = strip_pass
                else:
                    strip_pass.close()

    def _rerun_strip(self, strip: int, run: StripwisePass, stop_step: int) -> tuple[Section, SectionPass]:
        """Return a strip's section and completed forward pass; steps from `stop_step` on have accumulated gradients."""
        section, strip_pass = self._section(strip), run.last_strip_pass
        if strip != self.strip_numbers[-1] or strip_pass is None:
            strip_pass = self._new_strip_pass(section, run)
            num_checkpointed = self.planned.checkpointed_strips  # 0 below a cut, where strips have other cells
            saved_states = run.saved_states_by_strip.get(strip) if num_checkpointed else None
            section.run_forward(strip_pass, self._image_of_strip(run.x, strip), saved_states)
        run.last_strip_pass = None
        strip_pass.first_accumulated_step = stop_step
        return section, strip_pass

    def _new_strip_pass(self, section: Section, run: StripwisePass) -> SectionPass:
        end = section.graph.node_ends[-1]
        strip_pass = SectionPass(section.acquire_workspace(), run.phase, run.samples, end, run.reduced["forward"])
        strip_pass.known_backward_reductions, strip_pass.initial_states = run.reduced["backward"], run.initial_states
        return strip_pass

    # Sections and cells of strips.

    def _section(self, strip: int) -> Section:
        if strip != self._current_strip:
            self._release_scatter_buffers()
        self._current_strip = strip
        if strip not in self._sections:
            args = self.planned.section, self.context, strip, self.blocks, self.layer_task
            self._sections[strip] = section_of_strip_or_block(*args)
        return self._sections[strip]

    def _release_scatter_buffers(self) -> None:
        """Release the buffers to which layers of the current strip have added results."""
        section = self._sections.get(self._current_strip)
        for layer in () if section is None else (layer for task in section.tasks for layer in task.layers):
            if layer.scattered_output_array is not None:
                layer.scattered_output_array.set_halo_plan(layer.scattered_output_array.plan)

    def _image_cells_of_strip(self, strip: int) -> CellIndex:
        return slice(None), *self.planned.strip_partitions[0].box(strip).relative_to(self._image_box).slices

    def _output_cells_of_strip(self, strip: int) -> CellIndex:
        return slice(None), *self.planned.output_cells.box(strip).relative_to(self._output_box).slices  # type: ignore[arg-type]

    def _image_of_strip(self, x: Any, strip: int) -> Any:
        return x[self._image_cells_of_strip(strip)]

    def _dy_of_strip(self, dy: Any, strip: int) -> Any:
        return dy if self._output_box is None else dy[self._output_cells_of_strip(strip)].copy()
