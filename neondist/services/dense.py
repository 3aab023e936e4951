"""Dense parameters of a server: flat arrays of the values and of each slot, by dtype."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..optim import FlatLayout
from ..system.memory import require_memory
from .message import Message, MessageError
from .placement import ServerLayout, ServerPiece
from .updates import Slots, Updater

DENSE_PREFIX, SLOTS_PREFIX = "dense/", "slots/"
"""Prefixes of array names in messages, followed by the dtype, and for slots by the name of the slot."""
IDS_PREFIX, ROWS_PREFIX = "ids/", "rows/"
"""Prefixes of array names in messages, followed by the name of a sparse parameter or of a table."""


class DenseParameters:
    """Values and slots of the pieces of one server.

    Attributes
    ----------
    values : dict of str to ndarray, 1-D
        Concatenated pieces of each dtype.
    slots : dict of str to Slots
    """

    def __init__(self, layout: ServerLayout, updater: Updater) -> None:
        self.layout, self._updater = layout, updater
        needed_bytes = sum(layout.flat_size(dtype) * np.dtype(dtype).itemsize for dtype in layout.dtypes)
        require_memory(needed_bytes, "the parameters of a server", "start more servers")
        self.values = {dtype: np.zeros(layout.flat_size(dtype), dtype) for dtype in layout.dtypes}
        self.slots: dict[str, Slots] = {dtype: {} for dtype in layout.dtypes}
        self._flat_layouts = {dtype: _flat_layout(layout, dtype) for dtype in layout.dtypes}
        self._dense_sizes = {dtype: layout.dense_size(dtype) for dtype in layout.dtypes}
        self._sparse_pieces = {
            dtype: [(piece, cells) for piece, cells in layout.pieces_of_dtype(dtype) if piece.sends_rows]
            for dtype in layout.dtypes
        }
        self._row_versions = {
            piece.name: np.zeros(piece.row_shape[:1], np.int64) for piece in layout.pieces if piece.sends_rows
        }
        if self.values:
            updater.require_independent_updates(all(piece.is_whole_parameter for piece in layout.pieces))

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return sum(array.nbytes for array in self.values.values())

    @property
    def has_sparse_rows(self) -> bool:
        """Whether any piece is sent by rows."""
        return bool(self._row_versions)

    def read_dense_arrays(self, message: Message) -> dict[str, np.ndarray]:
        """Return the flat arrays in a message, 0 in rows not sent; MessageError if they do not match the layout."""
        sent_dtypes = {name[len(DENSE_PREFIX) :] for name in message.arrays if name.startswith(DENSE_PREFIX)}
        if sent_dtypes != self.values.keys():
            expected = ", ".join(self.values) or "none"
            raise MessageError(f"dense arrays: expected {expected}, got {', '.join(sorted(sent_dtypes)) or 'none'}")
        arrays = {}
        for dtype, values in self.values.items():
            arrays[dtype] = message.array(DENSE_PREFIX + dtype, dtype, [self._dense_sizes[dtype]])
            if sparse_size := values.size - self._dense_sizes[dtype]:
                arrays[dtype] = np.concatenate([arrays[dtype], np.zeros(sparse_size, dtype)])
            for piece, rows in self._sparse_rows(dtype, arrays[dtype]):
                ids, rows_sent = read_piece_rows(message, piece)
                rows[ids] = rows_sent
        return arrays

    def set_values(self, values: Mapping[str, np.ndarray]) -> None:
        """Copy values into the flat arrays."""
        for dtype, array in values.items():
            self.values[dtype][...] = array

    def set_slots(self, message: Message) -> None:
        """Set the optimiser's state from a message, if present; MessageError if it does not match the optimiser."""
        slot_names = set(self._updater.initial_slot_values())
        for dtype, values in self.values.items():
            prefix = f"{SLOTS_PREFIX}{dtype}/"
            arrays = {key[len(prefix) :]: message.arrays[key] for key in message.arrays if key.startswith(prefix)}
            scalars = {key for key in arrays if key not in slot_names}
            if arrays and not slot_names <= arrays.keys():
                raise MessageError(f"slots: expected {', '.join(sorted(slot_names))}, got {', '.join(sorted(arrays))}")
            for name in arrays:
                array = message.array(prefix + name, *(("float32", []) if name in scalars else (dtype, [values.size])))
                self.slots[dtype][name] = array.copy()

    def message_arrays(self, version: int = -1, with_slots: bool = False) -> dict[str, np.ndarray]:
        """Return the values, and with `with_slots` the optimiser's state, by their array names in messages.

        Of sparse parameters, return the rows that have changed since a version (-1: all).
        """
        arrays = {}
        for dtype, array in self.values.items():
            arrays[DENSE_PREFIX + dtype] = array[: self._dense_sizes[dtype]]
            for piece, rows in self._sparse_rows(dtype, array):
                arrays |= select_rows(piece, rows, np.flatnonzero(self._row_versions[piece.name] > version))
        for dtype, slots in self.slots.items() if with_slots else ():
            arrays |= {f"{SLOTS_PREFIX}{dtype}/{name}": array for name, array in slots.items()}
        return arrays

    def update(self, grads: Mapping[str, np.ndarray], step: int, scale: float) -> None:
        """Apply gradients; their arrays are overwritten."""
        for dtype, array in self.values.items():
            previous_rows = [rows.copy() for _, rows in self._sparse_rows(dtype, array)]
            self._updater.update(array, grads[dtype], self.slots[dtype], step, scale, self._flat_layouts[dtype])
            for (piece, rows), previous in zip(self._sparse_rows(dtype, array), previous_rows, strict=True):
                self._row_versions[piece.name][(rows != previous).any(axis=1)] = step + 1

    def _sparse_rows(self, dtype: str, flat: np.ndarray) -> list[tuple[ServerPiece, np.ndarray]]:
        """Return the sparse pieces with their rows in a flat array, as views."""
        return [(piece, flat[cells].reshape(piece.row_shape)) for piece, cells in self._sparse_pieces[dtype]]


def select_rows(piece: ServerPiece, rows: np.ndarray, ids: np.ndarray) -> dict[str, np.ndarray]:
    """Return some rows of a sparse piece and their ids, or all rows if these are fewer bytes, for a message."""
    if ids.nbytes + len(ids) * rows[:1].nbytes >= rows.nbytes:
        return {ROWS_PREFIX + piece.name: rows}
    return {IDS_PREFIX + piece.name: ids, ROWS_PREFIX + piece.name: rows[ids]}


def read_piece_rows(message: Message, piece: ServerPiece) -> tuple[np.ndarray | slice, np.ndarray]:
    """Return the ids and rows of a sparse piece in a message; MessageError if they do not match the piece."""
    num_rows, row_size = piece.row_shape
    if IDS_PREFIX + piece.name not in message.arrays:
        return slice(None), message.array(ROWS_PREFIX + piece.name, piece.dtype, [num_rows, row_size])
    rows = message.array(ROWS_PREFIX + piece.name, piece.dtype, [None, row_size])
    ids = message.array(IDS_PREFIX + piece.name, "int64", [len(rows)])
    if ids.size and not 0 <= ids.min() <= ids.max() < num_rows:
        raise MessageError(f"parameter '{piece.name}': its ids must be 0 to {num_rows - 1}")
    return ids, rows


def select_slots(
    layout: ServerLayout, slots: Mapping[str, np.ndarray], initial_slot_values: Mapping[str, float]
) -> dict[str, np.ndarray]:
    """Return a server's part of an optimiser's state, by the names of the arrays in messages.

    Parameters
    ----------
    layout : ServerLayout
    slots : mapping of str to ndarray
        Complete arrays and scalars by 'PARAMETER/SLOT'.
    initial_slot_values : mapping of str to float
        Initial values of slots with one element per value, for parameters without such slots in `slots`.
    """
    arrays: dict[str, np.ndarray] = {}
    for dtype in layout.dtypes:
        pieces = layout.pieces_of_dtype(dtype)
        names = {piece.name for piece, _ in pieces}
        own_slots = {key.rpartition("/")[2]: array for key, array in slots.items() if key.rpartition("/")[0] in names}
        arrays |= {
            f"{SLOTS_PREFIX}{dtype}/{name}": np.asarray(array, "float32")
            for name, array in own_slots.items()
            if name not in initial_slot_values
        }
        for name, value in initial_slot_values.items() if own_slots else ():
            flat = arrays[f"{SLOTS_PREFIX}{dtype}/{name}"] = np.full(layout.flat_size(dtype), value, dtype)
            for piece, cells in pieces:
                if (whole := slots.get(f"{piece.name}/{name}")) is not None:
                    flat[cells] = piece.part_of(np.ascontiguousarray(whole)).reshape(-1)
    return arrays


def _flat_layout(layout: ServerLayout, dtype: str) -> FlatLayout:
    pieces = layout.pieces_of_dtype(dtype)
    spans = tuple((cells.start, cells.stop) for _, cells in pieces)
    return FlatLayout(spans, tuple(piece.has_weight_decay for piece, _ in pieces), len(spans))
