"""A layer's task under guard: the layer sees nothing but its view, writes nothing but its outputs, or is named."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...comm import DebugTransport
from ...errors import HaloError
from ...halo import GlobalArray
from ...layers import Layer, StepContext
from .. import Executor, LayerTask
from .mark import mark, marked, unfilled
from .shadow import Shadow


def guarded(executor: Executor, layers: Sequence[Layer], seed: int) -> Executor:
    """Return an executor of the same layers, which guards them; collective.

    Parameters
    ----------
    seed : int
        Of the delays of messages.
    """
    tiles = DebugTransport(executor.context.grid.tile_comm, seed)
    for array in {id(array): array for layer in layers for array in layer.arrays}.values():
        array.grid = copy.copy(array.grid)
        array.grid.tile_comm = tiles
        array.renew_buffers()
    return executor.with_tasks(GuardedTask)


class GuardedContext(StepContext):
    """The ctx of a guarded call; `view` and `dy` are the layer's copies."""

    shadow: Shadow | None = None
    others: tuple[Shadow, ...] = ()

    @property
    def out(self) -> Any:
        """The array where the result is wanted, full of marks."""
        out = super().out
        mark(out)
        return out

    def _halo(self, direction: str, array: GlobalArray, given: Any) -> Any:
        if not hasattr(array, "policy"):  # the view holds the neighbours already
            return super()._halo(direction, array, given)
        gathers = (direction == "forward") != array.reverse
        buffer = None if array.plan.trivial or not gathers else array.buffer(len(given))
        found = self.exchanged(direction, array, gathers, buffer, super()._halo, direction, array, given)
        if not gathers:
            return found
        shadow = Shadow(found)
        self.others = *self.others, shadow
        return shadow.array

    def exchanged(
        self, direction: str, array: GlobalArray, gathers: bool, buffer: Any, move: Callable[..., Any], *given: Any
    ) -> Any:
        """Return what an exchange of an array returns: a view, all of it filled, or the gradient of a tile.

        Parameters
        ----------
        gathers : bool
            Whether cells come in; otherwise the last of `given` is the gradient of a view, which must be all written.
        buffer : HaloBuffer or None
            Whose cells have to be filled.
        """
        if not gathers:
            what = "values of its view's gradient were never written, or computed from cells outside its view"
            self._check_cells(direction, array, marked(given[-1]), what)
            return self.named(direction, move, *given)
        if buffer is not None:
            mark_buffer(buffer)
        view = self.named(direction, move, *given)
        remedy = f"; scheme {type(array.policy).__name__} must fill every cell of other tiles"
        self._check_cells(direction, array, unfilled(view, array.plan), "values of its view were never filled", remedy)
        return view

    def _check_cells(self, direction: str, array: GlobalArray, missing: Any, what: str, remedy: str = "") -> None:
        """Raise HaloError if cells of a view, or of the gradient of one, are missing."""
        if missing.any():
            first = np.argwhere(missing)[0][1:-1]
            cell = tuple(int(lo + at) for lo, at in zip(array.need.lo, first, strict=True))
            raise self.problem(direction, f"{missing.sum()} {what}, the first for cell {cell}{remedy}")

    def named(self, direction: str, call: Callable[..., Any], *arguments: Any) -> Any:
        """Return what a call returns; a HaloError gets the layer's name."""
        try:
            return call(*arguments)
        except HaloError as error:
            if getattr(error, "subject", None) is not None:
                raise
            raise self.problem(direction, str(error)) from None

    def problem(self, direction: str, what: str) -> HaloError:
        """Return the error that names the layer, the direction and the step."""
        layer = self._layer
        error = HaloError(f"layer '{layer.name}' ({type(layer).__name__}), {direction}, step {self.step}: {what}")
        error.subject = layer
        return error

    def check_views(self, direction: str, what: str) -> None:
        """Raise HaloError if the layer has written into what it was given to look at."""
        if any(shadow.changed for shadow in (self.shadow, *self.others) if shadow is not None):
            raise self.problem(direction, what)

    def check_marks(self, direction: str, what: str, array: Any) -> None:
        """Raise HaloError if an array holds marks."""
        found = marked(array)
        if found.any():
            raise self.problem(
                direction,
                f"{found.sum()} of its {what} were computed from cells outside its view, or never written, the"
                f" first at index {tuple(map(int, np.argwhere(found)[0]))}; its window may be too small",
            )


class GuardedTask(LayerTask):
    """A layer's task that gives copies among marks, and compares."""

    context_class = GuardedContext

    def compute(self, ctx: Any, view: Any) -> Any:
        """Call forward with a copy of the view."""
        y = self.layer.forward(ctx, self._shadow(ctx, view))
        ctx.check_views("forward", "modified its view in place; work on a copy")
        ctx.check_marks("forward", "outputs", y)
        return y

    def partial_result(self, direction: str, ctx: Any, array: Any) -> Any:
        """Call reduce with the copy of the view that forward gets."""
        return super().partial_result(direction, ctx, self._shadow(ctx, array) if direction == "forward" else array)

    def compute_back(self, ctx: Any, dy: Any) -> Any:
        """Call backward with a copy of dy."""
        ctx.check_views("backward", "found that its view was modified since its forward; work on a copy")
        given = Shadow(dy)
        dview = self.layer.backward(ctx, given.array)
        if given.changed:
            raise ctx.problem("backward", "modified the gradient of its outputs in place; work on a copy")
        ctx.check_views("backward", "modified its view in place; work on a copy")
        for name, gradient in self.layer.grads.items():
            ctx.check_marks("backward", f"gradients of '{name}'", gradient)
        if dview is not None:
            ctx.check_marks("backward", "gradients of its view", dview)
        return dview

    def halo(self, direction: str, ctx: Any, buffer: Any, array: Any) -> Any:
        """Make a view, which must be all filled, or a tile's gradient from that of a view, which must be whole."""
        given = direction, ctx, buffer, array
        return ctx.exchanged(direction, self.array, direction == "forward", buffer, super().halo, *given)

    @staticmethod
    def _shadow(ctx: Any, view: Any) -> Any:
        if ctx.shadow is None:
            ctx.shadow = Shadow(view)
        return ctx.shadow.array


def mark_buffer(buffer: Any) -> None:
    """Mark all cells but the own ones, which may lie there already, and constant padding.

    The others have to be filled, or no output looks at them.
    """
    tile = buffer.tile.copy()
    mark(buffer.cells)
    buffer.outside = [buffer.cells[buffer.index(box)] for box in buffer.plan.outside]  # no gaps, from now on
    buffer.fill_outside()  # once for all
    buffer.tile[...] = tile
