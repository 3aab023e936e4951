"""Rows in use of an embedding table on a server."""

from __future__ import annotations

import numpy as np

from ..errors import DataError
from ..optim import AVERAGE
from .message import MessageError
from .placement import TableSpec
from .updates import Slots, Updater

_FIRST = 64
"""Initial capacity in rows, which is doubled as needed."""


class RowTable:
    """Rows by id, created at their first use.

    Memory grows with the rows in use, not with the size of the table.

    Parameters
    ----------
    spec : TableSpec
    updater : Updater
    index, servers : int
        The server holds the rows whose id is `index` modulo `servers`.

    Attributes
    ----------
    count : int
        Rows in use.
    """

    def __init__(self, spec: TableSpec, updater: Updater, index: int, servers: int) -> None:
        self.spec, self._updater, self._index, self._servers = spec, updater, index, servers
        self._positions: dict[int, int] = {}
        self._ids = np.empty(_FIRST, np.int64)
        self._values = np.empty((_FIRST, spec.dim), spec.dtype)
        self._slots: Slots = {}
        self._fills = updater.initial_slots()
        self._touched_only = spec.lazy or updater.skips_zero_gradients()
        updater.check_parts(whole=False)

    @property
    def count(self) -> int:
        """Rows in use."""
        return len(self._positions)

    @property
    def ids(self) -> np.ndarray:
        """Ids of the rows in use, in order of first use: a view."""
        return self._ids[: self.count]

    @property
    def values(self) -> np.ndarray:
        """The rows in use (count, dim): a view."""
        return self._values[: self.count]

    @property
    def slots(self) -> Slots:
        """Slots of the rows in use (count, dim), and scalar slots: views."""
        return {name: array[: self.count] if array.ndim else array for name, array in self._slots.items()}

    def rows(self, ids: np.ndarray) -> np.ndarray:
        """Return copies of rows (n, dim); missing rows are created."""
        positions = self._locate(ids)  # may reallocate the values
        return self._values[positions]

    def update(self, ids: np.ndarray, grads: np.ndarray, step: int, scale: float) -> None:
        """Apply gradients (n, dim) of rows; those with the same id are summed."""
        ids, grads = combine(ids, grads)
        positions: np.ndarray | slice = self._locate(ids)
        if not self._touched_only:
            whole = np.zeros((self.count, self.spec.dim), self.spec.dtype)
            whole[positions] = grads
            positions, grads = slice(0, self.count), whole  # a slice selects views
        values = self._values[positions]
        slots = {name: array[positions].reshape(-1) if array.ndim else array for name, array in self._slots.items()}
        self._updater.update(values.reshape(-1), grads.reshape(-1), slots, step, scale)
        self._put(positions, values, slots)

    def restore(self, ids: np.ndarray, values: np.ndarray, slots: Slots) -> None:
        """Set rows and their slots, such as from a checkpoint."""
        self._put(self._locate(ids), values, slots)

    def _put(self, positions: np.ndarray | slice, values: np.ndarray, slots: Slots) -> None:
        self._values[positions] = values
        for name, array in slots.items():
            if not array.ndim:
                self._slots[name] = array.copy()
                continue
            if name not in self._slots:
                self._slots[name] = self._new_slot(name, len(self._values))
            self._slots[name][positions] = array.reshape(values.shape)

    def _locate(self, ids: np.ndarray) -> np.ndarray:
        """Return the positions of rows; missing rows are created."""
        keys = ids.tolist()
        missing = [id_ for id_ in dict.fromkeys(keys) if id_ not in self._positions]
        if missing:
            self._create(np.array(missing, np.int64))
        return np.fromiter(map(self._positions.__getitem__, keys), np.intp, len(keys))

    def _create(self, ids: np.ndarray) -> None:
        if ids.min() < 0 or ids.max() >= self.spec.rows:
            invalid = ids[(ids < 0) | (ids >= self.spec.rows)][0]
            raise DataError(f"table '{self.spec.name}': id {invalid} is not in the table of {self.spec.rows} rows")
        if (ids % self._servers != self._index).any():
            raise MessageError(f"table '{self.spec.name}': an id that belongs to another server")
        start, stop = self.count, self.count + len(ids)
        if stop > len(self._values):
            self._grow(max(stop, 2 * len(self._values)))
        self._ids[start:stop] = ids
        self._values[start:stop] = first_rows(self.spec, ids)
        if AVERAGE in self._slots:
            self._slots[AVERAGE][start:stop] = self._values[start:stop]
        self._positions.update(zip(ids.tolist(), range(start, stop), strict=True))

    def _grow(self, capacity: int) -> None:
        """Reallocate all arrays; views of the old ones stay valid."""
        count = self.count
        ids, values = np.empty(capacity, np.int64), np.empty((capacity, self.spec.dim), self.spec.dtype)
        ids[:count], values[:count] = self.ids, self.values
        self._ids, self._values = ids, values
        for name, array in self._slots.items():
            if array.ndim:
                self._slots[name] = self._new_slot(name, capacity)
                self._slots[name][:count] = array[:count]

    def _new_slot(self, name: str, capacity: int) -> np.ndarray:
        return np.full((capacity, self.spec.dim), self._fills[name], self.spec.dtype)


def first_rows(spec: TableSpec, ids: np.ndarray) -> np.ndarray:
    """Return the initial values of rows (n, dim), which depend only on the table's stream and the ids."""
    index = ids.astype(np.uint64)[:, None] * np.uint64(spec.dim) + np.arange(spec.dim, dtype=np.uint64)
    return spec.initializer.values(spec.stream, index, spec.rows, spec.dim).astype(spec.dtype)


def combine(ids: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return sorted unique ids, and the sums of their rows (n, dim), a new array."""
    order = np.argsort(ids, kind="stable")
    ids, starts = np.unique(ids[order], return_index=True)
    if not ids.size:
        return ids, rows.copy()
    return ids, np.add.reduceat(rows[order], starts, axis=0)
