"""The memory of one view for one batch size; made once, used at every step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..geometry import Box
from .exchange import WHOLE, HaloExchange, Phase
from .padding import fold_back, fold_in

if TYPE_CHECKING:
    from .global_array import GlobalArray

Slots = tuple[Any, Any]
"""Where a view and its gradient live: `.array(shape)` is their memory; None: in memory of their own."""


class HaloBuffer:
    """One array around everything that a tile owns and needs, and the exchanges of its halo.

    Attributes
    ----------
    cells, gradient : arrays (n, *buffer, C)
    tile, view : the parts of `cells` that the tile owns, and that its window needs
    dtile, dview : those of `gradient`
    gather, scatter_add : HaloExchange
        Cells come from their owners; the adjoint.
    """

    def __init__(self, owner: GlobalArray, samples: int, slots: Slots = (None, None)) -> None:
        self.owner, self.samples, self.plan = owner, samples, owner.plan
        plan = self.plan
        self.cells, self._gradient_slot = self._new(slots[0]), slots[1]
        self.phase = WHOLE
        self.gradient: Any = None
        self.dview: Any = None  # made at the first bprop: evaluation needs none
        self.own, self.need = self.index(plan.own), self.index(plan.need)
        self.tile, self.view = self.cells[self.own], self.cells[self.need]
        self.outside = [self.cells[self.index(box)] for box in plan.outside]
        self.fill_outside()
        self.shared = slots[0] is not None
        # own cells are in place already; what wraps around is needed a second time
        self.again = [
            (self.index(piece.target), self.index(piece.source)) for piece in plan.local if piece.target != piece.source
        ]
        forward, backward = ("backward", "forward") if owner.reverse else ("forward", "backward")
        self.gather, self.scatter_add = HaloExchange(self, forward, False), HaloExchange(self, backward, True)

    def forward(self, tile: Any, phase: Phase) -> Any:
        """Copy the tile, gather the halo, fold the padding; return the view."""
        self.phase = phase
        if tile is not self.tile:
            self.owner.backend.kernels.copy(tile, self.tile)
        if self.shared:  # others may have used the memory
            self.fill_outside()
        self._exchange(self.gather)
        for target, source in self.again:
            self.cells[target] = self.cells[source]
        fold_in(self.cells, self.plan)
        return self.view

    def backward(self, dview: Any, phase: Phase) -> Any:
        """Unfold the padding, send the halo's gradient to its owners, add what comes; return the tile's gradient."""
        self.phase = phase
        if dview is not self.dview:
            self.owner.backend.kernels.copy(dview, self.dview_place())
        fold_back(self.gradient, self.plan)
        self._exchange(self.scatter_add)
        for target, source in self.again:
            self.gradient[source] += self.gradient[target]
        return self.dtile

    def index(self, box: Box) -> tuple[slice, ...]:
        """Return where a box of the image lies in the buffer."""
        spatial = box.relative_to(self.plan.buffer).slices
        return (slice(0, self.samples), *spatial, slice(0, self.owner.channels))

    def fill_outside(self) -> None:
        """Put the window's constant into the cells outside the image."""
        for cells in self.outside:
            cells.fill(self.plan.window.fill)

    def dview_place(self) -> Any:
        """Return the part of the gradient that is the view's; zero around it."""
        if self.gradient is None:
            self.gradient = self._new(self._gradient_slot)
            self.dview, self.dtile = self.gradient[self.need], self.gradient[self.own]
        if self.plan.need != self.plan.buffer:
            self.gradient[...] = 0
        return self.dview

    def _exchange(self, halo: HaloExchange) -> None:
        policy = self.owner.policy
        alone = not (halo.sends or halo.receives)
        before = 0 if alone else halo.started
        (policy.forward if halo.direction == "forward" else policy.backward)(halo)
        if not alone:
            policy.check_exchanges(halo.started - before, halo.direction)

    def _new(self, slot: Any) -> Any:
        shape = self.samples, *self.plan.buffer.shape, self.owner.channels
        return slot.array(shape) if slot else self.owner.backend.xp.empty(shape, self.owner.dtype)
