"""Execution of one layer's step of a pass, with all its communication."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NoReturn

from ..comm import Redistribution
from ..errors import PlanMismatchError, set_error_subject
from ..geometry import Box
from ..halo import GlobalArray
from ..layers import Layer, Reduction, Shard, StepContext, declared_with
from ..plan import Graph
from ..terminal.console import counted
from .reduce import combine_micro_batches, combine_ranks
from .tasks import Task
from .workspace import Passes, SectionPass


class LayerTask(Task):
    """Task of a layer's step, which computes a value from another value."""

    context_class = StepContext
    _dtype_remedy = "convert it, and use Python numbers as constants, since NumPy's float64 promotes float32 arrays"

    def __init__(self, index: int, graph: Graph, layer: Layer) -> None:
        super().__init__(index, graph)
        step = graph.steps[index]
        self.layer, self.layers, self.name = layer, layer.leaves, str(layer.name)
        self.input_array: GlobalArray = layer.input
        (value,) = step.inputs
        #: allgathers of sharded vectors: of the input, if the layer reads only this rank's range, and of the output
        reads_shard = graph.reads_only_own_shard(step) and value not in graph.sharded_vectors
        self.input_gather = self._allgather_of(graph.shapes[value]) if reads_shard else None
        self.output_gather = (
            self._allgather_of(graph.shapes[step.output_value]) if step.output_value in graph.sharded_vectors else None
        )
        self.has_window = not self.input_array.plan.trivial
        #: step that can recompute the input
        self.input_recomputation_step = graph.input_recomputation_steps.get(index)
        self.reductions = {reduction.direction: reduction for reduction in layer.reductions_for(layer.input_shape)}
        self.spans_batch = any(reduction.spans_batch for reduction in self.reductions.values())
        #: whether partial results are recomputed although the result is known, for the arrays saved on the way
        methods = {"forward": "reduce", "backward": "reduce_backward"}
        self._recomputes_partial_result = {
            direction: declared_with(layer, "reduce_needed_in_recomputation", methods[direction]) is not False
            for direction in self.reductions
        }
        self.observers = layer.context.grid.observers

    def execute_forward(self, passes: Passes, inputs: Sequence[Sequence[Any]]) -> list[Any]:
        """Gather halos, reduce, compute, and apply the activation."""
        if not self.observers:
            return self._forward(passes, inputs)
        for weights in self.layer.params.values():
            self.observers.on_value(self.layer, "weights", weights)
        with self.observers.observe("layer", self.name, "forward"):
            outputs = self._forward(passes, inputs)
        for y in outputs:
            self.observers.on_value(self.layer, "output", y)
        return outputs

    def execute_backward(self, passes: Passes, dys: Sequence[Any], needs_dx: Sequence[bool]) -> list[Sequence[Any]]:
        """Run the adjoint of `execute_forward`, and fill in the layer's gradients."""
        if not self.observers:
            return self._backward(passes, dys, needs_dx[0])
        with self.observers.observe("layer", self.name, "backward"):
            gradients = self._backward(passes, dys, needs_dx[0])
        for gradient in self.layer.grads.values():
            self.observers.on_value(self.layer, "gradients of the weights", gradient)
        for (dx,) in gradients:
            self.observers.on_value(self.layer, "gradient of the input", dx)
        return gradients

    def _forward(self, passes: Passes, inputs: Sequence[Sequence[Any]]) -> list[Any]:
        ctxs_and_views = [self.begin_forward(run, x) for run, (x,) in zip(passes, inputs, strict=True)]
        known = [results[self.index] for run in passes if (results := run.known_forward_reductions) is not None]
        self._reduce("forward", ctxs_and_views, known)
        return [self.finish_forward(ctx, view) for ctx, view in ctxs_and_views]

    def begin_forward(self, run: SectionPass, x: Any) -> tuple[StepContext, Any]:
        """Return the context and view of a new call; the view is None if there is no input."""
        layer, space, samples, activation_step = self.layer, run.workspace, run.samples, self.fused_activation(run)
        x = x if self.input_gather is None or x is None else x[..., self.input_gather.plan.own.slices[0]]
        ctx = self.context_class(layer, run.phase, samples, partial(space.value_array, self.result_value(run), samples))
        if activation_step is not None and activation_step.layer is not None:
            ctx.activation = activation_step.layer.activation
        run.contexts[self.index], ctx.initial_state = ctx, run.initial_states[self.index]
        ctx.state_already_updated = bool(ctx.initial_state)
        ctx.applies_input_relu_gradient = self.applies_input_relu_gradient
        ctx.relu_gradient_left_to_next_layer = self.is_relu_gradient_deferred(run)
        needs_exchange, get_buffer = self.has_window and x is not None, space.view
        view = self.exchange_halo("forward", ctx, get_buffer(self.index, samples), x) if needs_exchange else x
        space.save_border(self.index, samples)
        rebuilds_view = self.index in space.plan.rebuilt_view_ranges
        if layer.scattered_output_array is None:
            ctx.output_shape = samples, *space.shapes[self.result_value(run)]
        if view is not None:
            ctx.view_shape = view.shape
        ctx.view_to_rebuild = view if rebuilds_view or (run.keeps_states and layer.saves_input) else None
        return ctx, view

    def saved_state(self, run: SectionPass) -> tuple[dict[str, Any], bool]:
        """Return the arrays that the layer has saved, and whether it has applied its activation."""
        ctx = run.contexts[self.index]
        assert ctx is not None
        return ctx.saved_arrays_without_view(run.workspace.arena.blocks.owns), ctx.activated

    def restore_saved_state(self, run: SectionPass, inputs: Sequence[Any], saved: tuple[dict[str, Any], bool]) -> None:
        """Rebuild the view, if needed, and a context with the saved arrays."""
        (x,) = inputs
        ctx, view = self.begin_forward(run, x if self.layer.saves_input else None)
        saved_arrays, ctx.activated = saved
        ctx.restore_saved_arrays(view, saved_arrays)
        ctx.set_reduced(None if run.known_forward_reductions is None else run.known_forward_reductions[self.index])

    def finish_forward(self, ctx: StepContext, view: Any) -> Any:
        """Return the outputs of a call whose reductions are complete."""
        layer = self.layer
        if not ctx.initial_state:
            state_copies = {name: array.copy() for name, array in layer.state.items()}
            y = self.call_forward(ctx, view)
            ctx.initial_state.update(state_copies)
        else:
            with self._initial_state(ctx):
                y = self.call_forward(ctx, view)
        self._check_result("forward", y, ctx.output_shape)
        if layer.scattered_output_array is not None:
            y = layer.output_from_summed_contributions(ctx, ctx.scatter_add(layer.scattered_output_array, y))
        return self._activate_in_reserved_memory(ctx, view, y)

    def _activate_in_reserved_memory(self, ctx: StepContext, view: Any, y: Any) -> Any:
        """Return the activated outputs in memory that stays reserved until they are read."""
        layer = self.layer
        if y is not ctx.accessed_out and ctx.accessed_out is not None:
            ctx.copy_saved_arrays_sharing_memory(ctx.accessed_out)  # a superclass's method may have saved this array
        if ctx.activation is not None and not ctx.activated:
            if y is ctx.accessed_out:
                ctx.copy_saved_arrays_sharing_memory(y)
            else:
                y = self._copy_to_out(ctx, y)
            ctx.activation_output = y = ctx.activation.fprop(y)
        elif y is not ctx.accessed_out and view is not None and layer.kernels.xp.may_share_memory(y, view):
            y = self._copy_to_out(ctx, y)
        if view is not None and not layer.saves_input:  # no view: forward has read only `ctx.reduced`
            ctx.copy_saved_arrays_sharing_memory(view)
        elif ctx.view_to_rebuild is not None:
            ctx.copy_saved_arrays_sharing_memory(view, unless=view)
        keeps_output = layer.must_keep_output or (ctx.activation is not None and layer.saves_activated)
        if self.relu_gradient_step is not None and not ctx.relu_gradient_left_to_next_layer:
            ctx.activation_output = None if ctx.activation_output is None else y.copy()
        if self.relu_gradient_step is not None or not keeps_output:
            ctx.copy_saved_arrays_sharing_memory(y)
        return y

    def _backward(self, passes: Passes, dys: Sequence[Any], needs_dx: bool) -> list[Sequence[Any]]:
        ctxs_and_dys = [self.begin_backward(run, dy, needs_dx) for run, dy in zip(passes, dys, strict=True)]
        known = [results[self.index] for run in passes if (results := run.known_backward_reductions) is not None]
        self._reduce("backward", ctxs_and_dys, known)
        for run, (ctx, _) in zip(passes, ctxs_and_dys, strict=True):
            # the strips that computed the reduction stopped before `backward`
            ctx.needs_weight_gradients = self.index <= run.first_accumulated_step
        return [[self._finish_backward(run, ctx, dy)] for run, (ctx, dy) in zip(passes, ctxs_and_dys, strict=True)]

    def begin_backward(self, run: SectionPass, dy: Any, needs_dx: bool) -> tuple[StepContext, Any]:
        """Return a call's context and the gradient of its output before the activation."""
        layer, ctx, space = self.layer, run.contexts[self.index], run.workspace
        assert ctx is not None
        if self.index in space.plan.rebuilt_view_ranges and self.input_recomputation_step is not None:
            producer = run.contexts[self.input_recomputation_step]
            assert producer is not None
            ctx.replace_saved_view(
                space.recompute_view(self.index, self.inputs[0], run.samples, producer.recompute_output)
            )
        if ctx.activation is not None and not (ctx.activated or ctx.relu_gradient_left_to_next_layer):
            dy = ctx.activation.bprop(ctx.activation_output, dy)
        ctx.set_reduced(ctx.forward_reduction)  # for reduce_backward, also if the pass was run backward before
        ctx.needs_input_gradient, ctx.needs_weight_gradients = needs_dx, self.index < run.first_accumulated_step
        if self.input_gather is not None:
            shape = run.samples, *self.input_gather.plan.own.shape
            ctx.set_out_allocator(partial(ctx.xp.empty, shape, layer.context.dtype))
        elif layer.gathered_gradient_array is None or not needs_dx:
            ctx.set_out_allocator(partial(run.workspace.gradient_array, self.index, self.inputs[0], run.samples))
        return ctx, dy if layer.splits_outputs else self._redistribute("backward", self.output_gather, dy)

    def _finish_backward(self, run: SectionPass, ctx: StepContext, dy: Any) -> Any:
        layer, space = self.layer, run.workspace
        needs_dx = ctx.needs_input_gradient
        if self._skips_backward(ctx):
            return None
        if layer.gathered_gradient_array is not None and needs_dx:
            return self._gather_gradient(ctx, dy)
        if layer.scattered_output_array is not None:
            dy = ctx.gather(layer.scattered_output_array, layer.gradient_to_gather(ctx, dy))
        dview = self.call_backward(ctx, dy)
        if ctx.needs_weight_gradients:
            self._check_gradients_assigned(dy)
        if not needs_dx:
            return None
        self._check_result("backward", dview, ctx.view_shape)
        if self.input_gather is not None:
            return self._redistribute("backward", self.input_gather, dview)
        if self.has_window:
            return self.exchange_halo("backward", ctx, space.view(self.index, run.samples), dview)
        return (
            self._copy_to_out(ctx, dview) if dview is not ctx.accessed_out and space.arena.blocks.owns(dview) else dview
        )

    def _skips_backward(self, ctx: StepContext) -> bool:
        """Return whether no gradient depends on the layer's backward reduction, which the plan does not count."""
        return "backward" in self.reductions and not (ctx.needs_input_gradient or self.layer.params)

    def _copy_to_out(self, ctx: StepContext, array: Any) -> Any:
        """Return a copy in the memory of the result."""
        out = ctx.out if ctx.accessed_out is None else ctx.accessed_out
        self.layer.kernels.copy(array, out)
        return out

    def _gather_gradient(self, ctx: StepContext, dy: Any) -> Any:
        """Return the gradient of the tile, computed from the gathered gradients of all outputs that depend on it."""
        layer = self.layer
        assert layer.gathered_gradient_array is not None
        ctx.needs_input_gradient = False
        self.call_backward(ctx, dy)
        return layer.input_gradient(ctx, ctx.gather(layer.gathered_gradient_array, layer.gradient_to_gather(ctx, dy)))

    @contextmanager
    def _initial_state(self, ctx: StepContext) -> Iterator[None]:
        """Temporarily replace the layer's state, which another call has updated, with copies from before the pass."""
        layer, state = self.layer, self.layer.state
        layer.state = {name: array.copy() for name, array in ctx.initial_state.items()}
        ctx.state_already_updated = False  # the copies may be updated
        try:
            yield
        finally:
            layer.state, ctx.state_already_updated = state, True

    def call_forward(self, ctx: StepContext, view: Any) -> Any:
        """Call the layer's forward; debugging tasks override this method."""
        with set_error_subject(self.layer):
            return self.layer.forward(ctx, view)

    def call_backward(self, ctx: StepContext, dy: Any) -> Any:
        """Call the layer's backward."""
        with set_error_subject(self.layer):
            return self.layer.backward(ctx, dy)

    def compute_partial_result(self, direction: str, ctx: StepContext, array: Any) -> Any:
        """Call the layer's reduce, or reduce_backward."""
        with set_error_subject(self.layer):
            if direction == "backward":
                return None if self._skips_backward(ctx) else self.layer.reduce_backward(ctx, array)
            with self._initial_state(ctx) if ctx.initial_state else nullcontext():
                return self.layer.reduce(ctx, array)

    def exchange_halo(self, direction: str, ctx: StepContext, buffer: Any, array: Any) -> Any:
        """Return the view of a tile, or the gradient of a tile given the gradient of its view."""
        run_exchange = buffer.forward if direction == "forward" else buffer.backward
        with self.observers.observe("halo", self.name, direction):
            return run_exchange(array, ctx.phase)

    def _reduce(self, direction: str, ctx_arrays: Sequence[tuple[StepContext, Any]], known: Sequence[Any] = ()) -> None:
        """Set `ctx.reduced` of each call to the result over all ranks; None: no reduction in this pass.

        In a repeated pass the results are `known`; partial results are recomputed only if the layer saves arrays in
        doing so.
        """
        reduction, results = self.reductions.get(direction), list(known) or [None] * len(ctx_arrays)
        if reduction is not None and (not known or self._recomputes_partial_result[direction]):
            partials = [self.compute_partial_result(direction, ctx, array) for ctx, array in ctx_arrays]
            if not known:
                counts = [ctx.samples[1] - ctx.samples[0] for ctx, _ in ctx_arrays]
                results = self.combine_partials(direction, partials, counts)
        for (ctx, _), result in zip(ctx_arrays, results, strict=True):
            ctx.set_reduced(result, direction)

    def combine_partials(self, direction: str, partials: list[Any], counts: Sequence[int]) -> list[Any]:
        """Return the combined partial results of all ranks for each pass. Collective."""
        reduction = self.reductions[direction]
        if reduction.spans_batch:
            partials = [combine_micro_batches(reduction, partials)] * len(partials)
        self._check_partial_sizes(reduction, partials, counts)
        if partials[0] is not None and reduction.group is not None:
            self.input_array.reductions.direction = direction
            cut = self.output_gather if direction == "forward" else None
            with self.observers.observe("reduce" if cut is None else "redistribute", self.name, direction):
                reductions, results = self.input_array.reductions, partials[:1] if reduction.spans_batch else partials
                results = [
                    combine_ranks(reductions, reduction, part) if cut is None else cut.adjoint(part) for part in results
                ]
                return results * len(partials) if reduction.spans_batch else results
        return partials

    def _check_result(self, method: str, array: Any, shape: tuple[int, ...] | None) -> None:
        """Raise PlanMismatchError if the result of `forward` or `backward` has a wrong type, shape or dtype."""
        dtype = self.layer.context.dtype
        if not hasattr(array, "dtype"):
            fault = f"an object of type {type(array).__name__}; return an array"
        elif shape is not None and tuple(array.shape) != tuple(shape):
            remedy = "declare this shape" if method == "forward" else "return the gradient of the whole view"
            fault = f"an array of shape {tuple(array.shape)}; expected {tuple(shape)}: {remedy}, or correct {method}"
        elif array.dtype != dtype:
            fault = f"an array of dtype {array.dtype}; expected {dtype}: {self._dtype_remedy}"
        else:
            return
        self._raise_mismatch(f"{method} returns {fault}")

    def _check_gradients_assigned(self, dy: Any) -> None:
        """Raise PlanMismatchError if `backward` has left gradients unassigned, unless there are no output cells."""
        if (names := getattr(self.layer.grads, "names_to_zero", None)) and dy.size:
            self._raise_mismatch(
                f"backward assigns no gradient of '{min(names)}'; assign ctx.grads['{min(names)}'], zeros if the output"
                " does not depend on it"
            )

    def _check_partial_sizes(self, reduction: Reduction, partials: Sequence[Any], counts: Sequence[int]) -> None:
        """Raise PlanMismatchError if partial results have a wrong dtype, or other sizes than the layer declares."""
        method, dtype = "reduce" if reduction.direction == "forward" else "reduce_backward", self.layer.context.dtype
        for partial_result, samples in zip(partials, counts, strict=True):
            declared_size = reduction.result_elements(samples)
            if partial_result is None:
                continue
            if not hasattr(partial_result, "dtype"):
                self._raise_mismatch(f"{method} returns a {type(partial_result).__name__}; return an array")
            if partial_result.dtype != dtype:
                self._raise_mismatch(
                    f"{method} returns an array of dtype {partial_result.dtype}; expected {dtype}: {self._dtype_remedy}"
                )
            if partial_result.size != declared_size:
                self._raise_mismatch(
                    f"reduces {counted(partial_result.size, 'element')} {reduction.direction}, but reductions_for"
                    f" declares {declared_size}; correct reductions_for"
                )

    def _raise_mismatch(self, fault: str) -> NoReturn:
        with set_error_subject(self.layer):
            raise PlanMismatchError(f"layer '{self.name}' ({type(self.layer).__name__}): {fault}")

    # Vectors, replicated or sharded over the ranks of a replica.

    def _allgather_of(self, shape: tuple[int, ...]) -> Redistribution | None:
        """Return the allgather of a sharded vector; None if there is only one tile."""
        grid = self.layer.context.grid.shape
        if grid.tiles == 1:
            return None
        shards = [Shard(shape).input_box(grid, tile) for tile in range(grid.tiles)]
        all_to_all = partial(self.input_array.reductions.all_to_all, "tiles")
        return Redistribution(all_to_all, self.layer.context.grid.tile, shards, [Box.of(shape)] * grid.tiles)

    def _redistribute(self, direction: str, redistribution: Redistribution | None, array: Any) -> Any:
        if redistribution is None:
            return array
        self.input_array.reductions.direction = direction
        with self.observers.observe("redistribute", self.name, direction):
            return redistribution.forward(array)

    def unshard(self, y: Any) -> Any:
        """Return the whole vector, given this rank's range of a sharded vector."""
        return self._redistribute("forward", self.output_gather, y)

    def shard(self, y: Any) -> Any:
        """Return this rank's range of a sharded vector."""
        return y if self.output_gather is None else y[..., self.output_gather.plan.own.slices[0]]
