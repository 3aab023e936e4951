"""The parameter servers of a session whose workers train asynchronously."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from contextlib import suppress

from ..cluster import TaskSpecDef
from ..comm import all_or_none
from ..errors import ConfigError, ServiceError, ServiceUnavailableError
from ..models import TrainableModel
from ..services.training import ServerUpdate, WorkerPlace
from ..services.wire import ServiceClient, read_token
from ..strategies import PSLoadBalancing
from .state import SessionState

START_WAIT = 600.0
"""Seconds that a worker waits for the servers to come, and for the master to begin."""
PATIENCE = 30.0
BEAT = 2.0
"""Seconds between two messages that say that a worker is alive."""


class JobServers:
    """The servers of a session's job; methods are collective over the ranks of this worker, the first speaks.

    Parameters
    ----------
    task : TaskSpecDef
        A worker, or the master, of a cluster with servers.
    state : SessionState
    grace : float
        Seconds that the master waits at the end for the other workers.
    environ : mapping
        Has the job's token, on the first rank.

    Raises
    ------
    ConfigError
        On every rank: no token, or a model that servers cannot update.
    """

    def __init__(self, task: TaskSpecDef, state: SessionState, grace: float, environ: Mapping[str, str]) -> None:
        model, world = state.model, state.grid.world
        if not isinstance(model, TrainableModel):
            raise ConfigError(
                "model: parameter servers update models of layers and a TorchModel; give one of these, or leave ps out"
                " of the cluster"
            )
        if model.strategy is not None and not model.strategy.needs_servers:
            raise ConfigError(
                "model: its strategy is for ranks that update together; leave it out, or ps out of the cluster"
            )
        token = ""
        with all_or_none(world):
            if world.rank == 0:
                token = read_token(environ)
        self._state, self._grace, self._is_master = state, grace, task.is_master()
        self._place = WorkerPlace(task.shard_index or 0, tuple(task.ps_hosts), "", token)
        self._workers = task.num_workers
        self._strategy = model.strategy or PSLoadBalancing(sync=False)
        self._remote: ServerUpdate | None = None
        self._clients: list[ServiceClient] = []
        self._left, self._asked_to_stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._tell_alive, daemon=True)
        self._first_step = 0

    def join(self) -> None:
        """Take over the servers' values; on the master, give them the model first, unless they have it.

        Raises
        ------
        ServiceError
            On every rank: the servers or the master do not come, or refuse the model.
        """
        model, world = self._state.model, self._state.grid.world
        with all_or_none(world):
            if world.rank == 0:
                self._connect()
                if not self._is_master:
                    self._first_step = self._wait_for_master()
        self._remote = ServerUpdate(self._place, self._strategy, model.built, model.optimizer, world)
        with all_or_none(world):
            if world.rank == 0 and self._is_master:
                begun = self._clients[0].call("begin", {"first_step": self._state.step})
                self._first_step = begun.integer("first_step")
        self._first_step = world.bcast(self._first_step)
        model.remote = self._remote
        self.count()

    def count(self) -> None:
        """Take over the number of updates by all workers; ask to stop where the master has."""
        assert self._remote is not None
        model = self._state.model
        model.step = self._first_step + self._remote.version
        model.uncounted = model.step  # by its own optimiser, with which a job without servers may go on
        if self._asked_to_stop.is_set():
            self._state.request_stop("the master has ended the job")

    def leave(self) -> None:
        """End this worker's part; on the master, let all others stop, and take over the last values."""
        assert self._remote is not None
        world = self._state.grid.world
        with all_or_none(world):
            if world.rank == 0 and self._is_master:
                self._clients[0].call("stop")
        self._remote.wait_for_others(self._workers, self._grace)
        self._remote.finish()
        self.count()

    def end(self) -> None:
        """End the servers, where this is the master."""
        for client in self._clients if self._is_master else ():
            with suppress(ServiceUnavailableError):
                client.call("end")

    def close(self) -> None:
        """End the connections, after an error, too: servers find after a while that this worker is lost."""
        self._state.model.remote = None
        self._left.set()
        if self._remote is not None:
            self._remote.close()
        for client in self._clients:
            client.close()
        if self._thread.is_alive():
            self._thread.join()

    def _connect(self) -> None:
        place = self._place
        self._clients = [ServiceClient(one, "Job", place.token, patience=START_WAIT) for one in place.servers]
        for client in self._clients:
            client.hello()
            client.patience = PATIENCE
        self._thread.start()

    def _wait_for_master(self) -> int:
        end = time.monotonic() + START_WAIT
        while time.monotonic() < end:
            reply = self._clients[0].call("begun", {"seconds": 10.0})
            if reply.fields.get("first_step") is not None:
                return reply.integer("first_step")
        raise ServiceUnavailableError(f"the master has not begun within {START_WAIT:g} s; start it, too")

    def _tell_alive(self) -> None:
        while not self._left.wait(BEAT):
            for client in self._clients:
                with suppress(ServiceError, ValueError):  # it is closed
                    if client.call("alive", {"worker": self._place.name}, timeout=10.0).flag("stopping"):
                        self._asked_to_stop.set()
