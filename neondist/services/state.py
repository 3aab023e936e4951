"""State of a server: parameters, slots, version, and applied minibatches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..terminal.console import counted
from .dense import IDS_PREFIX, ROWS_PREFIX, DenseParameters
from .message import Message, MessageError
from .placement import EmbeddingTableSpec, ServerLayout
from .progress import AppliedMinibatches, MinibatchId, weights_by_sample_count
from .table import EmbeddingTable
from .updates import make_updater


@dataclass(frozen=True)
class SyncPolicy:
    """Policy for the application of gradients of several workers.

    Attributes
    ----------
    sync : bool
        Apply the mean of the gradients of a round, weighted by samples. False: apply each gradient on arrival.
    grads_to_wait : int
        Number of gradients in a round; fewer if there are fewer workers.
    version_tolerance : int
        Synchronous mode: maximum age, in updates, of the values from which a gradient was computed; older gradients
        are rejected.
    staleness : int or None
        Asynchronous mode: number of steps by which a worker may be ahead of the slowest worker. None: unbounded.
    modulate : bool
        Asynchronous mode: divide the learning rate by the number of updates (at least 1) since a gradient's values were
        pulled.
    """

    sync: bool = True
    grads_to_wait: int = 1
    version_tolerance: int = 0
    staleness: int | None = None
    modulate: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return a JSON value that `parse` accepts."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> SyncPolicy:
        """Return the policy described by a JSON value; MessageError if it is invalid."""
        message = Message(fields)
        staleness = None if fields.get("staleness") is None else message.integer("staleness")
        return cls(
            message.flag("sync"),
            message.integer("grads_to_wait", 1),
            message.integer("version_tolerance"),
            staleness,
            message.flag("modulate"),
        )


@dataclass(frozen=True)
class StartingState:
    """Updates that are already included in the servers' initial values.

    Attributes
    ----------
    slots : mapping of str to ndarray
        The optimiser's complete arrays and scalars by 'PARAMETER/SLOT'.
    updates : int
    samples : int
        Number of samples in `applied`.
    applied : AppliedMinibatches
        Minibatches of these updates that belong to the job.
    """

    slots: Mapping[str, np.ndarray] = field(default_factory=dict)
    updates: int = 0
    samples: int = 0
    applied: AppliedMinibatches = field(default_factory=AppliedMinibatches)

    def to_json(self) -> dict[str, Any]:
        """Return the counts and minibatches as a JSON value for the field 'start' of `ServerState.start`."""
        return {"updates": self.updates, "samples": self.samples, "credits": self.applied.to_json()}


@dataclass(frozen=True)
class PushedGradient:
    """Gradient of the parameters of a server.

    Attributes
    ----------
    worker : str
    client_id, push_number : str, int
        Connection of the sender, and number of the push; together they identify repeated pushes.
    values_version : int
        Version of the values from which the gradient was computed.
    samples : float
        Number of samples, the gradient's weight in a mean.
    learning_rate_scale : float
        Multiplier of the learning rate, such as that of a schedule.
    minibatch : MinibatchId or None
    dense_gradients : dict of str to ndarray
        Flat arrays by dtype.
    table_gradients : dict of str to (ids, rows)
    """

    worker: str
    client_id: str
    push_number: int
    values_version: int
    samples: float
    learning_rate_scale: float
    minibatch: MinibatchId | None
    dense_gradients: dict[str, np.ndarray]
    table_gradients: dict[str, tuple[np.ndarray, np.ndarray]]


class ServerState:
    """Dense parameters and tables of one server.

    Parameters
    ----------
    layout, optimizer : mapping
        As JSON.

    Attributes
    ----------
    version : int
        Number of updates.
    applied_minibatches : AppliedMinibatches
        Minibatches of the applied gradients.
    samples : float
        Total samples of the applied gradients.
    """

    def __init__(self, layout: Mapping[str, Any], optimizer: Mapping[str, Any]) -> None:
        self.layout, updater = ServerLayout.parse(layout), make_updater(optimizer)
        self.optimizer = dict(optimizer)
        self.dense_parameters = DenseParameters(self.layout, updater)
        index, servers = self.layout.index, self.layout.servers
        self.tables = {table.name: EmbeddingTable(table, updater, index, servers) for table in self.layout.tables}
        self.version, self.samples, self.applied_minibatches = 0, 0.0, AppliedMinibatches()

    def start(self, message: Message) -> None:
        """Set the state from a message: dense values, counts, and, if present, table rows and optimiser state."""
        dense_values, rows = self.dense_parameters.read_dense_arrays(message), self.read_rows(message)
        counts = Message(message.mapping("start"))
        self.version, self.samples = counts.integer("updates"), counts.number("samples")
        self.applied_minibatches = AppliedMinibatches.parse(counts.mapping("credits"))
        self.dense_parameters.set_slots(message)
        self.dense_parameters.set_values(dense_values)
        for name, (ids, values) in rows.items():
            self.tables[name].restore(ids, values, {})

    def read_rows(self, message: Message) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Return ids and rows of tables in a message; MessageError if they do not match a table."""
        rows_by_table = {}
        sparse_names = {piece.name for piece in self.layout.pieces if piece.sends_rows}
        sent_names = {key[len(ROWS_PREFIX) :] for key in message.arrays if key.startswith(ROWS_PREFIX)}
        for name in sorted(sent_names - sparse_names):
            spec = self.find_table(name).spec
            rows = message.array(ROWS_PREFIX + name, spec.dtype, [None, spec.dim])
            rows_by_table[name] = message.array(IDS_PREFIX + name, "int64", [len(rows)]), rows
            self._check_ids(spec, rows_by_table[name][0])
        return rows_by_table

    def find_table(self, name: str) -> EmbeddingTable:
        """Return a table by name; MessageError if there is none."""
        if name not in self.tables:
            raise MessageError(f"the server has no table '{name}'; its tables: {', '.join(self.tables) or 'none'}")
        return self.tables[name]

    def read_gradient(self, message: Message) -> PushedGradient:
        """Return the gradient in a message; MessageError if it does not match the layout."""
        minibatch = message.fields.get("credit")
        return PushedGradient(
            message.text("worker"),
            message.text("client"),
            message.integer("sequence"),
            message.integer("version"),
            message.number("samples", np.finfo(float).tiny),
            message.number("scale"),
            None if minibatch is None else MinibatchId.parse(minibatch),
            self.dense_parameters.read_dense_arrays(message),
            self.read_rows(message),
        )

    def apply_gradients(self, gradients: Sequence[PushedGradient], factor: float = 1.0) -> None:
        """Apply the sample-weighted mean of gradients (summed in order of workers), whose arrays are overwritten."""
        ordered = sorted(gradients, key=lambda gradient: (gradient.worker, gradient.push_number))
        weights = weights_by_sample_count(gradient.samples for gradient in ordered)
        scales = {gradient.learning_rate_scale for gradient in ordered}
        mean = sum(weight * gradient.learning_rate_scale for weight, gradient in zip(weights, ordered, strict=True))
        scale = factor * (scales.pop() if len(scales) == 1 else mean)
        dense = ordered[0].dense_gradients
        if len(ordered) > 1:
            for weight, gradient in zip(weights, ordered, strict=True):
                for dtype, array in gradient.dense_gradients.items():
                    array *= weight
                    if array is not dense[dtype]:
                        dense[dtype] += array
        self.dense_parameters.update(dense, self.version, scale)
        for name, table in self.tables.items():
            weighted = zip((gradient.table_gradients for gradient in ordered), weights, strict=True)
            weighted_rows = [(gradients[name], weight) for gradients, weight in weighted if name in gradients]
            if weighted_rows:
                ids = np.concatenate([ids for (ids, _), _ in weighted_rows])
                rows = np.concatenate([rows * weight for (_, rows), weight in weighted_rows]).astype(table.spec.dtype)
                table.update(ids, rows, self.version, scale)
        self.version += 1
        self.samples += sum(gradient.samples for gradient in ordered)
        for gradient in ordered:
            if gradient.minibatch is not None:
                self.applied_minibatches.add(gradient.minibatch)

    def _check_ids(self, spec: EmbeddingTableSpec, ids: np.ndarray) -> None:
        is_invalid = (ids < 0) | (ids >= spec.rows) | (ids % self.layout.servers != self.layout.index)
        if is_invalid.any():
            raise MessageError(
                f"table '{spec.name}' ({counted(spec.rows, 'row')}): id {ids[is_invalid][0]} is not on this server"
            )
