"""Client of the parameter servers of a session whose workers train asynchronously."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from contextlib import suppress

from ..cluster import TaskSpecDef
from ..comm import all_or_none
from ..errors import ConfigError, ServiceError, ServiceUnavailableError
from ..models import TrainableModel
from ..services.training import AsyncWorkerSpec, ServerUpdate
from ..services.wire import ServiceClient, read_token
from ..strategies import PSLoadBalancing
from .state import SessionState

START_TIMEOUT_SECONDS = 600.0
"""Seconds for which a worker waits for the servers, and for the master to begin."""
CALL_TIMEOUT_SECONDS = 30.0
HEARTBEAT_SECONDS = 2.0
"""Seconds between two heartbeats of a worker."""


class SessionUpdate(ServerUpdate):
    """Updates of a session, whose step is the number of updates by all workers.

    Attributes
    ----------
    first_step : int
        Number of steps before the first update that the servers count.
    """

    first_step = 0

    def set_step(self) -> None:
        """Set the model's step to that of its values: `first_step` plus the servers' updates."""
        self._model.step = self.first_step + self.version
        self._model.steps_without_optimizer = self.first_step

    def pull_values_and_optimizer_state(self) -> None:
        """On the first worker, pull new values and the optimiser's state; on every worker, set the step."""
        super().pull_values_and_optimizer_state()
        self.set_step()


class JobServersClient:
    """Client of a job's parameter servers. Methods are collective over the worker's ranks; the first rank communicates.

    Parameters
    ----------
    task : TaskSpecDef
        Worker or master of a cluster with servers.
    grace : float
        Seconds that the master waits at the end for the other workers.
    environ : mapping
        Environment variables, with the job's token on the first rank.

    Raises
    ------
    ConfigError
        On every rank: if there is no token, or servers cannot update the model.
    """

    def __init__(self, task: TaskSpecDef, state: SessionState, grace: float, environ: Mapping[str, str]) -> None:
        model, world = state.model, state.grid.world
        if not isinstance(model, TrainableModel):
            raise ConfigError(
                "model: expected a model of layers or a TorchModel, which parameter servers can update; give one, or"
                " leave ps out of the cluster"
            )
        if model.strategy is not None and not model.strategy.needs_servers:
            raise ConfigError(
                "model: its strategy is for synchronous ranks; leave out the strategy, or remove ps from the cluster"
            )
        token = ""
        with all_or_none(world, root_only=True):
            if world.rank == 0:
                token = read_token(environ)
        self._state, self._grace_seconds, self._is_master = state, grace, task.is_master()
        self._worker_spec = AsyncWorkerSpec(task.shard_index or 0, tuple(task.ps_hosts), "", token)
        self._num_workers = task.num_workers
        self._strategy = model.strategy or PSLoadBalancing(sync=False)
        self._server_update: SessionUpdate | None = None
        self._clients: list[ServiceClient] = []
        self._closed, self._stop_requested = threading.Event(), threading.Event()
        self._heartbeat_thread = threading.Thread(target=self._send_heartbeats, daemon=True)

    def join_job_and_load_values(self) -> None:
        """Join the job and load the servers' values; on the master, initialise the servers first if needed.

        Raises
        ------
        ServiceError
            On every rank: if the servers or the master are unreachable, or reject the model.
        """
        model, world, first_step = self._state.model, self._state.grid.world, 0
        with all_or_none(world, root_only=True):
            if world.rank == 0:
                self._connect()
                if not self._is_master:
                    first_step = self._wait_for_master()
        num_updates = self._state.step - model.steps_without_optimizer
        self._server_update = SessionUpdate(self._worker_spec, self._strategy, model, world, num_updates)
        with all_or_none(world, root_only=True):
            if world.rank == 0 and self._is_master:
                reply = self._clients[0].call("begin", {"first_step": model.steps_without_optimizer})
                first_step = reply.integer("first_step")
        self._server_update.first_step = world.bcast(first_step)
        model.remote_update = self._server_update
        self.update_step_from_servers()

    def update_step_from_servers(self) -> None:
        """Set the step to the number of updates by all workers; request a stop if the master has requested a stop."""
        assert self._server_update is not None
        self._server_update.set_step()
        if self._stop_requested.is_set():
            self._state.request_stop("the master has ended the job")

    def leave_or_end_job(self) -> None:
        """Leave the job; on the master, stop all other workers and load the final values."""
        assert self._server_update is not None
        world = self._state.grid.world
        with all_or_none(world, root_only=True):
            if world.rank == 0 and self._is_master:
                self._clients[0].call("stop")
        self._server_update.leave_and_wait_for_others(self._num_workers, self._grace_seconds)
        self._server_update.pull_final_values()
        self.update_step_from_servers()

    def stop_servers(self) -> None:
        """Stop the servers, on the master."""
        for client in self._clients if self._is_master else ():
            with suppress(ServiceUnavailableError):
                client.call("end")

    def close(self) -> None:
        """Close the connections; after an error, servers detect the loss of this worker by its missing heartbeats."""
        self._state.model.remote_update = None
        self._closed.set()
        if self._server_update is not None:
            self._server_update.close()
        for client in self._clients:
            client.close()
        if self._heartbeat_thread.is_alive():
            self._heartbeat_thread.join()

    def _connect(self) -> None:
        worker = self._worker_spec
        self._clients = [
            ServiceClient(address, "Job", worker.token, retry_seconds=START_TIMEOUT_SECONDS)
            for address in worker.servers
        ]
        for client in self._clients:
            client.check_service_version()
            client.retry_seconds = CALL_TIMEOUT_SECONDS
        self._heartbeat_thread.start()

    def _wait_for_master(self) -> int:
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        while time.monotonic() < deadline:
            reply = self._clients[0].call("begun", {"seconds": 10.0})
            if reply.fields.get("first_step") is not None:
                return reply.integer("first_step")
        raise ServiceUnavailableError(f"the master has not begun within {START_TIMEOUT_SECONDS:g} s; start the master")

    def _send_heartbeats(self) -> None:
        while not self._closed.wait(HEARTBEAT_SECONDS):
            for client in self._clients:
                with suppress(ServiceError, ValueError):  # the server is unreachable, or the client is closed
                    if client.call("alive", {"worker": self._worker_spec.name}, timeout=10.0).flag("stopping"):
                        self._stop_requested.set()
