"""The buffers and messages of one view for one batch size; made once, used at every step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from ..backends import Backend
from ..comm import Message, Transport
from ..geometry import Box, HaloPlan, Piece
from .padding import fold_back, fold_in


class Frame:
    """One array around everything that a tile owns and needs, and the exchanges that fill it and send it home."""

    def __init__(
        self, plan: HaloPlan, samples: int, channels: int, dtype: np.dtype, backend: Backend, tiles: Transport
    ) -> None:
        self.plan, self.samples, self.channels = plan, samples, channels
        self.buffer = backend.full((samples, *plan.buffer.shape, channels), plan.window.fill, dtype)
        self.gradient: Any = None  # made at the first bprop: evaluation needs none
        self.shape, self.dtype, self.backend, self.tiles = self.buffer.shape, dtype, backend, tiles
        self.own, self.need = self._index(plan.own), self._index(plan.need)
        # own cells are in place already; what wraps around is needed a second time
        self.again = [piece for piece in plan.local if piece.target != piece.source]
        self.halo = tiles.exchange(
            [Message(p.peer, self.buffer, self._index(p.source)) for p in plan.sends],
            [Message(p.peer, self.buffer, self._index(p.target)) for p in plan.receives],
        )
        self.going = self._strips(plan.receives)
        self.coming = self._strips(plan.sends)
        self.halo_home = tiles.exchange(
            [Message(p.peer, strip, _all(strip)) for p, strip in self.going],
            [Message(p.peer, strip, _all(strip)) for p, strip in self.coming],
        )

    def forward(self, tile: Any) -> Any:
        """Place the tile, fetch the halo, fold the padding; return the view."""
        own = self.buffer[self.own]
        if own.ctypes.data != tile.ctypes.data:
            own[...] = tile
        self.halo.run()
        for piece in self.again:
            self.buffer[self._index(piece.target)] = self.buffer[self._index(piece.source)]
        fold_in(self.buffer, self.plan)
        return self.buffer[self.need]

    def backward(self, dview: Any) -> Any:
        """Unfold the padding, send the halo's gradient home, add what comes; return the tile's gradient."""
        gradient = self._spread(dview)
        fold_back(gradient, self.plan)
        for piece, strip in self.going:
            strip[...] = gradient[self._index(piece.target)]
        self.halo_home.run()
        for piece in self.again:
            gradient[self._index(piece.source)] += gradient[self._index(piece.target)]
        for piece, strip in self.coming:
            gradient[self._index(piece.source)] += strip
        return gradient[self.own]

    def _spread(self, dview: Any) -> Any:
        if self.gradient is None:
            self.gradient = self.backend.zeros(self.shape, self.dtype)
        if self.plan.need != self.plan.buffer:
            self.gradient[...] = 0
        self.gradient[self.need] = dview
        return self.gradient

    def _index(self, box: Box) -> tuple[slice, ...]:
        spatial = box.relative_to(self.plan.buffer).slices
        return (slice(0, self.samples), *spatial, slice(0, self.channels))

    def _strips(self, pieces: Iterable[Piece]) -> list[tuple[Piece, Any]]:
        shape = [(self.samples, *piece.source.shape, self.channels) for piece in pieces]
        return [(p, self.backend.zeros(s, self.dtype)) for p, s in zip(pieces, shape, strict=True)]


def _all(array: Any) -> tuple[slice, ...]:
    return tuple(slice(0, n) for n in array.shape)
