"""Guarded layer task: checks that a layer reads only its view and writes only its outputs."""

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


def guard_executor(executor: Executor, layers: Sequence[Layer], seed: int) -> Executor:
    """Return an executor that guards the same layers; collective.

    Parameters
    ----------
    seed : int
        Seed of the delays of messages.
    """
    tiles = DebugTransport(executor.context.grid.tile_comm, seed)
    for array in {id(array): array for layer in layers for array in layer.arrays}.values():
        array.grid = copy.copy(array.grid)
        array.grid.tile_comm = tiles
        array.renew_buffers()
    return executor.with_tasks(GuardedTask)


class GuardedContext(StepContext):
    """Context of a guarded call; `view` and `dy` are copies."""

    shadow: Shadow | None = None
    others: tuple[Shadow, ...] = ()

    @property
    def out(self) -> Any:
        """Array for the result, filled with marks."""
        out = super().out
        mark(out)
        return out

    def _halo(self, direction: str, array: GlobalArray, values: Any) -> Any:
        if not hasattr(array, "policy"):  # the view includes the halo already
            return super()._halo(direction, array, values)
        gathers = (direction == "forward") != array.reverse
        buffer = None if array.plan.trivial or not gathers else array.buffer(len(values))
        result = self.checked_exchange(direction, array, gathers, buffer, super()._halo, direction, array, values)
        if not gathers:
            return result
        shadow = Shadow(result)
        self.others = *self.others, shadow
        return shadow.array

    def checked_exchange(
        self, direction: str, array: GlobalArray, gathers: bool, buffer: Any, move: Callable[..., Any], *arguments: Any
    ) -> Any:
        """Return the result of an array's exchange: a completely filled view, or the gradient of a tile.

        Parameters
        ----------
        gathers : bool
            Whether cells are gathered; else the last argument is the gradient of a view, which must be complete.
        buffer : HaloBuffer or None
            Buffer whose cells must be filled.
        """
        if not gathers:
            fault = "values of its view's gradient were never written, or computed from cells outside its view"
            self._check_cells(direction, array, marked(arguments[-1]), fault)
            return self.call_named(direction, move, *arguments)
        if buffer is not None:
            mark_buffer(buffer)
        view = self.call_named(direction, move, *arguments)
        remedy = f"; scheme {type(array.policy).__name__} must fill every cell of other tiles"
        self._check_cells(direction, array, unfilled(view, array.plan), "values of its view were never filled", remedy)
        return view

    def _check_cells(self, direction: str, array: GlobalArray, missing: Any, fault: str, remedy: str = "") -> None:
        """Raise HaloError if cells of a view, or of its gradient, are missing."""
        if missing.any():
            first = np.argwhere(missing)[0][1:-1]
            cell = tuple(int(lo + at) for lo, at in zip(array.need.lo, first, strict=True))
            raise self.problem(direction, f"{missing.sum()} {fault}, the first for cell {cell}{remedy}")

    def call_named(self, direction: str, call: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of a call, adding the layer's name to a HaloError."""
        try:
            return call(*arguments)
        except HaloError as error:
            if getattr(error, "subject", None) is not None:
                raise
            raise self.problem(direction, str(error)) from None

    def problem(self, direction: str, fault: str) -> HaloError:
        """Return an error that names the layer, the direction and the step."""
        layer = self._layer
        error = HaloError(f"layer '{layer.name}' ({type(layer).__name__}), {direction}, step {self.step}: {fault}")
        error.subject = layer
        return error

    def check_views(self, direction: str, fault: str) -> None:
        """Raise HaloError if the layer has modified its read-only arrays."""
        if any(shadow.changed for shadow in (self.shadow, *self.others) if shadow is not None):
            raise self.problem(direction, fault)

    def check_marks(self, direction: str, quantity: str, array: Any) -> None:
        """Raise HaloError if an array contains marks."""
        marks = marked(array)
        if marks.any():
            raise self.problem(
                direction,
                f"{marks.sum()} of its {quantity} were computed from cells outside its view, or never written, the"
                f" first at index {tuple(map(int, np.argwhere(marks)[0]))}; its window may be too small",
            )


class GuardedTask(LayerTask):
    """Layer task that passes copies surrounded by marks, and checks them afterwards."""

    context_class = GuardedContext

    def compute(self, ctx: Any, view: Any) -> Any:
        """Call forward with a copy of the view."""
        y = self.layer.forward(ctx, self._shadow(ctx, view))
        ctx.check_views("forward", "modified its view in place; work on a copy")
        ctx.check_marks("forward", "outputs", y)
        return y

    def partial_result(self, direction: str, ctx: Any, array: Any) -> Any:
        """Call reduce with the same copy of the view as forward."""
        return super().partial_result(direction, ctx, self._shadow(ctx, array) if direction == "forward" else array)

    def compute_backward(self, ctx: Any, dy: Any) -> Any:
        """Call backward with a copy of dy."""
        ctx.check_views("backward", "found that its view was modified since its forward; work on a copy")
        shadow = Shadow(dy)
        dview = self.layer.backward(ctx, shadow.array)
        if shadow.changed:
            raise ctx.problem("backward", "modified the gradient of its outputs in place; work on a copy")
        ctx.check_views("backward", "modified its view in place; work on a copy")
        for name, gradient in self.layer.grads.items():
            ctx.check_marks("backward", f"gradients of '{name}'", gradient)
        if dview is not None:
            ctx.check_marks("backward", "gradients of its view", dview)
        return dview

    def halo(self, direction: str, ctx: Any, buffer: Any, array: Any) -> Any:
        """Return a view, which must be completely filled, or a tile's gradient from a complete gradient of its view."""
        arguments = direction, ctx, buffer, array
        return ctx.checked_exchange(direction, self.array, direction == "forward", buffer, super().halo, *arguments)

    @staticmethod
    def _shadow(ctx: Any, view: Any) -> Any:
        if ctx.shadow is None:
            ctx.shadow = Shadow(view)
        return ctx.shadow.array


def mark_buffer(buffer: Any) -> None:
    """Mark all cells except own ones, which may be in place already, and constant padding.

    Marked cells must be filled, unless no output depends on them.
    """
    tile = buffer.tile.copy()
    mark(buffer.cells)
    buffer.outside = [buffer.cells[buffer.index(box)] for box in buffer.plan.outside]  # without gaps, from now on
    buffer.fill_outside()  # once
    buffer.tile[...] = tile
