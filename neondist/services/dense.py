"""The dense parameters of a server: one flat array of values, and of each slot, for each dtype."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..optim import FlatLayout
from ..system.memory import require_room
from .message import Message, MessageError
from .placement import ServerLayout
from .updates import Slots, Updater

PREFIX = "dense/"
"""Before the dtype, in the names of arrays in messages."""


class DenseParameters:
    """Values and slots of the pieces of one server.

    Parameters
    ----------
    layout : ServerLayout
    updater : Updater

    Attributes
    ----------
    values : dict of str to ndarray, 1-D
        By dtype, the pieces one after the other.
    slots : dict of str to Slots
    """

    def __init__(self, layout: ServerLayout, updater: Updater) -> None:
        self.layout, self._updater = layout, updater
        needed = sum(layout.size(dtype) * np.dtype(dtype).itemsize for dtype in layout.dtypes)
        require_room(needed, "the parameters of a server", "start more servers")
        self.values = {dtype: np.zeros(layout.size(dtype), dtype) for dtype in layout.dtypes}
        self.slots: dict[str, Slots] = {dtype: {} for dtype in layout.dtypes}
        self._flat = {dtype: _flat_layout(layout, dtype) for dtype in layout.dtypes}
        if self.values:
            updater.check_parts(all(piece.whole for piece in layout.pieces))

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return sum(array.nbytes for array in self.values.values())

    def read(self, message: Message) -> dict[str, np.ndarray]:
        """Return the flat arrays of a message; MessageError if they are not those of the layout."""
        sent = {name[len(PREFIX) :] for name in message.arrays if name.startswith(PREFIX)}
        if sent != self.values.keys():
            wanted = ", ".join(self.values) or "none"
            raise MessageError(f"dense arrays {', '.join(sorted(sent)) or 'none'}, but this server has {wanted}")
        return {dtype: message.array(PREFIX + dtype, dtype, [array.size]) for dtype, array in self.values.items()}

    def set_values(self, given: Mapping[str, np.ndarray]) -> None:
        """Copy values in."""
        for dtype, array in given.items():
            self.values[dtype][...] = array

    def snapshot(self) -> dict[str, np.ndarray]:
        """Return copies of the values as a message has them."""
        return {PREFIX + dtype: array.copy() for dtype, array in self.values.items()}

    def update(self, grads: Mapping[str, np.ndarray], step: int, scale: float) -> None:
        """Apply gradients, which are overwritten."""
        for dtype, array in self.values.items():
            self._updater.update(array, grads[dtype], self.slots[dtype], step, scale, self._flat[dtype])


def _flat_layout(layout: ServerLayout, dtype: str) -> FlatLayout:
    spans = tuple(layout.spans(dtype))
    return FlatLayout(spans, tuple(piece.decays for piece in layout.of_dtype(dtype)), len(spans))
