"""The parameters that a server holds, with all that goes on with them: slots, version, credits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .dense import DenseParameters
from .message import Message, MessageError
from .placement import ServerLayout, TableSpec
from .progress import Credit, Credits, mean_weights
from .table import RowTable
from .updates import make_updater

IDS, ROWS = "ids/", "rows/"
"""Before the name of a table, in the names of arrays in messages."""


@dataclass(frozen=True)
class UpdateRule:
    """The rule by which gradients of several workers are applied.

    Attributes
    ----------
    sync : bool
        Gradients of a round are averaged, by their samples, and applied together. False: each is applied as it comes.
    grads_to_wait : int
        Gradients of a round; fewer where fewer workers are there.
    version_tolerance : int
        Synchronous gradients of values that are older by more updates are refused.
    staleness : int or None
        Asynchronous: steps by which a worker may be ahead of the slowest one. None: any number.
    modulate : bool
        Asynchronous: divide the learning rate by the updates since the values of a gradient were pulled.
    """

    sync: bool = True
    grads_to_wait: int = 1
    version_tolerance: int = 0
    staleness: int | None = None
    modulate: bool = False

    def described(self) -> dict[str, Any]:
        """Return it as JSON, which `parse` reads."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @classmethod
    def parse(cls, described: Mapping[str, Any]) -> UpdateRule:
        """Return the rule that JSON describes; MessageError if it is invalid."""
        message = Message(described)
        staleness = None if described.get("staleness") is None else message.integer("staleness")
        return cls(
            message.flag("sync"),
            message.integer("grads_to_wait", 1),
            message.integer("version_tolerance"),
            staleness,
            message.flag("modulate"),
        )


@dataclass(frozen=True)
class PushedGradient:
    """A gradient for the parameters of one server.

    Attributes
    ----------
    worker : str
    client, sequence : str, int
        The sender's connection, and the number of its push: a repeated one is known by them.
    version : int
        Of the values that it was computed with.
    samples : float
        Its weight in a mean.
    scale : float
        Factor on the learning rate, as of a schedule.
    credit : Credit or None
    dense : dict of str to ndarray
        By dtype.
    tables : dict of str to (ids, rows)
    """

    worker: str
    client: str
    sequence: int
    version: int
    samples: float
    scale: float
    credit: Credit | None
    dense: dict[str, np.ndarray]
    tables: dict[str, tuple[np.ndarray, np.ndarray]]


class ServerState:
    """Dense parameters and tables of one server.

    Parameters
    ----------
    layout, optimizer : mapping
        As JSON.

    Attributes
    ----------
    version : int
        Updates so far.
    credits : Credits
        Of the gradients that were applied.
    samples : float
        Of the gradients that were applied, together.
    """

    def __init__(self, layout: Mapping[str, Any], optimizer: Mapping[str, Any]) -> None:
        self.layout, updater = ServerLayout.parse(layout), make_updater(optimizer)
        self.optimizer = dict(optimizer)
        self.dense = DenseParameters(self.layout, updater)
        index, servers = self.layout.index, self.layout.servers
        self.tables = {table.name: RowTable(table, updater, index, servers) for table in self.layout.tables}
        self.version, self.samples, self.credits = 0, 0.0, Credits()

    def set_values(self, message: Message) -> None:
        """Take over the values of a message: all dense ones, and rows of tables, where it has some."""
        given, rows = self.dense.read(message), self.read_rows(message)
        self.dense.set_values(given)
        for name, (ids, values) in rows.items():
            self.tables[name].restore(ids, values, {})

    def read_rows(self, message: Message) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Return ids and rows of tables in a message; MessageError if they fit no table."""
        found = {}
        for name in (key[len(ROWS) :] for key in message.arrays if key.startswith(ROWS)):
            spec = self.table(name).spec
            rows = message.array(ROWS + name, spec.dtype, [None, spec.dim])
            found[name] = message.array(IDS + name, "int64", [len(rows)]), rows
            self._check_ids(spec, found[name][0])
        return found

    def table(self, name: str) -> RowTable:
        """Return a table; MessageError if there is none of this name."""
        if name not in self.tables:
            raise MessageError(f"no table '{name}'")
        return self.tables[name]

    def read_gradient(self, message: Message) -> PushedGradient:
        """Return the gradient of a message; MessageError if it does not fit."""
        credit = message.fields.get("credit")
        return PushedGradient(
            message.text("worker"),
            message.text("client"),
            message.integer("sequence"),
            message.integer("version"),
            message.number("samples", np.finfo(float).tiny),
            message.number("scale"),
            None if credit is None else Credit.parse(credit),
            self.dense.read(message),
            self.read_rows(message),
        )

    def apply(self, gradients: Sequence[PushedGradient], factor: float = 1.0) -> None:
        """Apply the mean of gradients, by their samples, in the order of their workers; all arrays are overwritten."""
        ordered = sorted(gradients, key=lambda one: (one.worker, one.sequence))
        weights = mean_weights(one.samples for one in ordered)
        scales = {one.scale for one in ordered}
        mean = sum(weight * one.scale for weight, one in zip(weights, ordered, strict=True))
        scale = factor * (scales.pop() if len(scales) == 1 else mean)
        dense = ordered[0].dense
        if len(ordered) > 1:
            for weight, one in zip(weights, ordered, strict=True):
                for dtype, array in one.dense.items():
                    array *= weight
                    if array is not dense[dtype]:
                        dense[dtype] += array
        self.dense.update(dense, self.version, scale)
        for name, table in self.tables.items():
            pushed = [
                (one.tables[name], weight) for one, weight in zip(ordered, weights, strict=True) if name in one.tables
            ]
            if pushed:
                ids = np.concatenate([ids for (ids, _), _ in pushed])
                rows = np.concatenate([rows * weight for (_, rows), weight in pushed]).astype(table.spec.dtype)
                table.update(ids, rows, self.version, scale)
        self.version += 1
        self.samples += sum(one.samples for one in ordered)
        for one in ordered:
            if one.credit is not None:
                self.credits.add(one.credit)

    def _check_ids(self, spec: TableSpec, ids: np.ndarray) -> None:
        wrong = (ids < 0) | (ids >= spec.rows) | (ids % self.layout.servers != self.layout.index)
        if wrong.any():
            raise MessageError(f"table '{spec.name}': id {ids[wrong][0]} is not among this server's {spec.rows} rows")
