"""Parameter server in a separately started task; it runs until the job ends or all workers are lost."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping

from ..errors import LaunchError
from ..system.signals import INTERRUPTED_EXIT_CODE, SignalRecorder
from ..terminal.console import say
from .message import Message
from .server import MAX_WAIT_SECONDS, ParameterServer
from .wire import Service, ServiceHost, ServiceMethod, read_token

FIRST_WORKER_TIMEOUT_SECONDS = 3600.0
WORKER_LEASE_SECONDS = 120.0


class JobService(Service):
    """Service by which the workers and servers of a job agree on its start and end.

    Parameters
    ----------
    on_worker_lost : callable
        Called with the name of a lost worker.
    clock : callable
        Replacement for time.monotonic in tests.
    """

    name = "Job"

    def __init__(self, on_worker_lost: Callable[[str], object], clock: Callable[[], float] = time.monotonic) -> None:
        self._on_worker_lost, self._clock = on_worker_lost, clock
        self._condition = threading.Condition()
        self._start_time, self._last_heartbeat_times = clock(), dict[str, float]()
        self._first_step: int | None = None
        self._stopping = self._has_ended = self._any_worker_joined = False

    def methods(self) -> Mapping[str, ServiceMethod]:
        """Return the methods by name."""
        start_methods = {"alive": self.record_heartbeat, "begin": self.allow_start, "begun": self.wait_for_start}
        return {**start_methods, "stop": self.request_stop, "end": self.end_job}

    def record_heartbeat(self, request: Message) -> Message:
        """Record a heartbeat of a worker; return whether all workers have been requested to stop."""
        with self._condition:
            self._last_heartbeat_times[request.text("worker")] = self._clock()
            self._any_worker_joined = True
            return Message({"stopping": self._stopping})

    def allow_start(self, request: Message) -> Message:
        """Let the workers start, since the servers now have the model; return the step at which the job starts."""
        with self._condition:
            if self._first_step is None:
                self._first_step = request.integer("first_step")
            self._condition.notify_all()
            return Message({"first_step": self._first_step})

    def wait_for_start(self, request: Message) -> Message:
        """Wait for the start of the job; `first_step` of the reply is None on timeout."""
        with self._condition:
            wait_seconds = min(request.number("seconds"), MAX_WAIT_SECONDS)
            self._condition.wait_for(lambda: self._first_step is not None, wait_seconds)
            return Message({"first_step": self._first_step})

    def request_stop(self, request: Message) -> Message:
        """Request all workers to stop."""
        with self._condition:
            self._stopping = True
            return Message()

    def end_job(self, request: Message) -> Message:
        """End the job, and thereby this server."""
        self.stop_waiting_for_end()
        return Message()

    def stop_waiting_for_end(self) -> None:
        """Let `wait_for_end` return."""
        with self._condition:
            self._has_ended = True
            self._condition.notify_all()

    def wait_for_end(self) -> None:
        """Wait for the end of the job.

        Raises
        ------
        LaunchError
            No worker has connected, or all workers are lost.
        """
        while not self.remove_lost_workers_and_check_end():
            with self._condition:
                self._condition.wait_for(lambda: self._has_ended, 1.0)

    def remove_lost_workers_and_check_end(self) -> bool:
        """Remove lost workers, and return whether the job is over; LaunchError if no worker is left."""
        with self._condition:
            now = self._clock()
            lost_workers = [
                name for name, last in self._last_heartbeat_times.items() if now - last > WORKER_LEASE_SECONDS
            ]
            for worker in lost_workers:
                del self._last_heartbeat_times[worker]
            job_ended, no_workers = self._has_ended, not self._last_heartbeat_times
        for worker in lost_workers:
            self._on_worker_lost(worker)
        if not job_ended and no_workers and self._any_worker_joined:
            raise LaunchError(
                f"parameter server: no message from any worker for {WORKER_LEASE_SECONDS:g} s; restart the job"
            )
        if not job_ended and no_workers and now - self._start_time > FIRST_WORKER_TIMEOUT_SECONDS:
            raise LaunchError(
                f"parameter server: no worker has connected within {FIRST_WORKER_TIMEOUT_SECONDS:g} s; restart the job"
            )
        return job_ended


def run_server_task(address: str) -> int:
    """Run a parameter server at HOST:PORT until the end of the job, SIGTERM or Ctrl-C; return the exit code.

    Raises
    ------
    ConfigError
        The address is in use or on another machine, or NEONDIST_TOKEN is not set.
    LaunchError
        No worker has connected, or all workers are lost.
    """
    server = ParameterServer()
    job = JobService(lambda worker: server.remove_worker(Message({"worker": worker})))
    signals = SignalRecorder().install_signal_handlers()
    try:
        with ServiceHost([server, job], address, read_token(os.environ)) as host:
            say(f"PServer at {host.address}")
            signals.add_listener(lambda name: job.stop_waiting_for_end())
            job.wait_for_end()
    except KeyboardInterrupt:
        return INTERRUPTED_EXIT_CODE
    finally:
        signals.restore_signal_handlers()
    return 0
