"""The rows of an embedding table that a server has in use."""

from __future__ import annotations

import numpy as np

from ..errors import DataError
from ..optim import AVERAGE
from .message import MessageError
from .placement import TableSpec
from .updates import Slots, Updater

_FIRST = 64
"""Rows for which there is room at first; it doubles."""


class RowTable:
    """Rows by id, each made at its first use.

    Memory grows with the rows in use, and not with those of the table.

    Parameters
    ----------
    spec : TableSpec
    updater : Updater
    index, servers : int
        This server has the rows whose id is `index` modulo `servers`.

    Attributes
    ----------
    count : int
        Rows in use.
    """

    def __init__(self, spec: TableSpec, updater: Updater, index: int, servers: int) -> None:
        self.spec, self._updater, self._index, self._servers = spec, updater, index, servers
        self._places: dict[int, int] = {}
        self._ids = np.empty(_FIRST, np.int64)
        self._values = np.empty((_FIRST, spec.dim), spec.dtype)
        self._slots: Slots = {}
        self._fills = updater.fills()
        self._touched_only = spec.lazy or updater.keeps_rest()
        updater.check_parts(whole=False)

    @property
    def count(self) -> int:
        """Rows in use."""
        return len(self._places)

    @property
    def ids(self) -> np.ndarray:
        """Ids of the rows in use, in the order of their first use: a view."""
        return self._ids[: self.count]

    @property
    def values(self) -> np.ndarray:
        """The rows in use (count, dim): a view."""
        return self._values[: self.count]

    @property
    def slots(self) -> Slots:
        """Slots of the rows in use (count, dim), and those that are one number: views."""
        return {name: array[: self.count] if array.ndim else array for name, array in self._slots.items()}

    def rows(self, ids: np.ndarray) -> np.ndarray:
        """Return copies of rows (n, dim); those that are not there yet are made."""
        places = self._find(ids)  # which may move the values
        return self._values[places]

    def update(self, ids: np.ndarray, grads: np.ndarray, step: int, scale: float) -> None:
        """Apply gradients (n, dim) of rows; those of one id are added up."""
        ids, grads = combine(ids, grads)
        places: np.ndarray | slice = self._find(ids)
        if not self._touched_only:
            whole = np.zeros((self.count, self.spec.dim), self.spec.dtype)
            whole[places] = grads
            places, grads = slice(0, self.count), whole  # what it selects are views
        values = self._values[places]
        slots = {name: array[places].reshape(-1) if array.ndim else array for name, array in self._slots.items()}
        self._updater.update(values.reshape(-1), grads.reshape(-1), slots, step, scale)
        self._put(places, values, slots)

    def restore(self, ids: np.ndarray, values: np.ndarray, slots: Slots) -> None:
        """Put rows and their slots in place, as of a checkpoint."""
        self._put(self._find(ids), values, slots)

    def _put(self, places: np.ndarray | slice, values: np.ndarray, slots: Slots) -> None:
        self._values[places] = values
        for name, array in slots.items():
            if not array.ndim:
                self._slots[name] = array.copy()
                continue
            if name not in self._slots:
                self._slots[name] = self._new_slot(name, len(self._values))
            self._slots[name][places] = array.reshape(values.shape)

    def _find(self, ids: np.ndarray) -> np.ndarray:
        """Return the places of rows, making those that are not there yet."""
        listed = ids.tolist()
        missing = [one for one in dict.fromkeys(listed) if one not in self._places]
        if missing:
            self._make(np.array(missing, np.int64))
        return np.fromiter(map(self._places.__getitem__, listed), np.intp, len(listed))

    def _make(self, ids: np.ndarray) -> None:
        if ids.min() < 0 or ids.max() >= self.spec.rows:
            wrong = ids[(ids < 0) | (ids >= self.spec.rows)][0]
            raise DataError(f"table '{self.spec.name}': id {wrong} is not in the table of {self.spec.rows} rows")
        if (ids % self._servers != self._index).any():
            raise MessageError(f"table '{self.spec.name}': an id that belongs to another server")
        start, stop = self.count, self.count + len(ids)
        if stop > len(self._values):
            self._grow(max(stop, 2 * len(self._values)))
        self._ids[start:stop] = ids
        self._values[start:stop] = first_rows(self.spec, ids)
        if AVERAGE in self._slots:
            self._slots[AVERAGE][start:stop] = self._values[start:stop]
        self._places.update(zip(ids.tolist(), range(start, stop), strict=True))

    def _grow(self, room: int) -> None:
        """Move all arrays to longer ones; views of the old ones stay valid."""
        count = self.count
        ids, values = np.empty(room, np.int64), np.empty((room, self.spec.dim), self.spec.dtype)
        ids[:count], values[:count] = self.ids, self.values
        self._ids, self._values = ids, values
        for name, array in self._slots.items():
            if array.ndim:
                self._slots[name] = self._new_slot(name, room)
                self._slots[name][:count] = array[:count]

    def _new_slot(self, name: str, room: int) -> np.ndarray:
        return np.full((room, self.spec.dim), self._fills[name], self.spec.dtype)


def first_rows(spec: TableSpec, ids: np.ndarray) -> np.ndarray:
    """Return the first values of rows (n, dim), which depend on the table's stream and the ids alone."""
    index = ids.astype(np.uint64)[:, None] * np.uint64(spec.dim) + np.arange(spec.dim, dtype=np.uint64)
    return spec.initializer.values(spec.stream, index, spec.rows, spec.dim).astype(spec.dtype)


def combine(ids: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return sorted ids without repetition, and the sums of their rows (n, dim), a new array."""
    order = np.argsort(ids, kind="stable")
    ids, starts = np.unique(ids[order], return_index=True)
    if not ids.size:
        return ids, rows.copy()
    return ids, np.add.reduceat(rows[order], starts, axis=0)
