"""Client side of the parameter servers: parallel pulls and pushes, concurrent with the computation."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from ..errors import ServiceError
from ..terminal.console import counted
from .dense import DENSE_PREFIX, IDS_PREFIX, ROWS_PREFIX, SLOTS_PREFIX, read_piece_rows, select_rows, select_slots
from .group import ServerConnections
from .message import Message, MessageArray
from .placement import EmbeddingTableSpec, ServerLayout
from .progress import AppliedMinibatches, MinibatchId
from .state import StartingState, SyncPolicy
from .table import sum_duplicates
from .updates import describe_optimizer, make_updater

SparseGradient = tuple[np.ndarray, np.ndarray]
"""Ids (n,) and rows (n, dim)."""
Gradients = Mapping[str, np.ndarray | SparseGradient]
_MODEL_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class PushResult:
    """Outcome of a push.

    Attributes
    ----------
    stale : bool
        A server has rejected the gradient as too old: pull, recompute the gradient, and push it for the same minibatch;
        servers that have already applied this minibatch ignore the new push.
    duplicate : bool
        All servers already had a gradient of this minibatch.
    versions : list of int
        For each server, the first version that contains the gradient.
    staleness : int
        Number of updates since the values from which the gradient was computed were pulled; the maximum over servers.
    learning_rate_factor : float
        Multiplier of the learning rate on the server with this maximum.
    """

    stale: bool
    duplicate: bool
    versions: list[int]
    staleness: int
    learning_rate_factor: float


class PulledValues:
    """Values pulled from the servers: of sparse parameters, the rows changed since the last pull.

    Servers without newer values contribute none.
    """

    def __init__(self, layouts: Sequence[ServerLayout], replies: Sequence[Message]) -> None:
        self._layouts, self._replies = layouts, replies

    @property
    def has_newer_values(self) -> bool:
        """Whether any server had newer values."""
        return any(reply.arrays for reply in self._replies)

    def copy_to(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Copy the values into complete, C-contiguous arrays, given by name, which hold the values of the last pull."""
        for layout, reply in zip(self._layouts, self._replies, strict=True):
            if not reply.arrays:
                continue
            for dtype in layout.dtypes:
                flat = reply.array(DENSE_PREFIX + dtype, dtype, [layout.dense_size(dtype)])
                for piece, cells in layout.pieces_of_dtype(dtype):
                    ids, values = read_piece_rows(reply, piece) if piece.sends_rows else (..., flat[cells])
                    part = piece.part_of(arrays[piece.name])
                    part[ids] = values.reshape(part[ids].shape)

    def assemble_slots(self) -> dict[str, np.ndarray]:
        """Return the optimiser's complete arrays and scalars by 'PARAMETER/SLOT'; empty if they were not pulled."""
        slots: dict[str, np.ndarray] = {}
        for layout, reply in zip(self._layouts, self._replies, strict=True):
            for dtype, (key, flat) in product(layout.dtypes, reply.arrays.items()):
                prefix, _, slot = key.rpartition("/")
                if prefix != f"{SLOTS_PREFIX}{dtype}" or not isinstance(flat, np.ndarray):
                    continue
                for piece, cells in layout.pieces_of_dtype(dtype):
                    name = f"{piece.name}/{slot}"
                    if flat.ndim:
                        complete_slot = slots.setdefault(name, np.zeros(piece.shape, dtype))
                        piece.part_of(complete_slot)[...] = flat[cells].reshape(piece.box.shape)
                    else:
                        slots[name] = flat
        return slots


class ParameterClient:
    """Connection of a worker to all servers of a job; a context manager.

    Arrays passed to `push_async` must not change until the returned future is done.

    Parameters
    ----------
    addresses : sequence of str
        'HOST:PORT' of each server.
    layouts : sequence of ServerLayout
        Contents of each server, as returned by `place_parameters`.
    token : str
    worker : str
        Name of the worker, unique within the job. Gradients of a round are summed in the order of worker names.
    timeout, retry_seconds : float
        As for `ServiceClient`.

    Raises
    ------
    ServiceError
        A server is unreachable or has another version of neondist, or the numbers of addresses and layouts differ.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        layouts: Sequence[ServerLayout],
        token: str,
        worker: str,
        timeout: float = 300.0,
        retry_seconds: float = 30.0,
    ) -> None:
        if len(addresses) != len(layouts):
            raise ServiceError(
                f"addresses: {counted(len(addresses), 'server')} given, but the parameters are on {len(layouts)}; give"
                " one address per server"
            )
        self.layouts, self.worker, self.timeout = list(layouts), worker, timeout
        self._server_connections = ServerConnections(addresses, token, timeout, retry_seconds)
        self._clients = self._server_connections.clients
        self._call_on_all_servers = self._server_connections.call_on_all_servers
        # one thread per direction: preserves the order of a worker's pushes
        self._push_thread, self._pull_thread = (ThreadPoolExecutor(1, name) for name in ("push", "pull"))
        self._client_id, self._push_count = f"{worker}/{secrets.token_hex(4)}", 0
        self.versions, self._incarnations = [-1] * len(addresses), [""] * len(addresses)
        self._required_versions = [0] * len(addresses)
        self._sync_policy = SyncPolicy()
        self._tables = {table.name: table for layout in layouts for table in layout.tables}
        self._call_on_all_servers(lambda index: self._clients[index].check_service_version())

    def push_initial_values(
        self,
        values: Mapping[str, np.ndarray] | None,
        optimizer: Any,
        policy: SyncPolicy | None = None,
        start: StartingState | None = None,
    ) -> bool:
        """Push a model to the servers that have none; return whether the values of this worker were used.

        Call this method on every worker with the same arguments, except for `values` and `start`.

        Parameters
        ----------
        values : mapping of str to ndarray, or None
            Complete arrays by name; the array of a table sets the initial values of its rows. None: wait until another
            worker has pushed the model.
        optimizer : Optimizer, TorchOptimizer or torch.optim.Optimizer
        policy : SyncPolicy, optional
        start : StartingState, optional
            Updates that led to the values. Default: none.

        Raises
        ------
        ServiceError
            A server holds another model, or cannot apply the optimiser.
        """
        self._sync_policy = policy or SyncPolicy()
        configurations = [self._server_configuration(layout, optimizer) for layout in self.layouts]
        start = start or StartingState()

        def find_empty_servers() -> list[int]:
            replies = self._call_on_all_servers(
                lambda at: self._clients[at].call("push_model", {**configurations[at], "values": False})
            )
            return [index for index, reply in enumerate(replies) if not reply.flag("initialized")]

        empty_servers = find_empty_servers()
        while values is None and empty_servers:
            time.sleep(_MODEL_POLL_SECONDS)
            empty_servers = find_empty_servers()
        updater = make_updater(configurations[0]["optimizer"])

        def push_values(index: int) -> bool:
            if index not in empty_servers or values is None:
                return False
            layout = self.layouts[index]
            arrays = self._select_parts(layout, values)
            arrays |= select_slots(layout, start.slots, updater.initial_slot_values() if start.slots else {})
            for name in self._tables.keys() & values.keys():
                ids = np.arange(index, len(values[name]), len(self.layouts))
                arrays |= {IDS_PREFIX + name: ids, ROWS_PREFIX + name: values[name][ids]}
            fields = {**configurations[index], "values": True, "start": start.to_json()}
            return self._clients[index].call("push_model", fields, arrays).flag("taken")

        accepted_by_server = self._call_on_all_servers(push_values)
        self._server_connections.call_method_on_all_servers("join", {"worker": self.worker})
        return any(accepted_by_server)

    def pull(self, arrays: Mapping[str, np.ndarray]) -> bool:
        """Copy newer values into complete arrays; return whether there were any.

        Pass the same arrays in each call: of sparse parameters, only rows that have changed are copied. In synchronous
        mode, wait until the values include all gradients pushed by this worker.
        """
        pulled = self.pull_async().result()
        pulled.copy_to(arrays)
        return pulled.has_newer_values

    def pull_async(self, with_slots: bool = False) -> Future[PulledValues]:
        """Pull in another thread; `with_slots`: also the optimiser's state, and values even if they are not newer."""

        def pull_from_all_servers() -> PulledValues:
            replies = self._call_on_all_servers(lambda index: self._pull_from_server(index, with_slots))
            self.versions = [reply.integer("version") for reply in replies]
            self._incarnations = [reply.text("incarnation") for reply in replies]
            return PulledValues(self.layouts, replies)

        return self._pull_thread.submit(pull_from_all_servers)

    def pull_rows(self, name: str, ids: np.ndarray) -> np.ndarray:
        """Return rows (n, dim) of a table; each row is transferred once."""
        distinct_ids, inverse = np.unique(ids, return_inverse=True)
        servers = len(self._clients)
        ids_by_server = [distinct_ids[distinct_ids % servers == index].astype(np.int64) for index in range(servers)]

        def pull_server_rows(index: int) -> np.ndarray:
            table = self._tables[name]
            if not ids_by_server[index].size:
                return np.empty((0, table.dim), table.dtype)
            reply = self._clients[index].call("pull_embedding_vector", {"name": name}, {"ids": ids_by_server[index]})
            return reply.array("rows", table.dtype, [len(ids_by_server[index]), table.dim])

        rows_by_server = self._call_on_all_servers(pull_server_rows)
        rows = np.empty((len(distinct_ids), self._tables[name].dim), self._tables[name].dtype)
        for index, part in enumerate(rows_by_server):
            rows[distinct_ids % servers == index] = part
        return rows[inverse.reshape(-1)]

    def push(
        self, gradients: Gradients, samples: float = 1.0, minibatch: MinibatchId | None = None, scale: float = 1.0
    ) -> PushResult:
        """Push gradients and return the outcome.

        Parameters
        ----------
        gradients : mapping of str to ndarray, or to (ids, rows)
            Complete gradients of all dense parameters, and of table rows: means over this worker's samples.
        samples : float
            Number of these samples.
        minibatch : MinibatchId, optional
            Minibatch of the gradients; a server applies at most one gradient per minibatch.
        scale : float
            Multiplier of the learning rate, such as that of a schedule.
        """
        return self.push_async(gradients, samples, minibatch, scale).result()

    def push_async(
        self, gradients: Gradients, samples: float = 1.0, minibatch: MinibatchId | None = None, scale: float = 1.0
    ) -> Future[PushResult]:
        """Push in another thread; the order of pushes is preserved."""
        fields = {
            "worker": self.worker,
            "client": self._client_id,
            "sequence": self._push_count,
            "samples": samples,
            "scale": scale,
            "credit": None if minibatch is None else list(minibatch),
        }
        self._push_count += 1
        versions, incarnations = list(self.versions), list(self._incarnations)
        tables = {name: table for name, table in self._tables.items() if name in gradients}
        rows = {name: _sum_duplicate_rows(table, gradients[name]) for name, table in tables.items()}

        def push_to_server(index: int) -> Message:
            arrays = self._select_parts(self.layouts[index], gradients)
            for name, (ids, values) in rows.items():
                owned_mask = ids % len(self._clients) == index
                arrays |= {IDS_PREFIX + name: ids[owned_mask], ROWS_PREFIX + name: values[owned_mask]}
            server_fields = {"version": max(0, versions[index]), "incarnation": incarnations[index]}
            return self._clients[index].call("push_gradient", fields | server_fields, arrays)

        return self._push_thread.submit(lambda: self._combine_push_replies(self._call_on_all_servers(push_to_server)))

    def wait_for_staleness_bound(self) -> None:
        """Wait until the staleness bound permits this worker to continue."""
        if self._sync_policy.sync or self._sync_policy.staleness is None:
            return
        fields = {"worker": self.worker, "seconds": 30.0}
        while not self._clients[0].call("wait_for_staleness_bound", fields).flag("ready"):
            pass

    def leave(self) -> None:
        """Leave the job, so that other workers do not wait for this one."""
        self.remove_lost_worker(self.worker)

    def remove_lost_worker(self, worker: str) -> None:
        """Remove a lost worker, so that other workers do not wait for it."""
        self._server_connections.call_method_on_all_servers("leave", {"worker": worker})

    def count_departed_workers(self) -> int:
        """Return the number of workers that have left."""
        return self._clients[0].call("status").integer("left")

    def finish_round(self) -> None:
        """Apply the gradients of an incomplete round, such as at the end of an epoch."""
        self._server_connections.call_method_on_all_servers("finish_round")

    def finish_epoch(self, epoch: int) -> None:
        """Let all servers count the minibatches up to a completed epoch as applied, and reject their gradients."""
        self._server_connections.call_method_on_all_servers("finish_epoch", {"epoch": epoch})

    def applied_minibatches(self) -> AppliedMinibatches:
        """Return the minibatches applied by all servers."""
        return AppliedMinibatches.intersection(self._server_connections.applied_minibatches_by_server())

    def save(self, name: str, timeout: float = 60.0) -> AppliedMinibatches:
        """Write a checkpoint of all servers; return the minibatches in it.

        Servers hold back gradients until the checkpoint is written, except those that only some servers have applied.

        Raises
        ------
        ServiceError
            Servers have not applied the same gradients within `timeout` seconds, such as after a worker was lost
            between pushes; try again once the minibatch of that worker has been recomputed.
        """
        return self._server_connections.save_checkpoint(name, timeout)

    def load(self, name: str, optimizer: Any, policy: SyncPolicy | None = None) -> None:
        """Load a checkpoint of any number of servers on all servers, replacing their contents."""
        self._sync_policy = policy or SyncPolicy()
        requests = [{**self._server_configuration(layout, optimizer), "name": name} for layout in self.layouts]
        self._call_on_all_servers(lambda index: self._clients[index].call("load_checkpoint", requests[index]))
        self._server_connections.call_method_on_all_servers("join", {"worker": self.worker})

    def status(self) -> list[dict[str, Any]]:
        """Return the status of each server, such as its version, number of samples, and the steps of its workers."""
        return self._server_connections.status()

    def close(self) -> None:
        """Close all connections once running calls have finished."""
        for pool in (self._push_thread, self._pull_thread):
            pool.shutdown(wait=True, cancel_futures=True)
        self._server_connections.close()

    def __enter__(self) -> ParameterClient:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _server_configuration(self, layout: ServerLayout, optimizer: Any) -> dict[str, Any]:
        return {
            "layout": layout.to_json(),
            "optimizer": describe_optimizer(optimizer),
            "policy": self._sync_policy.to_json(),
        }

    def _select_parts(self, layout: ServerLayout, arrays: Mapping[str, Any]) -> dict[str, MessageArray]:
        """Return a server's parts of complete arrays, by their names in messages."""
        parts: dict[str, MessageArray] = {}
        for dtype in layout.dtypes:
            dense_parts = [np.empty(0, dtype)]
            for piece, _ in layout.pieces_of_dtype(dtype):
                part = piece.part_of(np.ascontiguousarray(arrays[piece.name], dtype))
                if piece.sends_rows:
                    rows = part.reshape(piece.row_shape)
                    parts |= select_rows(piece, rows, np.flatnonzero(rows.any(axis=1)))
                else:
                    dense_parts.append(part)
            parts[DENSE_PREFIX + dtype] = dense_parts
        return parts

    def _pull_from_server(self, index: int, with_slots: bool) -> Message:
        while True:
            fields = {
                "version": max(0, self.versions[index]),
                "incarnation": self._incarnations[index],
                "at_least": self._required_versions[index],
                "slots": with_slots,
                "seconds": 30.0,
            }
            reply = self._clients[index].call("pull_variable", fields)
            if reply.text("incarnation") != self._incarnations[index]:
                self._required_versions[index] = 0
                if self._incarnations[index]:
                    self._clients[index].call("join", {"worker": self.worker})
            if reply.integer("version") >= self._required_versions[index]:
                return reply

    def _combine_push_replies(self, replies: Sequence[Message]) -> PushResult:
        outcomes = [reply.text("outcome") for reply in replies]
        versions = [reply.integer("version") for reply in replies]
        if self._sync_policy.sync:
            for index, outcome in enumerate(outcomes):
                if outcome != "stale":
                    self._required_versions[index] = max(self._required_versions[index], versions[index])
        stalest = max(replies, key=lambda reply: reply.integer("staleness"))
        return PushResult(
            "stale" in outcomes,
            set(outcomes) == {"duplicate"},
            versions,
            stalest.integer("staleness"),
            stalest.number("factor"),
        )


def _sum_duplicate_rows(table: EmbeddingTableSpec, gradient: Any) -> SparseGradient:
    ids, rows = gradient
    return sum_duplicates(np.asarray(ids, np.int64), np.asarray(rows, table.dtype))
