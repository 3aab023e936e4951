"""Parameter server of a separately started task, which runs until the end of the job or the loss of its workers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from ..cluster import TaskSpecDef
from ..errors import LaunchError
from ..system.signals import INTERRUPTED, Signals
from ..terminal.console import say
from .message import Message
from .server import LONGEST_WAIT, ParameterServer, serve_role
from .wire import Method, Service

FIRST_WAIT = 3600.0
"""Seconds for which a server waits for the first worker."""
LEASE = 120.0
"""Seconds without a heartbeat after which a worker is lost."""


class JobService(Service):
    """Start and end of a job, as communicated between its workers and servers.

    Parameters
    ----------
    lose : callable
        Called with the name of a lost worker.
    clock : callable
        Replacement of time.monotonic in tests.
    """

    name = "Job"

    def __init__(self, lose: Callable[[str], object], clock: Callable[[], float] = time.monotonic) -> None:
        self._lose, self._clock = lose, clock
        self._changed = threading.Condition()
        self._started, self._heartbeats = clock(), dict[str, float]()
        self._first_step: int | None = None
        self._stopping = self._over = self._joined = False

    def methods(self) -> Mapping[str, Method]:
        """Return the methods that workers call."""
        return {"alive": self.alive, "begin": self.begin, "begun": self.begun, "stop": self.stop, "end": self.end}

    def alive(self, request: Message) -> Message:
        """Record a heartbeat of a worker; return whether the master requests all workers to stop."""
        with self._changed:
            self._heartbeats[request.text("worker")] = self._clock()
            self._joined = True
            return Message({"stopping": self._stopping})

    def begin(self, request: Message) -> Message:
        """Let the workers start, since the servers have the model; return the step of its first version."""
        with self._changed:
            if self._first_step is None:
                self._first_step = request.integer("first_step")
            self._changed.notify_all()
            return Message({"first_step": self._first_step})

    def begun(self, request: Message) -> Message:
        """Wait for the start; `first_step` is None on timeout."""
        with self._changed:
            seconds = min(request.number("seconds"), LONGEST_WAIT)
            self._changed.wait_for(lambda: self._first_step is not None, seconds)
            return Message({"first_step": self._first_step})

    def stop(self, request: Message) -> Message:
        """Request all workers to stop."""
        with self._changed:
            self._stopping = True
            return Message()

    def end(self, request: Message) -> Message:
        """End the server."""
        self.finish()
        return Message()

    def finish(self) -> None:
        """Let `wait` return."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def wait(self) -> None:
        """Wait for the end of the job.

        Raises
        ------
        LaunchError
            No worker has connected, or all are lost.
        """
        while not self.is_over():
            with self._changed:
                self._changed.wait_for(lambda: self._over, 1.0)

    def is_over(self) -> bool:
        """Return whether the job is over, and remove lost workers; LaunchError if none is left."""
        with self._changed:
            now = self._clock()
            lost = [worker for worker, heartbeat in self._heartbeats.items() if now - heartbeat > LEASE]
            for worker in lost:
                del self._heartbeats[worker]
            over, is_empty = self._over, not self._heartbeats
        for worker in lost:
            self._lose(worker)
        if not over and is_empty and self._joined:
            raise LaunchError(f"parameter server: no message from any worker for {LEASE:g} s; start the job again")
        if not over and is_empty and now - self._started > FIRST_WAIT:
            raise LaunchError(f"parameter server: no worker has connected within {FIRST_WAIT:g} s; start the workers")
        return over


def serve_task(task: TaskSpecDef, environ: Mapping[str, str] | None = None) -> int:
    """Run the server of a task of type 'ps' until the end of the job, SIGTERM or Ctrl-C; return the exit code.

    Raises
    ------
    ConfigError
        As for `serve_role`.
    LaunchError
        No worker has connected, or all are lost.
    """
    server = ParameterServer()
    job = JobService(lambda worker: server.leave(Message({"worker": worker})))
    signals = Signals().listen()
    try:
        with serve_role(task, environ, services=[server, job]) as host:
            say(f"PServer at {host.address}")
            signals.join(lambda name: job.finish())
            job.wait()
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        signals.restore()
    return 0
