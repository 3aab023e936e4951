"""Task of a layer's step in a pass, forward and backward; all communication of a pass is here."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from ..comm import Redistribution
from ..errors import PlanError
from ..geometry import Box
from ..halo import GlobalArray
from ..layers import Layer, Reduction, Shard, StepContext, declared_with
from ..plan import Graph
from .reduce import combine, joined
from .tasks import Task
from .workspace import SectionPass


class LayerTask(Task):
    """A layer computes a value from another."""

    context_class = StepContext

    def __init__(self, at: int, graph: Graph, layer: Layer) -> None:
        super().__init__(at, graph)
        step = graph.steps[at]
        self.layer, self.layers, self.name = layer, layer.leaves, str(layer.name)
        self.array: GlobalArray = layer.input
        (value,) = step.inputs
        #: from a range of a vector to the whole: of the input, where only the layer has no use for that; of the output
        self.opens = self._joins(graph.shapes[value]) if graph.wants_shard(step) and value not in graph.shards else None
        self.joins = self._joins(graph.shapes[step.output]) if step.output in graph.shards else None
        self.windowed = not self.array.plan.trivial
        #: the step that can give the input again
        self.maker = graph.restored.get(at)
        self.reductions = {one.direction: one for one in layer.reductions_for(layer.input_shape)}
        self.over_batch = any(one.over_batch for one in self.reductions.values())
        #: whose partial results are computed where what they come to is known, for what the layer saves
        methods = {"forward": "reduce", "backward": "reduce_backward"}
        self._reduces_again = {
            direction: declared_with(layer, "reduce_saves", methods[direction]) is not False
            for direction in self.reductions
        }
        self.observers = layer.context.grid.observers

    def forward(self, runs: Sequence[SectionPass], inputs: Sequence[Sequence[Any]]) -> list[Any]:
        """Make the views, reduce, compute, activate."""
        if not self.observers:
            return self._forward(runs, inputs)
        for weights in self.layer.params.values():
            self.observers.value(self.layer, "weights", weights)
        with self.observers.during("layer", self.name, "forward"):
            found = self._forward(runs, inputs)
        for y in found:
            self.observers.value(self.layer, "output", y)
        return found

    def backward(self, runs: Sequence[SectionPass], dys: Sequence[Any], needed: Sequence[bool]) -> list[Sequence[Any]]:
        """Do the adjoint of all that, and fill in the layer's gradients."""
        if not self.observers:
            return self._backward(runs, dys, needed[0])
        with self.observers.during("layer", self.name, "backward"):
            found = self._backward(runs, dys, needed[0])
        for gradient in self.layer.grads.values():
            self.observers.value(self.layer, "gradients of the weights", gradient)
        for (dx,) in found:
            self.observers.value(self.layer, "gradient of the input", dx)
        return found

    def _forward(self, runs: Sequence[SectionPass], inputs: Sequence[Sequence[Any]]) -> list[Any]:
        calls = [self.called(run, x) for run, (x,) in zip(runs, inputs, strict=True)]
        self._reduce("forward", calls, [run.given[self.at] for run in runs if run.given is not None])
        return [self.computed(ctx, view) for ctx, view in calls]

    def called(self, run: SectionPass, x: Any) -> tuple[StepContext, Any]:
        """Return a new call's ctx and view; None without a tile."""
        layer, space, samples, behind = self.layer, run.workspace, run.samples, self.absorbed(run)
        x = x if self.opens is None or x is None else x[..., self.opens.plan.own.slices[0]]
        ctx = self.context_class(layer, run.phase, samples, partial(space.value_place, self.gives(run), samples))
        if behind is not None and behind.layer is not None:
            ctx.activation = behind.layer.activation
        run.contexts[self.at], ctx.repeats = ctx, self.at < run.first_new
        ctx.cleared, ctx.clears = self.cleared(run), self.clears
        view = x if not self.windowed or x is None else self.halo("forward", ctx, space.view(self.at, samples), x)
        space.keep_border(self.at, samples)
        again = self.at in space.plan.restored
        ctx.whole_view = view if again or (run.keeps and layer.saves_input) else None
        return ctx, view

    def left(self, run: SectionPass) -> tuple[dict[str, Any], bool]:
        """Return what the layer has saved, and whether it has applied its activation."""
        ctx = run.contexts[self.at]
        assert ctx is not None
        return ctx.to_keep(run.workspace.arena.blocks.owns), ctx.activated

    def resume(self, run: SectionPass, inputs: Sequence[Any], left: tuple[dict[str, Any], bool]) -> None:
        """Make the view, if it is needed, and a ctx in which that is saved."""
        (x,) = inputs
        ctx, view = self.called(run, x if self.layer.saves_input else None)
        saved, ctx.activated = left
        ctx.resume(view, saved)
        ctx.reduced = None if run.given is None else run.given[self.at]

    def computed(self, ctx: StepContext, view: Any) -> Any:
        """Return the outputs, where `ctx` has what is reduced."""
        layer = self.layer
        y = self.compute(ctx, view)
        if layer.scatters is not None:
            y = layer.finish(ctx, ctx.scatter_add(layer.scatters, y))
        return self._settled(ctx, view, y)

    def _settled(self, ctx: StepContext, view: Any, y: Any) -> Any:
        """Return the outputs, activated, in memory that stays reserved until they have been read."""
        layer = self.layer
        if y is not ctx.offered and ctx.offered is not None:
            ctx.shield(ctx.offered)  # what a parent's method saved there, whoever reads y may get it there
        if ctx.activation is not None and not ctx.activated:
            if y is ctx.offered:
                ctx.shield(y)
            else:
                y = self._copied(ctx, y)
            ctx.output = y = ctx.activation.fprop(y)
        elif y is not ctx.offered and view is not None and layer.kernels.xp.may_share_memory(y, view):
            y = self._copied(ctx, y)
        if view is not None and not layer.saves_input:  # a strip has none where sums alone are needed
            ctx.shield(view)
        elif ctx.whole_view is not None:
            ctx.shield(view, but=view)
        keeps = layer.keeps_output or (ctx.activation is not None and layer.saves_activated)
        if self.cleared_by is not None and not ctx.cleared:
            ctx.output = None if ctx.output is None else y.copy()
        if self.cleared_by is not None or not keeps:
            ctx.shield(y)
        return y

    def _backward(self, runs: Sequence[SectionPass], dys: Sequence[Any], needed: bool) -> list[Sequence[Any]]:
        calls = [self.called_back(run, dy, needed) for run, dy in zip(runs, dys, strict=True)]
        self._reduce("backward", calls, [run.given_back[self.at] for run in runs if run.given_back is not None])
        return [[self._computed_back(run, *call)] for run, call in zip(runs, calls, strict=True)]

    def called_back(self, run: SectionPass, dy: Any, needed: bool) -> tuple[StepContext, Any]:
        """Return a call's ctx, and the gradient of what the layer's forward returned."""
        layer, ctx, space = self.layer, run.contexts[self.at], run.workspace
        assert ctx is not None
        if self.at in space.plan.restored and self.maker is not None:
            maker = run.contexts[self.maker]
            assert maker is not None
            ctx.move_view(space.restored(self.at, self.inputs[0], run.samples, maker.restore_output))
        if ctx.activation is not None and not (ctx.activated or ctx.cleared):
            dy = ctx.activation.bprop(ctx.output, dy)
        ctx.needs_input_gradient, ctx.needs_weight_gradients = needed, self.at < run.done_back
        if self.opens is not None:
            shape = run.samples, *self.opens.plan.own.shape
            ctx.offer(partial(ctx.xp.empty, shape, layer.context.dtype))
        elif layer.gathers is None or not needed:
            ctx.offer(partial(run.workspace.gradient_place, self.at, self.inputs[0], run.samples))
        return ctx, dy if layer.splits_outputs else self._redistributed("backward", self.joins, dy)

    def _computed_back(self, run: SectionPass, ctx: StepContext, dy: Any) -> Any:
        layer, space = self.layer, run.workspace
        needed = ctx.needs_input_gradient
        if layer.gathers is not None and needed:
            return self._gathered(ctx, dy)
        if layer.scatters is not None:
            dy = ctx.gather(layer.scatters, layer.to_gather(ctx, dy))
        dview = self.compute_back(ctx, dy)
        if not needed:
            return None
        if self.opens is not None:
            return self._redistributed("backward", self.opens, dview)
        if self.windowed:
            return self.halo("backward", ctx, space.view(self.at, run.samples), dview)
        return self._copied(ctx, dview) if dview is not ctx.offered and space.arena.blocks.owns(dview) else dview

    def _copied(self, ctx: StepContext, array: Any) -> Any:
        """Return a copy where the result is wanted."""
        out = ctx.out if ctx.offered is None else ctx.offered
        self.layer.kernels.copy(array, out)
        return out

    def _gathered(self, ctx: StepContext, dy: Any) -> Any:
        """Return the gradient of the tile from those of all outputs that look at it, which are fetched."""
        layer = self.layer
        assert layer.gathers is not None
        ctx.needs_input_gradient = False
        self.compute_back(ctx, dy)
        return layer.input_gradient(ctx, ctx.gather(layer.gathers, layer.to_gather(ctx, dy)))

    def compute(self, ctx: StepContext, view: Any) -> Any:
        """Call the layer's forward; what looks for mistakes overrides this."""
        return self.layer.forward(ctx, view)

    def compute_back(self, ctx: StepContext, dy: Any) -> Any:
        """Call the layer's backward."""
        return self.layer.backward(ctx, dy)

    def partial_result(self, direction: str, ctx: StepContext, array: Any) -> Any:
        """Call the layer's reduce, or reduce_backward."""
        return (self.layer.reduce if direction == "forward" else self.layer.reduce_backward)(ctx, array)

    def halo(self, direction: str, ctx: StepContext, buffer: Any, array: Any) -> Any:
        """Return the view of a tile, or the gradient of a tile for that of its view."""
        move = buffer.forward if direction == "forward" else buffer.backward
        with self.observers.during("halo", self.name, direction):
            return move(array, ctx.phase)

    def _reduce(self, direction: str, calls: Sequence[tuple[StepContext, Any]], known: Sequence[Any] = ()) -> None:
        """Let each ctx have what all ranks' partial results come to; None: nothing is reduced in this pass.

        Where a pass is run again, that is `known`; the layer's part of it is computed, for what it saves, and no more.
        """
        how = self.reductions.get(direction)
        if how is None:
            for ctx, _ in calls:
                ctx.reduced = None
            return
        if known and not self._reduces_again[direction]:
            mine = []
        else:
            mine = [self.partial_result(direction, ctx, array) for ctx, array in calls]
        if known:
            for (ctx, _), reduced in zip(calls, known, strict=True):
                ctx.reduced = reduced
            return
        counts = [ctx.samples[1] - ctx.samples[0] for ctx, _ in calls]
        for at, ((ctx, _), reduced) in enumerate(zip(calls, self.combined(direction, mine, counts), strict=True)):
            ctx.reduced, ctx.repeats = reduced, how.over_batch and at > 0

    def combined(self, direction: str, mine: list[Any], counts: Sequence[int]) -> list[Any]:
        """Return what all ranks' partial results come to, for each of the passes; collective.

        Parameters
        ----------
        mine : list of array or None
            This rank's, of each pass.
        counts : how many samples it has
        """
        how = self.reductions[direction]
        if how.over_batch:
            mine = [joined(how, mine)] * len(mine)
        self._check_reduced(how, mine, counts)
        if mine[0] is not None and how.group is not None:
            self.array.reductions.direction = direction
            cut = self.joins if direction == "forward" else None
            with self.observers.during("reduce" if cut is None else "redistribute", self.name, direction):
                log, found = self.array.reductions, mine[:1] if how.over_batch else mine
                found = [combine(log, how, one) if cut is None else cut.adjoint(one) for one in found]
                return found * len(mine) if how.over_batch else found
        return mine

    def _check_reduced(self, how: Reduction, partials: Sequence[Any], counts: Sequence[int]) -> None:
        """Raise PlanError if partial results have other sizes than the layer has declared."""
        for one, samples in zip(partials, counts, strict=True):
            declared = how.each * samples + how.once
            if one is not None and one.size != declared:
                raise PlanError(
                    f"layer '{self.name}' ({type(self.layer).__name__}): reduces {one.size} elements"
                    f" {how.direction}, but its reductions_for declares {declared}"
                )

    # Vectors, which may be whole on each rank of a replica, or cut over them.

    def _joins(self, shape: tuple[int, ...]) -> Redistribution | None:
        """Return what makes the ranges of a vector whole; None on one rank."""
        grid = self.layer.context.grid.shape
        if grid.tiles == 1:
            return None
        shards = [Shard(shape).inputs(grid, tile) for tile in range(grid.tiles)]
        all_to_all = partial(self.array.reductions.all_to_all, "tiles")
        return Redistribution(all_to_all, self.layer.context.grid.tile, shards, [Box.of(shape)] * grid.tiles)

    def _redistributed(self, direction: str, moves: Redistribution | None, part: Any) -> Any:
        if moves is None:
            return part
        self.array.reductions.direction = direction
        with self.observers.during("redistribute", self.name, direction):
            return moves.forward(part)

    def whole(self, y: Any) -> Any:
        """Return all of a vector that its readers have a range of."""
        return self._redistributed("forward", self.joins, y)

    def part(self, y: Any) -> Any:
        """Return the range of a vector that its readers have."""
        return y if self.joins is None else y[..., self.joins.plan.own.slices[0]]
