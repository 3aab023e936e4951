"""Memory of one view for one batch size, allocated once and used in every step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np

from ..backends import Backend
from ..comm import Exchange, Message, ProcessGrid
from ..geometry import Box, HaloPlan, Lattice
from .exchange import DEFAULT_PHASE, HaloExchange, Phase
from .padding import add_padding_gradient, fill_padding
from .policies.base import ExchangePolicy

Allocator = Callable[[Sequence[int]], Any]
Slots = tuple[Allocator | None, Allocator | None]
"""Functions from a shape to the memory of the view and of its gradient; None: separate memory."""


class BufferOwner(Protocol):
    """Interface that a buffer requires of its array."""

    grid: ProcessGrid
    backend: Backend
    dtype: np.dtype
    channels: int
    plan: HaloPlan
    policy: ExchangePolicy
    swaps_directions: bool
    memory: dict[tuple[int, str], dict[str, Any]]
    recorded_exchanges: list[tuple[str, Exchange]]


class HaloBuffer:
    """Array of the cells that a tile owns and needs, and the exchanges of its halo.

    Attributes
    ----------
    cells, gradient : arrays (n, *buffer, C)
    tile, view : parts of `cells` that the tile owns and that its window needs
    dtile, dview : the same parts of `gradient`
    gather, scatter_add : HaloExchange
        Gathering of halo cells from their owners, and its adjoint.
    """

    def __init__(self, owner: BufferOwner, samples: int, slots: Slots = (None, None)) -> None:
        self.owner, self.samples, self.plan, self.kernels = owner, samples, owner.plan, owner.backend.kernels
        plan = self.plan
        self.cells, self._gradient_slot = self._new_cells(slots[0]), slots[1]
        self.phase = DEFAULT_PHASE
        self.gradient: Any = None
        self.dview: Any = None  # allocated at the first bprop
        self.owned_index, self.needed_index = self.index(plan.own), self.index(plan.need)
        self.tile, self.view = self.cells[self.owned_index], self.cells[self.needed_index]
        self.prefilled = [self.cells[self.index(box)] for box in plan.prefilled]
        self.fill_prefilled_cells()
        self.may_be_overwritten = slots[0] is not None
        # own cells are already in place, except copies of cells that wrap around
        self.wrapped_cells = [
            (self.index(piece.target), self.index(piece.source)) for piece in plan.local if piece.target != piece.source
        ]
        forward, backward = ("backward", "forward") if owner.swaps_directions else ("forward", "backward")
        self.gather, self.scatter_add = (
            HaloExchange(self, direction, adds, owner.memory.setdefault((samples, direction), {}))
            for direction, adds in ((forward, False), (backward, True))
        )

    def forward(self, tile: Any, phase: Phase) -> Any:
        """Copy the tile, gather the halo and fill the padding; return the view."""
        self.phase = phase
        if tile is not self.tile:
            self.kernels.copy(tile, self.tile)
        if self.may_be_overwritten:  # the memory may have been overwritten
            self.fill_prefilled_cells()
        self._exchange(self.gather, self._saved_border, self._restore_border)
        for target, source in self.wrapped_cells:
            self.cells[target] = self.cells[source]
        fill_padding(self.cells, self.plan)
        return self.view

    def backward(self, dview: Any, phase: Phase) -> Any:
        """Add gradients of padding to its sources, and of halo cells to their owners; return the tile's gradient."""
        self.phase = phase
        if dview is not self.dview:
            self.kernels.copy(dview, self.zero_and_return_dview())
        add_padding_gradient(self.gradient, self.plan)
        self._exchange(self.scatter_add, self.dtile.copy, partial(self.gradient.__setitem__, self.owned_index))
        for target, source in self.wrapped_cells:
            self.gradient[source] += self.gradient[target]
        return self.dtile

    def index(self, cells: Box | Lattice) -> tuple[slice, ...]:
        """Return the index, in the buffer, of cells given in image coordinates."""
        spatial = cells.relative_to(self.plan.buffer).slices
        return (slice(0, self.samples), *spatial, slice(0, self.owner.channels))

    def fill_prefilled_cells(self) -> None:
        """Set cells outside the image, and halo cells if some of them are unused, to the window's fill value."""
        for cells in self.prefilled:
            cells.fill(self.plan.window.fill)

    def save_border(self, border_out: Any) -> None:
        """Copy the cells around the tile to an array (n, elements)."""
        for index, part in self._border(border_out):
            part[...] = self.cells[index]

    def recompute_view(self, slot: Allocator, saved_border: Any, write_tile: Callable[[Any], None]) -> Any:
        """Rebuild the view in other memory from `saved_border`; `write_tile` writes the tile into its argument."""
        cells = self._new_cells(slot)
        self._restore_border(saved_border, cells)
        write_tile(cells[self.owned_index])
        return cells[self.needed_index]

    def _saved_border(self) -> Any:
        boxes = self.plan.buffer.difference(self.plan.own)
        elements = sum(box.size for box in boxes) * self.owner.channels
        saved = self.owner.backend.xp.empty((self.samples, elements), self.owner.dtype)
        self.save_border(saved)
        return saved

    def _restore_border(self, saved_border: Any, cells: Any = None) -> None:
        cells = self.cells if cells is None else cells
        for index, part in self._border(saved_border):
            cells[index] = part

    def _border(self, saved: Any) -> Iterator[tuple[tuple[slice, ...], Any]]:
        """Yield the index of each box around the tile, and its part of `saved`."""
        start = 0
        for box in self.plan.buffer.difference(self.plan.own):
            elements = box.size * self.owner.channels
            yield self.index(box), saved[:, start : start + elements].reshape(-1, *box.shape, self.owner.channels)
            start += elements

    def zero_and_return_dview(self) -> Any:
        """Return the view's part of the gradient; the rest of the gradient is set to zero."""
        if self.gradient is None:
            self.gradient = self._new_cells(self._gradient_slot)
            self.dview, self.dtile = self.gradient[self.needed_index], self.gradient[self.owned_index]
        if self.plan.need != self.plan.buffer:
            self.gradient[...] = 0
        return self.dview

    def create_exchange(self, halo: HaloExchange, sends: list[Message], receives: list[Message]) -> Exchange:
        """Return a new exchange of messages, and record it."""
        owner, num_elements = self.owner, [self.cells[cells].size for _, cells in halo.sends]
        owner.policy.check_message_sizes(num_elements, [m.nbytes for m in sends], owner.dtype.itemsize, halo.direction)
        exchange = owner.grid.tile_comm.create_exchange(sends, receives)
        exchange.observers = owner.grid.observers
        owner.recorded_exchanges.append((halo.direction, exchange))
        return exchange

    def _exchange(self, halo: HaloExchange, save: Callable[[], Any], restore: Callable[[Any], None]) -> None:
        """Exchange by the policy; the cells received under a stateful policy are reused if the pass is repeated."""
        record = self.phase.record if self.owner.policy.is_stateful else None
        if record is None:
            self._run_policy(halo)
        else:
            record.exchange_once((id(self.owner), halo.adds), partial(self._run_policy, halo), save, restore)

    def _run_policy(self, halo: HaloExchange) -> None:
        policy, direction = self.owner.policy, halo.direction
        run_exchange = policy.forward if direction == "forward" else policy.backward
        if not (halo.sends or halo.receives):
            run_exchange(halo)
            return
        num_started_before = self._count_started_exchanges(direction)
        run_exchange(halo)
        policy.check_exchange_count(self._count_started_exchanges(direction) - num_started_before, direction)

    def _count_started_exchanges(self, direction: str) -> int:
        """Return the number of started exchanges of the array, over all its buffers."""
        return sum(exchange.run_count for pass_, exchange in self.owner.recorded_exchanges if pass_ == direction)

    def _new_cells(self, slot: Allocator | None) -> Any:
        shape = self.samples, *self.plan.buffer.shape, self.owner.channels
        return slot(shape) if slot else self.owner.backend.xp.empty(shape, self.owner.dtype)
