"""Frames that look for mistakes of layers: slow, for `--debug-halo`."""

from __future__ import annotations

from typing import Any
from zlib import crc32

import numpy as np

from ..errors import HaloError
from .arena import Room
from .frame import Frame

MARGIN = 2
"""Cells of NaN around the buffer, on every side."""


class DebugFrame(Frame):
    """A frame whose view is NaN wherever nothing was put, inside and around it; the view must stay as it is.

    A layer that reads beyond its view gets NaN; one that writes into its view, which its neighbours and messages share,
    is found in bprop.
    """

    seal: int | None = None

    def new_buffer(self, room: Room | None) -> Any:
        """Return an array of its own, inside of one with a margin of NaN."""
        extent = self.plan.buffer.shape
        inside = (slice(None), *(slice(MARGIN, MARGIN + n) for n in extent), slice(None))
        whole = (self.samples, *(n + 2 * MARGIN for n in extent), self.channels)
        return self.backend.full(whole, np.nan, self.dtype)[inside]

    def forward(self, tile: Any) -> Any:
        """Fill the view from nothing but the tile."""
        tile = tile.copy()
        self.buffer[...] = np.nan
        self.tile[...] = tile
        view = super().forward(self.tile)
        self.seal = _checksum(view)
        return view

    def backward(self, dview: Any) -> Any:
        """Look whether the view is what `forward` returned, before the gradient goes home."""
        if not self.border.reverse and self.seal not in (None, _checksum(self.view)):
            raise HaloError(
                f"rank {self.tiles.rank} of {self.tiles.size}: a view of shape {self.view.shape} was written to between"
                " fprop and bprop; a layer must not change its view, so let it work on a copy"
            )
        return super().backward(dview)


def _checksum(array: Any) -> int:
    return crc32(np.ascontiguousarray(array).tobytes())
