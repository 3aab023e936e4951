"""Guarded layer task, which checks that a layer reads only its view and writes only its outputs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ...comm import DebugTransport
from ...errors import HaloError
from ...halo import GlobalArray
from ...layers import Layer, StepContext
from .. import Executor, LayerTask
from .guarded_copy import GuardedCopy
from .mark import fill_with_mark, mask_of_unfilled, mask_of_uninitialised


def guard_executor(executor: Executor, layers: Sequence[Layer], seed: int) -> Executor:
    """Return an executor that guards the same layers. Collective.

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
    return executor.with_layer_tasks(GuardedLayerTask)


class DebugHaloStepContext(StepContext):
    """Context of a guarded call; `view` and `dy` are copies."""

    view_copy: GuardedCopy | None = None
    other_copies: tuple[GuardedCopy, ...] = ()

    @property
    def out(self) -> Any:
        """Array for the result, filled with marks."""
        out = super().out
        fill_with_mark(out)
        return out

    def _exchange_halo(self, direction: str, array: GlobalArray, values: Any) -> Any:
        if not hasattr(array, "policy"):  # the view includes the halo already
            return super()._exchange_halo(direction, array, values)
        is_gather = (direction == "forward") != array.swaps_directions
        buffer = None if array.plan.trivial or not is_gather else array.buffer(len(values))
        result = self.checked_exchange(
            direction, array, is_gather, buffer, super()._exchange_halo, direction, array, values
        )
        if not is_gather:
            return result
        copied = GuardedCopy(result)
        self.other_copies = *self.other_copies, copied
        return copied.array

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
            remedy = "; backward must write every cell of its view's gradient"
            self._check_cells(direction, array, mask_of_uninitialised(arguments[-1]), fault, remedy)
            return self.call_and_name_layer(direction, move, *arguments)
        if buffer is not None:
            mark_unowned_cells(buffer)
        view = self.call_and_name_layer(direction, move, *arguments)
        remedy = f"; scheme {type(array.policy).__name__} must fill every cell of other tiles"
        self._check_cells(
            direction, array, mask_of_unfilled(view, array.plan), "values of its view were never filled", remedy
        )
        return view

    def _check_cells(self, direction: str, array: GlobalArray, missing_mask: Any, fault: str, remedy: str = "") -> None:
        if missing_mask.any():
            first_missing = np.argwhere(missing_mask)[0][1:-1]
            global_cell = tuple(int(lo + at) for lo, at in zip(array.need.lo, first_missing, strict=True))
            raise self.layer_error(direction, f"{missing_mask.sum()} {fault}, the first for cell {global_cell}{remedy}")

    def call_and_name_layer(self, direction: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of a call, adding the layer's name to a HaloError."""
        try:
            return function(*arguments)
        except HaloError as error:
            if getattr(error, "subject", None) is not None:
                raise
            raise self.layer_error(direction, str(error)) from None

    def layer_error(self, direction: str, fault: str) -> HaloError:
        """Return an error that names the layer, the direction and the step."""
        layer = self._layer
        error = HaloError(f"layer '{layer.name}' ({type(layer).__name__}), {direction}, step {self.step}: {fault}")
        error.subject = layer
        return error

    def check_views_unmodified(self, direction: str, fault: str) -> None:
        """Raise HaloError if the layer has modified its read-only arrays."""
        if any(copied.changed for copied in (self.view_copy, *self.other_copies) if copied is not None):
            raise self.layer_error(direction, fault)

    def check_no_marks(self, direction: str, quantity: str, array: Any) -> None:
        """Raise HaloError if an array contains marks."""
        marks = mask_of_uninitialised(array)
        if marks.any():
            raise self.layer_error(
                direction,
                f"{marks.sum()} elements of {quantity} were computed from cells outside its view, or never written, the"
                f" first at index {tuple(map(int, np.argwhere(marks)[0]))}; declare a larger window, or write every"
                " element",
            )


class GuardedLayerTask(LayerTask):
    """Layer task that passes copies surrounded by marks, and checks them afterwards."""

    context_class = DebugHaloStepContext

    def call_forward(self, ctx: Any, view: Any) -> Any:
        """Call forward with a copy of the view."""
        y = self.layer.forward(ctx, self._guarded_copy(ctx, view))
        ctx.check_views_unmodified("forward", "modified its view in place; work on a copy")
        ctx.check_no_marks("forward", "its outputs", y)
        return y

    def compute_partial_result(self, direction: str, ctx: Any, array: Any) -> Any:
        """Call reduce with the copy of the view that forward receives, or reduce_backward with a copy of dy."""
        if direction == "forward":
            return super().compute_partial_result(direction, ctx, self._guarded_copy(ctx, array))
        return self._with_copy_of_dy(ctx, array, partial(super().compute_partial_result, direction, ctx))

    def combine_partials(self, direction: str, partials: list[Any], counts: Sequence[int]) -> list[Any]:
        """Compare the partial results with those of other ranks, and combine them."""
        grid, group = self.input_array.grid, self.reductions[direction].group
        if group is not None:
            partial_types = ["None" if p is None else f"an array of {getattr(p, 'dtype', type(p))}" for p in partials]
            (first_rank, expected), *others = grid.group(group).allgather((grid.rank, partial_types))
            for rank, actual in others:
                if actual != expected:
                    at = next(i for i, pair in enumerate(zip(actual, expected, strict=True)) if pair[0] != pair[1])
                    method = "reduce" if direction == "forward" else "reduce_backward"
                    error = HaloError(
                        f"layer '{self.name}' ({type(self.layer).__name__}), {direction}: {method} returns {actual[at]}"
                        f" on rank {rank}, but {expected[at]} on rank {first_rank}; return the same on all ranks"
                    )
                    error.subject = self.layer
                    raise error
        return super().combine_partials(direction, partials, counts)

    def call_backward(self, ctx: Any, dy: Any) -> Any:
        """Call backward with a copy of dy."""
        ctx.check_views_unmodified("backward", "its view was modified after its forward pass; work on a copy")
        dview = self._with_copy_of_dy(ctx, dy, partial(self.layer.backward, ctx))
        ctx.check_views_unmodified("backward", "modified its view in place; work on a copy")
        for name, gradient in self.layer.grads.items():
            ctx.check_no_marks("backward", f"its gradients of '{name}'", gradient)
        if dview is not None:
            ctx.check_no_marks("backward", "the gradient of its view", dview)
        return dview

    def _with_copy_of_dy(self, ctx: Any, dy: Any, function: Callable[[Any], Any]) -> Any:
        """Return the result of a function of a copy of dy, which must not modify it."""
        copied = GuardedCopy(dy)
        result = function(copied.array)
        if copied.changed:
            raise ctx.layer_error("backward", "modified the gradient of its outputs in place; work on a copy")
        return result

    def exchange_halo(self, direction: str, ctx: Any, buffer: Any, array: Any) -> Any:
        """Return a view, which must be completely filled, or a tile's gradient from a complete gradient of its view."""
        exchange_call = super().exchange_halo, direction, ctx, buffer, array
        return ctx.checked_exchange(direction, self.input_array, direction == "forward", buffer, *exchange_call)

    @staticmethod
    def _guarded_copy(ctx: Any, view: Any) -> Any:
        if ctx.view_copy is None:
            ctx.view_copy = GuardedCopy(view)
        return ctx.view_copy.array


def mark_unowned_cells(buffer: Any) -> None:
    """Mark all cells except own cells, which may already be in place, and constant padding.

    Marked cells must be filled unless no output depends on them.
    """
    tile = buffer.tile.copy()
    fill_with_mark(buffer.cells)
    buffer.prefilled = [buffer.cells[buffer.index(box)] for box in buffer.plan.outside]  # unused halo cells stay marked
    buffer.fill_prefilled_cells()
    buffer.tile[...] = tile
