"""What one step of a graph does in a pass, forward and backward; all communication of a pass is here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ..layers import Branches, Layer, StepContext
from ..plan import Step
from .reduce import combine

if TYPE_CHECKING:
    from .executor import Pass


class Task(ABC):
    """A step of the graph, on this rank."""

    def __init__(self, at: int, step: Step) -> None:
        self.at, self.inputs, self.output = at, step.inputs, step.output

    @abstractmethod
    def forward(self, run: Pass, *inputs: Any) -> Any:
        """Return this rank's tile of the value, given those of the inputs."""

    @abstractmethod
    def backward(self, run: Pass, dy: Any, needed: Sequence[bool]) -> Sequence[Any]:
        """Return the gradients of the inputs, None for those that are not needed, given that of the value."""


class JoinTask(Task):
    """Several values become one."""

    def __init__(self, at: int, step: Step, join: Branches) -> None:
        super().__init__(at, step)
        self.join = join

    def forward(self, run: Pass, *inputs: Any) -> Any:
        """Write the joined value where its reader wants it."""
        y = run.workspace.value_place(self.output, run.samples)
        self.join.combine(inputs, y)
        return y

    def backward(self, run: Pass, dy: Any, needed: Sequence[bool]) -> Sequence[Any]:
        """Return parts of dy, or dy itself."""
        return self.join.split(dy)


class LayerTask(Task):
    """A layer computes a value from another."""

    context_class = StepContext

    def __init__(self, at: int, step: Step, layer: Layer) -> None:
        super().__init__(at, step)
        self.layer, self.array, self.name = layer, layer.input, str(layer.name)
        self.windowed = not self.array.plan.trivial
        self.reductions = {one.direction: one for one in layer.reductions_for(layer.input_shape)}
        self.observers = layer.context.grid.observers

    def forward(self, run: Pass, *inputs: Any) -> Any:
        """Make the view, reduce, compute, activate."""
        if not self.observers:
            return self._forward(run, *inputs)
        for weights in self.layer.params.values():
            self.observers.value(self.layer, "weights", weights)
        with self.observers.during("layer", self.name, "forward"):
            y = self._forward(run, *inputs)
        self.observers.value(self.layer, "output", y)
        return y

    def backward(self, run: Pass, dy: Any, needed: Sequence[bool]) -> Sequence[Any]:
        """Do the adjoint of all that, and fill in the layer's gradients."""
        if not self.observers:
            return [self._backward(run, dy, needed[0])]
        with self.observers.during("layer", self.name, "backward"):
            dx = self._backward(run, dy, needed[0])
        for gradient in self.layer.grads.values():
            self.observers.value(self.layer, "gradients of the weights", gradient)
        self.observers.value(self.layer, "gradient of the input", dx)
        return [dx]

    def _forward(self, run: Pass, x: Any) -> Any:
        layer, space, samples = self.layer, run.workspace, run.samples
        ctx = self.context_class(layer, run.phase, samples, partial(space.value_place, self.output, samples))
        run.contexts[self.at] = ctx
        view = x if not self.windowed else self.halo("forward", ctx, space.view(self, samples), x)
        ctx.reduced = self._reduced("forward", ctx, view)
        y = self.compute(ctx, view)
        if layer.scatters is not None:
            y = layer.finish(ctx, ctx.scatter_add(layer.scatters, y))
        return self._settled(ctx, view, y)

    def _settled(self, ctx: StepContext, view: Any, y: Any) -> Any:
        """Return the outputs, activated, in memory that nobody uses before they have been read."""
        layer = self.layer
        if y is not ctx.offered and ctx.offered is not None:
            ctx.shield(ctx.offered)  # what a parent's method saved there, whoever reads y may get it there
        if layer.activation is not None and not ctx.activated:
            if y is ctx.offered:
                ctx.shield(y)
            else:
                y = self._copied(ctx, y)
            ctx.output = y = layer.activation.fprop(y)
        elif y is not ctx.offered and np.may_share_memory(y, view):
            y = self._copied(ctx, y)
        if not layer.saves_input:
            ctx.shield(view)
        if not layer.keeps_output:
            ctx.shield(y)
        return y

    def _backward(self, run: Pass, dy: Any, needed: bool) -> Any:
        layer, space, samples = self.layer, run.workspace, run.samples
        ctx = run.contexts[self.at]
        assert ctx is not None
        if layer.activation is not None and not ctx.activated:
            dy = layer.activation.bprop(ctx.output, dy)
        if layer.gathers is not None and needed:
            return self._gathered(ctx, dy)
        ctx.needs_input_gradient = needed
        ctx.offer(partial(space.gradient_place, self, samples))
        if layer.scatters is not None:
            dy = ctx.gather(layer.scatters, layer.to_gather(ctx, dy))
        ctx.reduced = self._reduced("backward", ctx, dy)
        dview = self.compute_back(ctx, dy)
        if not needed:
            return None
        if self.windowed:
            return self.halo("backward", ctx, space.view(self, samples), dview)
        return self._copied(ctx, dview) if dview is not ctx.offered and space.arena.owns(dview) else dview

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

    def halo(self, direction: str, ctx: StepContext, frame: Any, array: Any) -> Any:
        """Return the view of a tile, or the gradient of a tile for that of its view."""
        move = frame.forward if direction == "forward" else frame.backward
        if not self.observers:
            return move(array, ctx.phase)
        with self.observers.during("halo", self.name, direction):
            return move(array, ctx.phase)

    def _reduced(self, direction: str, ctx: StepContext, array: Any) -> Any:
        """Return what all ranks' partial results come to; None: the layer reduces nothing in this pass."""
        how = self.reductions.get(direction)
        if how is None:
            return None
        mine = self.partial_result(direction, ctx, array)
        if mine is None or how.group is None:
            return mine
        self.array.reductions.direction = direction
        with self.observers.during("reduce", self.name, direction):
            return combine(self.array.reductions, how, mine)
