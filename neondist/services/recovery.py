"""Recovery of servers: consistent checkpoints during training, and their restoration after a restart.

A checkpoint is a consistent cut: gradients are held until all servers have applied the same minibatches, and each
server writes its values, slots and credits. After the restart of any server, all of them return to the newest
checkpoint, and the queue reissues the minibatches that are not credited there. In the same transaction, the queue
records the incarnations of the servers that it agrees with. Comparing them with the current incarnations detects a
restart of servers or of the master at any moment. Gradients of an earlier incarnation are refused.
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
from .checkpoint import is_complete
from .group import ServerGroup, UnequalServersError
from .job_status import JobStatus, ServerStatus
from .master import Master
from .message import Message
from .wire import Method, Service

POLL = 0.1
"""Seconds between checks of the servers."""
INTERVAL, SHARE = 5.0, 50.0
"""Minimum interval between checkpoints, in seconds and in durations of a checkpoint."""
REPORT, WINDOW = 1.0, 10.0
"""Seconds between reports on the job, and seconds over which the throughput is averaged."""
KEEP = 2
"""Number of checkpoints to keep."""
PREFIX = "checkpoint-"
_FAILURES = 10
"""Consecutive failures after which the reason is printed."""
_PATIENCE = 2.0
"""Seconds for which gradients are held for one that only some servers have, before the checkpoint is retried."""


class ServerRecovery(Service):
    """Checkpoints of the servers of a job; a context manager that saves and restores them in a thread.

    Parameters
    ----------
    group : ServerGroup
    folder : Path
        Folder of the checkpoints, shared by all servers.
    master : Master
        Master with a persistent queue.
    steps : int
        Updates between checkpoints; 0: as many as limit the time spent on them.
    """

    name = "Recovery"

    def __init__(self, group: ServerGroup, folder: Path, master: Master, steps: int = 0) -> None:
        self._group, self._folder, self._master, self._steps = group, folder, master, steps
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._saved: list[int] | None = None
        self._next, self._started = 0.0, False
        self._status: list[dict[str, Any]] = []
        self._history: deque[tuple[float, float]] = deque()
        self._thread = threading.Thread(target=self._run, name="recovery", daemon=True)

    def methods(self) -> Mapping[str, Method]:
        """Return the methods of the supervisor, and of the worker that writes the run's records."""
        return {"save": self.save, "figures": self.figures}

    def figures(self, request: Message) -> Message:
        """Return the current figures of the job: its workers, tasks, versions of servers, and throughput."""
        with self._lock:
            self._status = self._group.status()
            state = self._job_status(time.monotonic())
        figures = {"workers": len(self._master.workers), "tasks": state.tasks}
        figures |= {"server_versions": [server.version for server in state.servers]}
        return Message({"figures": {**figures, "samples_per_second": state.samples_per_second}})

    def save(self, request: Message) -> Message:
        """Write a checkpoint now, such as before the end of a job that will be resumed.

        `saved` is false if workers ended while only some servers had applied a gradient; the last checkpoint is kept.
        """
        with self._lock:
            versions = self._read_versions()
            if versions is None:
                raise ServiceUnavailableError("servers are being restored; try again")
            try:
                if versions != self._saved:
                    self._save(versions)
            except UnequalServersError:
                return Message({"saved": False})
            return Message({"saved": True})

    def step(self) -> None:
        """Restore the servers, or write a checkpoint if one is due.

        Raises
        ------
        ServiceError
            A server does not respond, or servers have different gradients; try again.
        """
        with self._lock:
            if not self._started:
                self._group.release()  # a killed master may have left gradients held
                self._started = True
            versions = self._read_versions()
            if versions is None:
                self._restore()
                return
            self._master.ready = True  # before the checkpoint, which may wait for a gradient
            is_done = self._master.is_done()
            if versions != self._saved and (is_done or self._is_due(versions)):
                self._save(versions)
            was_finished, self._master.finished = self._master.finished, is_done and self._saved == versions
            last_report = self._history[-1][0] if self._history else 0.0
            if self._master.finished is not was_finished or time.monotonic() - last_report >= REPORT:
                self._report()

    def __enter__(self) -> ServerRecovery:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        failures = 0
        while not self._closed.wait(POLL):
            try:
                self.step()
                failures = 0
            except (ServiceUnavailableError, UnequalServersError):  # processes restart, and minibatches are recomputed
                pass
            except UserError as error:
                failures += 1
                if failures == _FAILURES:  # workers would wait silently
                    say(f"warning: servers can be neither saved nor restored: {error}; it is tried again", sys.stderr)
            except Exception:  # end the master, and thereby the job: workers would wait forever
                traceback.print_exc()
                os._exit(1)

    def _read_versions(self) -> list[int] | None:
        """Return the versions of the servers; None if they do not agree with the queue."""
        status = self._status = self._group.status()
        if [server["incarnation"] for server in status] != self._master.read_incarnations():
            return None
        return [int(server["version"]) for server in status]

    def _report(self) -> None:
        """Write the status of the job for `neondist top`."""
        now = time.monotonic()
        self._history.append((now, self._samples()))
        while self._history[0][0] < now - WINDOW:
            self._history.popleft()
        self._job_status(now).write(self._folder)

    def _job_status(self, now: float) -> JobStatus:
        start, start_samples = self._history[0] if self._history else (now, 0.0)
        rate = max(0.0, self._samples() - start_samples) / (now - start) if now > start else 0.0
        servers = [ServerStatus.of(server) for server in self._status]
        counts, workers = self._master.counts(), dict(self._status[0]["workers"])
        return JobStatus(time.time(), rate, counts, workers, servers, self._master.finished)

    def _samples(self) -> float:
        return min(float(server["samples"]) for server in self._status)

    def _restore(self) -> None:
        """Restore the servers from the newest checkpoint; without one, start once they have the model."""
        self._master.ready = self._master.finished = False
        if not self._master.is_configured:
            return
        checkpoints = complete_checkpoints(self._folder)
        if not checkpoints:
            status = self._group.status()
            incarnations = [server["incarnation"] for server in status]
            self._master.blank = not all(incarnations)
            if all(incarnations):
                self._save([int(server["version"]) for server in status])
                self._master.agree(incarnations)
            return
        for checkpoint in reversed(checkpoints):
            try:
                credits, incarnations = self._group.restore(checkpoint.name)
            except ServiceUnavailableError:
                raise
            except ServiceError:  # damaged
                if checkpoint == checkpoints[0]:
                    raise
                continue
            self._master.restore(credits, incarnations)
            self._saved = [int(server["version"]) for server in self._group.status()]
            return

    def _is_due(self, versions: list[int]) -> bool:
        if self._saved is None:
            return True
        if self._steps:
            return versions[0] // self._steps > self._saved[0] // self._steps
        return time.monotonic() >= self._next

    def _save(self, versions: list[int]) -> None:
        start, folders = time.monotonic(), _find_checkpoints(self._folder)
        number = max(folders, default=-1) + 1
        self._group.save(f"{PREFIX}{number:09d}", _PATIENCE)
        self._saved = versions  # later gradients may be included; it is then written again
        self._next = time.monotonic() + max(INTERVAL, SHARE * (time.monotonic() - start))
        retained = complete_checkpoints(self._folder)[-KEEP:]
        for path in folders.values():
            if path not in retained:
                shutil.rmtree(path, ignore_errors=True)


def complete_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints of a folder, oldest first."""
    return [path for _, path in sorted(_find_checkpoints(folder).items()) if is_complete(path)]


def _find_checkpoints(folder: Path) -> dict[int, Path]:
    paths = folder.glob(f"{PREFIX}*")
    return {int(number): path for path in paths if (number := path.name[len(PREFIX) :]).isdecimal()}
