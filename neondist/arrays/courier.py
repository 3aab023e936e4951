"""Messages over the border that are copied first, so that they may change shape, or travel while the step goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..comm import Message

if TYPE_CHECKING:
    from .way import Way

Shape = tuple[int, ...]


class Courier:
    """One array for each message that leaves and for each that arrives, and the exchange between them.

    Parameters
    ----------
    way : Way
    shape : function of a message's shape (n, *cells, C)
        Shape of what travels for it; default: the same.
    dtype : dtype, optional
        Of what travels; default: that of the cells.
    """

    def __init__(self, way: Way, shape: Callable[[Shape], Shape] | None = None, dtype: Any = None) -> None:
        frame = way.frame
        shape, dtype = shape or (lambda cells: cells), np.dtype(dtype or frame.dtype)
        self.leaving, self.arriving = (
            [frame.backend.xp.zeros(shape(frame.strip_shape(piece)), dtype) for piece in pieces]
            for pieces in (way.sends, way.receives)
        )
        sends, receives = (
            [Message(piece.peer, array, _all(array)) for piece, array in zip(pieces, arrays, strict=True)]
            for pieces, arrays in ((way.sends, self.leaving), (way.receives, self.arriving))
        )
        self.exchange = way.booked(frame.tiles.exchange(sends, receives))

    def start(self, messages: Sequence[Any]) -> None:
        """Send copies of these arrays, one for each message; they travel until `finish`."""
        for array, message in zip(self.leaving, messages, strict=True):
            array[...] = message
        self.exchange.start()

    def finish(self) -> list[Any]:
        """Return what has arrived; valid until the next `start`."""
        self.exchange.finish()
        return self.arriving


def _all(array: Any) -> tuple[slice, ...]:
    return tuple(slice(0, n) for n in array.shape)
