"""Dense parameters of a server: flat arrays of the values and of each slot, by dtype."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..optim import FlatLayout
from ..system.memory import require_memory
from .message import Message, MessageError
from .placement import ServerLayout
from .updates import Slots, Updater

DENSE_PREFIX = "dense/"
"""Prefix of an array's name in messages; its dtype follows."""


class DenseParameters:
    """Values and slots of the pieces of one server.

    Parameters
    ----------
    layout : ServerLayout
    updater : Updater

    Attributes
    ----------
    values : dict of str to ndarray, 1-D
        Concatenated pieces of each dtype.
    slots : dict of str to Slots
    """

    def __init__(self, layout: ServerLayout, updater: Updater) -> None:
        self.layout, self._updater = layout, updater
        needed = sum(layout.flat_size(dtype) * np.dtype(dtype).itemsize for dtype in layout.dtypes)
        require_memory(needed, "the parameters of a server", "start more servers")
        self.values = {dtype: np.zeros(layout.flat_size(dtype), dtype) for dtype in layout.dtypes}
        self.slots: dict[str, Slots] = {dtype: {} for dtype in layout.dtypes}
        self._flat_layouts = {dtype: _flat_layout(layout, dtype) for dtype in layout.dtypes}
        if self.values:
            updater.require_independent_updates(all(piece.is_whole_parameter for piece in layout.pieces))

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return sum(array.nbytes for array in self.values.values())

    def read_dense_arrays(self, message: Message) -> dict[str, np.ndarray]:
        """Return the flat arrays in a message; MessageError if they do not match the layout."""
        sent = {name[len(DENSE_PREFIX) :] for name in message.arrays if name.startswith(DENSE_PREFIX)}
        if sent != self.values.keys():
            expected = ", ".join(self.values) or "none"
            raise MessageError(f"dense arrays: expected {expected}, got {', '.join(sorted(sent)) or 'none'}")
        return {dtype: message.array(DENSE_PREFIX + dtype, dtype, [array.size]) for dtype, array in self.values.items()}

    def set_values(self, values: Mapping[str, np.ndarray]) -> None:
        """Copy values into the flat arrays."""
        for dtype, array in values.items():
            self.values[dtype][...] = array

    def message_arrays(self) -> dict[str, np.ndarray]:
        """Return the values by their array names in messages."""
        return {DENSE_PREFIX + dtype: array for dtype, array in self.values.items()}

    def update(self, grads: Mapping[str, np.ndarray], step: int, scale: float) -> None:
        """Apply gradients; their arrays are overwritten."""
        for dtype, array in self.values.items():
            self._updater.update(array, grads[dtype], self.slots[dtype], step, scale, self._flat_layouts[dtype])


def _flat_layout(layout: ServerLayout, dtype: str) -> FlatLayout:
    spans = tuple(layout.piece_ranges(dtype))
    return FlatLayout(spans, tuple(piece.has_weight_decay for piece in layout.pieces_of_dtype(dtype)), len(spans))
