"""Recovery of servers: consistent checkpoints during training, and their restoration after a restart.

A checkpoint is a consistent cut: new gradients are held back until all servers have applied the same minibatches; then
each server writes its values, slots and applied minibatches. After the restart of any server, all servers return to the
newest checkpoint, and the queue reissues the minibatches that this checkpoint lacks. In the same transaction, the
queue records the server incarnations that match its state. Comparing them with the current incarnations detects a
restart of servers or of the master at any moment. Gradients of an earlier incarnation are rejected.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import ServiceError, ServiceUnavailableError, UserError
from ..terminal.console import say
from .checkpoint import count_servers
from .group import DivergedServersError, ServerConnections
from .job_status import JobStatus, ServerStatus
from .master import Master
from .message import Message
from .wire import Service, ServiceMethod

SERVER_POLL_SECONDS = 0.1
MIN_SAVE_INTERVAL_SECONDS, MIN_INTERVAL_IN_SAVE_DURATIONS = 5.0, 50.0
STATUS_INTERVAL_SECONDS, THROUGHPUT_WINDOW_SECONDS = 1.0, 10.0
KEPT_CHECKPOINTS = 2
CHECKPOINT_PREFIX = "checkpoint-"
_FAILURES_BEFORE_WARNING = 10
"""Consecutive failures after which the reason is printed."""
_HOLD_TIMEOUT_SECONDS = 2.0
"""Seconds for which a save holds back gradients until all servers have applied the same minibatches."""


class ServerRestoreError(ServiceError):
    """The servers cannot be restored at the start of a job."""


class ServerRecovery(Service):
    """Checkpoints of the servers of a job; a context manager that saves and restores them in a thread.

    Parameters
    ----------
    group : ServerConnections
    folder : Path
        Folder of the checkpoints, shared by all servers.
    master : Master
        Master with a persistent queue.
    steps : int
        Updates between checkpoints. 0: the interval depends on the time that a checkpoint takes.
    """

    name = "Recovery"

    def __init__(self, group: ServerConnections, folder: Path, master: Master, steps: int = 0) -> None:
        self._group, self._folder, self._master, self._steps_between_saves = group, folder, master, steps
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._saved_versions: list[int] | None = None
        self._next_save_time, self._servers_accept_gradients = 0.0, False
        self._server_status: list[dict[str, Any]] = []
        self._applied_sample_history: deque[tuple[float, float]] = deque()
        self._thread = threading.Thread(target=self._run, name="recovery", daemon=True)

    def methods(self) -> Mapping[str, ServiceMethod]:
        """Return the methods by name."""
        return {"save": self.save, "statistics": self.report_statistics}

    def report_statistics(self, request: Message) -> Message:
        """Return the job's workers, tasks, versions of servers and throughput, and the mean loss of an epoch."""
        with self._lock:
            self._server_status = self._group.status()
            status = self._job_status(time.monotonic())
        statistics = {"workers": len(self._master.workers), "tasks": status.tasks}
        statistics |= {"server_versions": [server.version for server in status.servers]}
        statistics |= {"train_loss": self._master.mean_training_loss(request.integer("epoch"))}
        return Message({"statistics": {**statistics, "samples_per_second": status.samples_per_second}})

    def save(self, request: Message) -> Message:
        """Write a checkpoint now, such as before the end of a job that will be resumed.

        `saved` is false if workers ended while only some servers had applied a gradient; the last checkpoint is kept.
        """
        with self._lock:
            if self._master.read_matching_incarnations() is None:  # no worker has begun training
                return Message({"saved": True})
            versions = self._read_versions_matching_queue()
            if versions is None:
                raise ServiceUnavailableError("servers are being restored; try again")
            try:
                if versions != self._saved_versions:
                    self._save_checkpoint(versions)
            except DivergedServersError:
                return Message({"saved": False})
            return Message({"saved": True})

    def restore_or_save_servers(self) -> None:
        """Restore the servers, or write a checkpoint if one is due.

        Raises
        ------
        ServiceError
            A server does not respond, or servers have applied different gradients; call the method again.
        """
        with self._lock:
            if not self._servers_accept_gradients:
                self._group.accept_gradients_again()  # a killed master may have left gradients held back
                self._servers_accept_gradients = True
            versions = self._read_versions_matching_queue()
            if versions is None:
                self._restore_servers()
                return
            self._master.servers_match_queue = True  # before the checkpoint, which may wait for a gradient
            all_tasks_done = self._master.all_tasks_done()
            if versions != self._saved_versions and (all_tasks_done or self._is_checkpoint_due(versions)):
                self._save_checkpoint(versions)
            were_saved = self._master.results_saved
            self._master.results_saved = all_tasks_done and self._saved_versions == versions
            last_report = self._applied_sample_history[-1][0] if self._applied_sample_history else 0.0
            is_status_due = time.monotonic() - last_report >= STATUS_INTERVAL_SECONDS
            if self._master.results_saved is not were_saved or is_status_due:
                self._write_job_status()

    def __enter__(self) -> ServerRecovery:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        failures = 0
        while not self._closed.wait(SERVER_POLL_SECONDS):
            try:
                self.restore_or_save_servers()
                failures = 0
            except ServerRestoreError as error:
                say(f"error: {error}", sys.stderr)
                os._exit(2)
            except (ServiceUnavailableError, DivergedServersError):  # resolved by restarts and recomputed minibatches
                pass
            except UserError as error:
                failures += 1
                if failures == _FAILURES_BEFORE_WARNING:  # workers would wait silently
                    say(f"warning: cannot save or restore the servers: {error}; retrying", sys.stderr)
            except Exception:  # end the master, and thereby the job: workers would wait forever
                traceback.print_exc()
                os._exit(1)

    def _read_versions_matching_queue(self) -> list[int] | None:
        """Return the versions of the servers; None if they do not agree with the queue."""
        status = self._server_status = self._group.status()
        if [server["incarnation"] for server in status] != self._master.read_matching_incarnations():
            return None
        return [int(server["version"]) for server in status]

    def _write_job_status(self) -> None:
        """Write the status of the job for `neondist top`."""
        now = time.monotonic()
        self._applied_sample_history.append((now, self._min_applied_samples()))
        while self._applied_sample_history[0][0] < now - THROUGHPUT_WINDOW_SECONDS:
            self._applied_sample_history.popleft()
        self._job_status(now).write(self._folder)

    def _job_status(self, now: float) -> JobStatus:
        start, start_samples = self._applied_sample_history[0] if self._applied_sample_history else (now, 0.0)
        rate = max(0.0, self._min_applied_samples() - start_samples) / (now - start) if now > start else 0.0
        servers = [ServerStatus.from_reply(server) for server in self._server_status]
        task_counts, workers = self._master.task_counts_by_state(), dict(self._server_status[0]["workers"])
        return JobStatus(time.time(), rate, task_counts, workers, servers, self._master.results_saved)

    def _min_applied_samples(self) -> float:
        return min(float(server["samples"]) for server in self._server_status)

    def _restore_servers(self) -> None:
        """Restore the servers from the newest checkpoint.

        At the start of a job, first wait until a worker has configured the servers, since another job with other
        servers may have written the checkpoint. Without a checkpoint, start with the values of this worker.

        Raises
        ------
        ServerRestoreError
            No checkpoint can be restored at the start of a job.
        """
        self._master.servers_match_queue = self._master.results_saved = False
        if not self._master.has_training_parameters:
            return
        checkpoints = list_complete_checkpoints(self._folder)
        is_first_start = self._master.read_matching_incarnations() is None
        if is_first_start or not checkpoints or count_servers(checkpoints[-1]) != len(self._group):
            status = self._group.status()
            incarnations = [server["incarnation"] for server in status]
            self._master.servers_need_model = not all(incarnations)
            if not all(incarnations):
                return
            if not checkpoints:
                self._save_checkpoint([int(server["version"]) for server in status])
                self._master.reset_tasks(self._group.applied_minibatches_by_server()[0], incarnations)
                return
        for checkpoint in reversed(checkpoints):
            try:
                minibatches, incarnations = self._group.restore_checkpoint(checkpoint.name)
            except ServiceUnavailableError:
                raise
            except ServiceError as error:  # the checkpoint is damaged
                if checkpoint != checkpoints[0]:
                    say(f"warning: {error}; continuing from the preceding checkpoint", sys.stderr)
                    continue
                if is_first_start:
                    message = f"{error}; or delete {self._folder} to continue from checkpoint.h5"
                    raise ServerRestoreError(message) from error
                raise
            self._master.reset_tasks(minibatches, incarnations)
            if count_servers(checkpoint) == len(self._group):  # otherwise, save for this number of servers
                self._saved_versions = [int(server["version"]) for server in self._group.status()]
            return

    def _is_checkpoint_due(self, versions: list[int]) -> bool:
        if self._saved_versions is None:
            return True
        if self._steps_between_saves:
            return versions[0] // self._steps_between_saves > self._saved_versions[0] // self._steps_between_saves
        return time.monotonic() >= self._next_save_time

    def _save_checkpoint(self, versions: list[int]) -> None:
        start, checkpoints = time.monotonic(), _checkpoints_by_number(self._folder)
        number = max(checkpoints, default=-1) + 1
        self._group.save_checkpoint(f"{CHECKPOINT_PREFIX}{number:09d}", _HOLD_TIMEOUT_SECONDS)
        self._saved_versions = versions  # the files may contain later gradients; then another checkpoint is written
        end = time.monotonic()
        self._next_save_time = end + max(MIN_SAVE_INTERVAL_SECONDS, MIN_INTERVAL_IN_SAVE_DURATIONS * (end - start))
        retained = list_complete_checkpoints(self._folder)[-KEPT_CHECKPOINTS:]
        for path in checkpoints.values():
            if path not in retained:
                shutil.rmtree(path, ignore_errors=True)


def list_complete_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints of a folder, oldest first."""
    return [path for _, path in sorted(_checkpoints_by_number(folder).items()) if count_servers(path) is not None]


def _checkpoints_by_number(folder: Path) -> dict[int, Path]:
    paths = folder.glob(f"{CHECKPOINT_PREFIX}*")
    return {int(number): path for path in paths if (number := path.name[len(CHECKPOINT_PREFIX) :]).isdecimal()}
