"""A worker's side of the parameter servers: pulls and pushes to all of them at once, beside the computation."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import ServiceError
from .dense import PREFIX
from .group import ServerGroup
from .message import Arrays, Message
from .placement import ServerLayout, TableSpec
from .progress import Credit, Credits
from .state import IDS, ROWS, UpdateRule
from .table import combine
from .updates import describe_optimizer

SparseGradient = tuple[np.ndarray, np.ndarray]
"""Ids (n,) and rows (n, dim)."""
Gradients = Mapping[str, np.ndarray | SparseGradient]


@dataclass(frozen=True)
class PushResult:
    """The outcome of a push.

    Attributes
    ----------
    stale : bool
        A server has refused the gradient as too old, so pull, compute it again, and push it with the same credit:
        servers that have it already take it once.
    duplicate : bool
        All servers had a gradient with this credit before.
    versions : list of int
        For each server the first version that contains the gradient.
    staleness : int
        Updates between the values of the gradient and its own, on the server where there were most.
    factor : float
        On the learning rate, on that server.
    """

    stale: bool
    duplicate: bool
    versions: list[int]
    staleness: int
    factor: float


class Pulled:
    """Values that have been pulled; none from servers that have no newer ones."""

    def __init__(self, layouts: Sequence[ServerLayout], replies: Sequence[Message]) -> None:
        self._layouts, self._replies = layouts, replies

    @property
    def newer(self) -> bool:
        """Whether any server had newer values."""
        return any(reply.arrays for reply in self._replies)

    def copy_to(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Copy the values into whole arrays by name, C-contiguous."""
        for layout, reply in zip(self._layouts, self._replies, strict=True):
            if not reply.arrays:
                continue
            for dtype in layout.dtypes:
                flat = reply.array(PREFIX + dtype, dtype, [layout.size(dtype)])
                for piece, (start, stop) in zip(layout.of_dtype(dtype), layout.spans(dtype), strict=True):
                    piece.of(arrays[piece.name])[...] = flat[start:stop].reshape(piece.box.shape)


class ParameterClient:
    """A worker's connection to all servers of a job; a context manager.

    Arrays that are given to `push_later` must stay as they are until its result is there.

    Parameters
    ----------
    addresses : sequence of str
        'HOST:PORT' of each server.
    layouts : sequence of ServerLayout
        What each holds, as `place` returns it.
    token : str
    worker : str
        Name of the worker, unique within the job. Its order is that in which gradients of a round are added up.
    timeout, patience : float
        As of `ServiceClient`.

    Raises
    ------
    ServiceError
        A server cannot be reached, or is of another version.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        layouts: Sequence[ServerLayout],
        token: str,
        worker: str,
        timeout: float = 300.0,
        patience: float = 30.0,
    ) -> None:
        if len(addresses) != len(layouts):
            raise ServiceError(f"{len(addresses)} servers, but the parameters are placed on {len(layouts)}")
        self.layouts, self.worker, self.timeout = list(layouts), worker, timeout
        self._group = ServerGroup(addresses, token, timeout, patience)
        self._servers, self._all = self._group.clients, self._group.each
        # one thread for each direction: pushes of a worker keep their order
        self._pushes, self._pulls = (ThreadPoolExecutor(1, name) for name in ("push", "pull"))
        self._client, self._sequence = f"{worker}/{secrets.token_hex(4)}", 0
        self.versions, self._incarnations = [-1] * len(addresses), [""] * len(addresses)
        self._targets = [0] * len(addresses)
        self._rule = UpdateRule()
        self._tables = {table.name: table for layout in layouts for table in layout.tables}
        self._all(lambda at: self._servers[at].hello())

    def initialize(self, values: Mapping[str, np.ndarray], optimizer: Any, rule: UpdateRule | None = None) -> bool:
        """Give the servers a model, unless they have it; return whether this worker's values were taken.

        Call it on every worker with the same arguments, but for the values.

        Parameters
        ----------
        values : mapping of str to ndarray
            Whole arrays by name; also of tables, where rows shall begin with them.
        optimizer : Optimizer, TorchOptimizer or torch.optim.Optimizer
        rule : UpdateRule, optional

        Raises
        ------
        ServiceError
            A server holds another model, or cannot apply the optimiser.
        """
        self._rule = rule or UpdateRule()
        described = [self._described(layout, optimizer) for layout in self.layouts]
        asked = self._all(lambda at: self._servers[at].call("push_model", {**described[at], "values": False}))
        absent = [at for at, reply in enumerate(asked) if not reply.flag("initialized")]

        def give(at: int) -> bool:
            if at not in absent:
                return False
            arrays = self._packed(self.layouts[at], values)
            for name in self._tables.keys() & values.keys():
                ids = np.arange(at, len(values[name]), len(self.layouts))
                arrays |= {IDS + name: ids, ROWS + name: values[name][ids]}
            return self._servers[at].call("push_model", {**described[at], "values": True}, arrays).flag("taken")

        taken = self._all(give)
        self._all(lambda at: self._servers[at].call("join", {"worker": self.worker}))
        return any(taken)

    def pull(self, arrays: Mapping[str, np.ndarray]) -> bool:
        """Copy newer values into whole arrays, and return whether there were any.

        In synchronous mode it waits until all gradients that this worker has pushed are in them.
        """
        pulled = self.pull_later().result()
        pulled.copy_to(arrays)
        return pulled.newer

    def pull_later(self) -> Future[Pulled]:
        """Pull in another thread."""
        return self._pulls.submit(lambda: Pulled(self.layouts, self._all(self._pull_one)))

    def pull_rows(self, name: str, ids: np.ndarray) -> np.ndarray:
        """Return rows (n, dim) of a table; only these travel, each once."""
        distinct, back = np.unique(ids, return_inverse=True)
        servers = len(self._servers)
        wanted = [distinct[distinct % servers == at].astype(np.int64) for at in range(servers)]

        def call(at: int) -> np.ndarray:
            table = self._tables[name]
            if not wanted[at].size:
                return np.empty((0, table.dim), table.dtype)
            reply = self._servers[at].call("pull_embedding_vector", {"name": name}, {"ids": wanted[at]})
            return reply.array("rows", table.dtype, [len(wanted[at]), table.dim])

        parts = self._all(call)
        rows = np.empty((len(distinct), self._tables[name].dim), self._tables[name].dtype)
        for at, part in enumerate(parts):
            rows[distinct % servers == at] = part
        return rows[back.reshape(-1)]

    def push(
        self, gradients: Gradients, samples: float = 1.0, credit: Credit | None = None, scale: float = 1.0
    ) -> PushResult:
        """Push gradients and return what became of them.

        Parameters
        ----------
        gradients : mapping of str to ndarray, or to (ids, rows)
            Of all dense parameters, whole, and of the rows of tables: means over this worker's samples.
        samples : float
            How many these are.
        credit : Credit, optional
            The minibatch: no server applies a second gradient of it.
        scale : float
            Factor on the learning rate, as of a schedule.

        Raises
        ------
        ServiceError
        """
        return self.push_later(gradients, samples, credit, scale).result()

    def push_later(
        self, gradients: Gradients, samples: float = 1.0, credit: Credit | None = None, scale: float = 1.0
    ) -> Future[PushResult]:
        """Push in another thread; pushes of one worker keep their order."""
        fields = {
            "worker": self.worker,
            "client": self._client,
            "sequence": self._sequence,
            "samples": samples,
            "scale": scale,
            "credit": None if credit is None else list(credit),
        }
        self._sequence += 1
        versions, incarnations = list(self.versions), list(self._incarnations)
        rows = {name: _rows(table, gradients[name]) for name, table in self._tables.items() if name in gradients}

        def push_one(at: int) -> Message:
            arrays = self._packed(self.layouts[at], gradients)
            for name, (ids, values) in rows.items():
                mine = ids % len(self._servers) == at
                arrays |= {IDS + name: ids[mine], ROWS + name: values[mine]}
            more = {"version": max(0, versions[at]), "incarnation": incarnations[at]}
            return self._servers[at].call("push_gradient", fields | more, arrays)

        return self._pushes.submit(lambda: self._result(self._all(push_one)))

    def wait_turn(self) -> None:
        """Wait until the slowest worker is near enough, as the staleness bound says."""
        if self._rule.sync or self._rule.staleness is None:
            return
        while not self._servers[0].call("wait_turn", {"worker": self.worker, "seconds": 30.0}).flag("ready"):
            pass

    def leave(self) -> None:
        """Release those that wait for this worker."""
        self._all(lambda at: self._servers[at].call("leave", {"worker": self.worker}))

    def lose(self, worker: str) -> None:
        """Release those that wait for another worker, which is lost."""
        self._all(lambda at: self._servers[at].call("leave", {"worker": worker}))

    def left(self) -> int:
        """Return how many workers have ended."""
        return self._servers[0].call("status").integer("left")

    def finish_round(self) -> None:
        """Apply gradients that wait for others of their round, as at the end of an epoch."""
        self._all(lambda at: self._servers[at].call("finish_round"))

    def finish_epoch(self, epoch: int) -> None:
        """Let servers forget the credits of an epoch that is complete; later gradients of it are refused."""
        self._all(lambda at: self._servers[at].call("finish_epoch", {"epoch": epoch}))

    def credits(self) -> Credits:
        """Return the minibatches that all servers have applied."""
        return Credits.common(self._group.credits())

    def save(self, name: str, patience: float = 60.0) -> Credits:
        """Write a checkpoint of all servers, and return the minibatches that are in it.

        Gradients wait meanwhile. One that some servers have applied is taken by the others first.

        Raises
        ------
        ServiceError
            Servers do not agree within `patience` seconds, as where a worker was lost between two of them; try again
            when its minibatch has been computed once more.
        """
        return self._group.save(name, patience)

    def load(self, name: str, optimizer: Any, rule: UpdateRule | None = None) -> None:
        """Let all servers load a checkpoint, also one of another number of servers, in place of what they hold."""
        self._rule = rule or UpdateRule()
        described = [{**self._described(layout, optimizer), "name": name} for layout in self.layouts]
        self._all(lambda at: self._servers[at].call("load_checkpoint", described[at]))
        self._all(lambda at: self._servers[at].call("join", {"worker": self.worker}))

    def status(self) -> list[dict[str, Any]]:
        """Return the counts of each server."""
        return self._group.status()

    def close(self) -> None:
        """Close all connections, when calls under way have ended."""
        for pool in (self._pushes, self._pulls):
            pool.shutdown(wait=True, cancel_futures=True)
        self._group.close()

    def __enter__(self) -> ParameterClient:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _described(self, layout: ServerLayout, optimizer: Any) -> dict[str, Any]:
        return {
            "layout": layout.described(),
            "optimizer": describe_optimizer(optimizer),
            "rule": self._rule.described(),
        }

    def _packed(self, layout: ServerLayout, arrays: Mapping[str, Any]) -> dict[str, Arrays]:
        """Return the parts of whole arrays that one server holds, as a message has them."""
        return {
            PREFIX + dtype: [
                piece.of(np.ascontiguousarray(arrays[piece.name], dtype)) for piece in layout.of_dtype(dtype)
            ]
            for dtype in layout.dtypes
        }

    def _pull_one(self, at: int) -> Message:
        while True:
            fields = {
                "version": max(0, self.versions[at]),
                "incarnation": self._incarnations[at],
                "at_least": self._targets[at],
                "seconds": 30.0,
            }
            reply = self._servers[at].call("pull_variable", fields)
            version, incarnation = reply.integer("version"), reply.text("incarnation")
            waits = incarnation == self._incarnations[at] and version < self._targets[at]
            if incarnation != self._incarnations[at]:
                self._targets[at] = 0
                if self._incarnations[at]:
                    self._servers[at].call("join", {"worker": self.worker})
            self.versions[at], self._incarnations[at] = version, incarnation
            if not waits:
                return reply

    def _result(self, replies: Sequence[Message]) -> PushResult:
        outcomes = [reply.text("outcome") for reply in replies]
        versions = [reply.integer("version") for reply in replies]
        if self._rule.sync:
            for at, outcome in enumerate(outcomes):
                if outcome != "stale":
                    self._targets[at] = max(self._targets[at], versions[at])
        oldest = max(replies, key=lambda reply: reply.integer("staleness"))
        return PushResult(
            "stale" in outcomes,
            set(outcomes) == {"duplicate"},
            versions,
            oldest.integer("staleness"),
            oldest.number("factor"),
        )


def _rows(table: TableSpec, gradient: Any) -> SparseGradient:
    ids, rows = gradient
    return combine(np.asarray(ids, np.int64), np.asarray(rows, table.dtype))
