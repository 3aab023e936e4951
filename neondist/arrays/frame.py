"""The buffers of one view for one batch size; made once, used at every step."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..backends import Backend
from ..comm import Transport
from ..geometry import Box, HaloPlan, Piece
from ..observer import Observers
from .border import Border
from .padding import fold_back, fold_in
from .phase import Phase
from .way import Fetch, Home

Rooms = tuple[Any, Any]
"""Where a view and its gradient live: `.array(shape)` is their memory; None: in memory of their own."""


class Frame:
    """One array around everything that a tile owns and needs, and the two ways over its border."""

    def __init__(
        self,
        plan: HaloPlan,
        samples: int,
        channels: int,
        dtype: np.dtype,
        backend: Backend,
        tiles: Transport,
        border: Border,
        observers: Observers,
        rooms: Rooms = (None, None),
    ) -> None:
        self.plan, self.samples, self.channels, self.border = plan, samples, channels, border
        self.observers = observers
        self.shape = samples, *plan.buffer.shape, channels
        self.dtype, self.backend, self.tiles = dtype, backend, tiles
        self.buffer, self._gradients_room = self._new(rooms[0]), rooms[1]
        self.phase = Phase()
        self.gradient: Any = None
        self.dview: Any = None  # made at the first bprop: evaluation needs none
        self.own, self.need = self.index(plan.own), self.index(plan.need)
        self.tile, self.view = self.buffer[self.own], self.buffer[self.need]
        self.outside = [self.buffer[self.index(box)] for box in plan.outside]
        self.fill_outside()
        self.shared = rooms[0] is not None
        # own cells are in place already; what wraps around is needed a second time
        self.again = [piece for piece in plan.local if piece.target != piece.source]
        self.fetch = Fetch(self, plan.sends, plan.receives, forward=not border.reverse)
        self.home = Home(self, plan.receives, plan.sends, forward=border.reverse)

    def forward(self, tile: Any, phase: Phase) -> Any:
        """Place the tile, fetch the halo, fold the padding; return the view."""
        self.phase = phase
        if tile is not self.tile:
            self.backend.kernels.copy(tile, self.tile)
        if self.shared:  # others may have used the memory
            self.fill_outside()
        self.border.carry(self.fetch)
        for piece in self.again:
            self.buffer[self.index(piece.target)] = self.buffer[self.index(piece.source)]
        fold_in(self.buffer, self.plan)
        return self.view

    def backward(self, dview: Any, phase: Phase) -> Any:
        """Unfold the padding, send the halo's gradient home, add what comes; return the tile's gradient."""
        self.phase = phase
        if dview is not self.dview:
            self.backend.kernels.copy(dview, self.dview_place())
        gradient = self.gradient
        fold_back(gradient, self.plan)
        self.border.carry(self.home)
        for piece in self.again:
            gradient[self.index(piece.source)] += gradient[self.index(piece.target)]
        return self.dtile

    def index(self, box: Box) -> tuple[slice, ...]:
        """Return where a box of the image lies in the buffer."""
        spatial = box.relative_to(self.plan.buffer).slices
        return (slice(0, self.samples), *spatial, slice(0, self.channels))

    def strip_shape(self, piece: Piece) -> tuple[int, ...]:
        """Return the shape of a piece's cells."""
        return (self.samples, *piece.source.shape, self.channels)

    def fill_outside(self) -> None:
        """Put the window's constant into the cells outside the image."""
        for cells in self.outside:
            cells.fill(self.plan.window.fill)

    def _new(self, room: Any) -> Any:
        return room.array(self.shape) if room else self.backend.xp.empty(self.shape, self.dtype)

    def dview_place(self) -> Any:
        """Return the part of the gradient's buffer that is the view's; zero around it."""
        if self.gradient is None:
            self.gradient = self._new(self._gradients_room)
            self.dview, self.dtile = self.gradient[self.need], self.gradient[self.own]
        if self.plan.need != self.plan.buffer:
            self.gradient[...] = 0
        return self.dview
