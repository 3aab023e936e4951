"""Rows in use of an embedding table on a server."""

from __future__ import annotations

import numpy as np

from ..errors import DataError
from ..optim import AVERAGE_SLOT
from .message import MessageError
from .placement import EmbeddingTableSpec
from .updates import Slots, Updater

_INITIAL_CAPACITY = 64
"""Initial capacity in rows, which is doubled as needed."""


class EmbeddingTable:
    """Rows by id, created at their first use.

    Memory grows with the rows in use, not with the size of the table.

    Parameters
    ----------
    spec : EmbeddingTableSpec
    updater : Updater
    index, servers : int
        The server holds the rows whose id equals `index` modulo `servers`.
    """

    def __init__(self, spec: EmbeddingTableSpec, updater: Updater, index: int, servers: int) -> None:
        self.spec, self._updater, self._server_index, self._server_count = spec, updater, index, servers
        self._positions: dict[int, int] = {}
        self._ids = np.empty(_INITIAL_CAPACITY, np.int64)
        self._values = np.empty((_INITIAL_CAPACITY, spec.dim), spec.dtype)
        self._slots: Slots = {}
        self._initial_slot_values = updater.initial_slot_values()
        self._updates_touched_rows_only = spec.lazy or updater.skips_zero_gradients()
        updater.require_independent_updates(whole_parameters=False)

    @property
    def row_count(self) -> int:
        """Number of rows in use."""
        return len(self._positions)

    @property
    def ids(self) -> np.ndarray:
        """Ids of the rows in use, in order of first use: a view."""
        return self._ids[: self.row_count]

    @property
    def values(self) -> np.ndarray:
        """The rows in use (row_count, dim): a view."""
        return self._values[: self.row_count]

    @property
    def slots(self) -> Slots:
        """Slots of the rows in use (row_count, dim): views; and scalar slots."""
        return {name: array[: self.row_count] if array.ndim else array for name, array in self._slots.items()}

    def get_or_create_rows(self, ids: np.ndarray) -> np.ndarray:
        """Return copies of rows (n, dim), and create missing rows."""
        positions = self._get_or_create_positions(ids)  # may reallocate the values
        return self._values[positions]

    def update(self, ids: np.ndarray, grads: np.ndarray, step: int, scale: float) -> None:
        """Apply gradients (n, dim) of rows; gradients of the same row are summed."""
        ids, grads = sum_duplicates(ids, grads)
        positions: np.ndarray | slice = self._get_or_create_positions(ids)
        if not self._updates_touched_rows_only:
            dense_grads = np.zeros((self.row_count, self.spec.dim), self.spec.dtype)
            dense_grads[positions] = grads
            positions, grads = slice(0, self.row_count), dense_grads  # a slice selects views
        values = self._values[positions]
        slots = {name: array[positions].reshape(-1) if array.ndim else array for name, array in self._slots.items()}
        self._updater.update(values.reshape(-1), grads.reshape(-1), slots, step, scale)
        self._set_rows(positions, values, slots)

    def restore(self, ids: np.ndarray, values: np.ndarray, slots: Slots) -> None:
        """Set rows and their slots, such as from a checkpoint."""
        self._set_rows(self._get_or_create_positions(ids), values, slots)

    def _set_rows(self, positions: np.ndarray | slice, values: np.ndarray, slots: Slots) -> None:
        self._values[positions] = values
        for name, array in slots.items():
            if not array.ndim:
                self._slots[name] = array.copy()
                continue
            if name not in self._slots:
                self._slots[name] = self._new_optimizer_slot(name, len(self._values))
            self._slots[name][positions] = array.reshape(values.shape)

    def _get_or_create_positions(self, ids: np.ndarray) -> np.ndarray:
        """Return the positions of rows; missing rows are created."""
        id_list = ids.tolist()
        missing_ids = [id_ for id_ in dict.fromkeys(id_list) if id_ not in self._positions]
        if missing_ids:
            self._create_rows(np.array(missing_ids, np.int64))
        return np.fromiter(map(self._positions.__getitem__, id_list), np.intp, len(id_list))

    def _create_rows(self, ids: np.ndarray) -> None:
        if ids.min() < 0 or ids.max() >= self.spec.rows:
            bad_id = ids[(ids < 0) | (ids >= self.spec.rows)][0]
            raise DataError(f"table '{self.spec.name}': id {bad_id} is invalid; ids must be 0 to {self.spec.rows - 1}")
        misplaced_ids = ids[ids % self._server_count != self._server_index]
        if misplaced_ids.size:
            raise MessageError(
                f"table '{self.spec.name}': id {misplaced_ids[0]} belongs to server"
                f" {misplaced_ids[0] % self._server_count} of {self._server_count}, not to server {self._server_index};"
                " start all workers with the same list of servers"
            )
        start, stop = self.row_count, self.row_count + len(ids)
        if stop > len(self._values):
            self._grow(max(stop, 2 * len(self._values)))
        self._ids[start:stop] = ids
        self._values[start:stop] = initial_rows(self.spec, ids)
        if AVERAGE_SLOT in self._slots:
            self._slots[AVERAGE_SLOT][start:stop] = self._values[start:stop]
        self._positions.update(zip(ids.tolist(), range(start, stop), strict=True))

    def _grow(self, capacity: int) -> None:
        """Reallocate all arrays; views of the old arrays stay valid."""
        count = self.row_count
        ids, values = np.empty(capacity, np.int64), np.empty((capacity, self.spec.dim), self.spec.dtype)
        ids[:count], values[:count] = self.ids, self.values
        self._ids, self._values = ids, values
        for name, array in self._slots.items():
            if array.ndim:
                self._slots[name] = self._new_optimizer_slot(name, capacity)
                self._slots[name][:count] = array[:count]

    def _new_optimizer_slot(self, name: str, capacity: int) -> np.ndarray:
        return np.full((capacity, self.spec.dim), self._initial_slot_values[name], self.spec.dtype)


def initial_rows(spec: EmbeddingTableSpec, ids: np.ndarray) -> np.ndarray:
    """Return the initial values of rows (n, dim), which depend only on the table's specification and the ids."""
    element_indices = ids.astype(np.uint64)[:, None] * np.uint64(spec.dim) + np.arange(spec.dim, dtype=np.uint64)
    return spec.initializer.values(spec.stream, element_indices, spec.rows, spec.dim).astype(spec.dtype)


def sum_duplicates(ids: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return sorted unique ids, and a new array of the sums of their rows (n, dim)."""
    order = np.argsort(ids, kind="stable")
    ids, starts = np.unique(ids[order], return_index=True)
    if not ids.size:
        return ids, rows.copy()
    return ids, np.add.reduceat(rows[order], starts, axis=0)
