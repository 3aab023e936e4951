"""Recovery of servers: checkpoints of all together while a job trains, and their restoration after a restart.

A checkpoint is a consistent cut: gradients wait until all servers have applied the same minibatches, and each server
writes its values, slots and credits. When any server has been restarted, all of them, not it alone, return to the
newest checkpoint, and the queue hands out again what is not credited there. The queue notes, in the same transaction,
the incarnations of the servers that it agrees with, so that a restart of servers or of the master at any moment is
found by comparing these with those that the servers now have. Gradients of an earlier incarnation are refused.
"""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import ConfigError, ServiceError, ServiceUnavailableError
from ..terminal.console import say
from .checkpoint import is_complete
from .group import ServerGroup, UnequalServersError
from .job_status import JobStatus, ServerStatus
from .master import Master
from .message import Message
from .wire import Method, Service

POLL = 0.1
"""Seconds between two looks at the servers."""
INTERVAL, SHARE = 5.0, 50.0
"""Between checkpoints there are at least so many seconds, and as many times the duration of one."""
REPORT, WINDOW = 1.0, 10.0
"""Seconds between two reports on the job, and those of which the throughput is the mean."""
KEEP = 2
"""Checkpoints that stay."""
PREFIX = "checkpoint-"
_FAILURES = 10
"""Consecutive failures after which the reason is printed."""
_PATIENCE = 2.0
"""Seconds that gradients wait for one that only some servers have; later the checkpoint is tried again."""


class ServerRecovery(Service):
    """The checkpoints of the servers of a job; a context manager that looks after them in a thread.

    Parameters
    ----------
    group : ServerGroup
    folder : Path
        Of the checkpoints, which all servers see.
    master : Master
        With a queue that is kept.
    steps : int
        Updates between two checkpoints; 0: as many as keep their share of the time small.
    """

    name = "Recovery"

    def __init__(self, group: ServerGroup, folder: Path, master: Master, steps: int = 0) -> None:
        self._group, self._folder, self._master, self._steps = group, folder, master, steps
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._saved: list[int] | None = None
        self._next, self._begun = 0.0, False
        self._status: list[dict[str, Any]] = []
        self._history: deque[tuple[float, float]] = deque()
        self._thread = threading.Thread(target=self._run, name="recovery", daemon=True)

    def methods(self) -> Mapping[str, Method]:
        """Return the methods of the supervisor, and of the worker that writes the run's records."""
        return {"save": self.save, "figures": self.figures}

    def figures(self, request: Message) -> Message:
        """Return the figures of the job as they are now: its workers, tasks, versions of servers, and throughput."""
        with self._lock:
            self._status = self._group.status()
            found = self._state(time.monotonic())
        figures = {"workers": len(self._master.workers), "tasks": found.tasks}
        figures |= {"server_versions": [one.version for one in found.servers]}
        return Message({"figures": {**figures, "samples_per_second": found.samples_per_second}})

    def save(self, request: Message) -> Message:
        """Write a checkpoint now, as before the end of a job that will be resumed.

        `saved` is false where workers have ended while only some servers had applied a gradient: the one before counts.
        """
        with self._lock:
            versions = self._versions()
            if versions is None:
                raise ServiceUnavailableError("servers are being restored; try again")
            try:
                if versions != self._saved:
                    self._save(versions)
            except UnequalServersError:
                return Message({"saved": False})
            return Message({"saved": True})

    def step(self) -> None:
        """Restore the servers, or write a checkpoint, if it is time.

        Raises
        ------
        ServiceError
            A server does not answer, or servers do not have the same gradients; try again.
        """
        with self._lock:
            if not self._begun:
                self._group.release()  # a master that was killed may have held them
                self._begun = True
            versions = self._versions()
            if versions is None:
                self._settle()
                return
            self._master.ready = True  # before the checkpoint, which may wait for a gradient that some servers lack
            done = self._master.is_done()
            if versions != self._saved and (done or self._is_due(versions)):
                self._save(versions)
            before, self._master.finished = self._master.finished, done and self._saved == versions
            last = self._history[-1][0] if self._history else 0.0
            if self._master.finished is not before or time.monotonic() - last >= REPORT:
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
            except (ServiceUnavailableError, UnequalServersError):  # what has ended is restarted, and computed again
                pass
            except (ServiceError, ConfigError) as error:
                failures += 1
                if failures == _FAILURES:  # workers would wait without a word
                    say(f"warning: servers can be neither saved nor restored: {error}; it is tried again", sys.stderr)

    def _versions(self) -> list[int] | None:
        """Return the servers' versions; None if they do not hold what the queue says."""
        status = self._status = self._group.status()
        if [one["incarnation"] for one in status] != self._master.agreed_with():
            return None
        return [int(one["version"]) for one in status]

    def _report(self) -> None:
        """Write the state of the job for `neondist top`."""
        now = time.monotonic()
        self._history.append((now, self._samples()))
        while self._history[0][0] < now - WINDOW:
            self._history.popleft()
        self._state(now).write(self._folder)

    def _state(self, now: float) -> JobStatus:
        begun, before = self._history[0] if self._history else (now, 0.0)
        rate = max(0.0, self._samples() - before) / (now - begun) if now > begun else 0.0
        servers = [ServerStatus.of(one) for one in self._status]
        counts, workers = self._master.counts(), dict(self._status[0]["workers"])
        return JobStatus(time.time(), rate, counts, workers, servers, self._master.finished)

    def _samples(self) -> float:
        return min(float(one["samples"]) for one in self._status)

    def _settle(self) -> None:
        """Restore the servers from the newest checkpoint; where there is none, begin as soon as they have the model."""
        self._master.ready = self._master.finished = False
        if not self._master.begun:
            return
        found = complete_checkpoints(self._folder)
        if not found:
            status = self._group.status()
            incarnations = [one["incarnation"] for one in status]
            self._master.blank = not all(incarnations)
            if all(incarnations):
                self._save([int(one["version"]) for one in status])
                self._master.agree(incarnations)
            return
        for checkpoint in reversed(found):
            try:
                credits, incarnations = self._group.restore(checkpoint.name)
            except ServiceUnavailableError:
                raise
            except ServiceError:  # damaged
                if checkpoint == found[0]:
                    raise
                continue
            self._master.restore(credits, incarnations)
            self._saved = [int(one["version"]) for one in self._group.status()]
            return

    def _is_due(self, versions: list[int]) -> bool:
        if self._saved is None:
            return True
        if self._steps:
            return versions[0] // self._steps > self._saved[0] // self._steps
        return time.monotonic() >= self._next

    def _save(self, versions: list[int]) -> None:
        start, found = time.monotonic(), _numbered(self._folder)
        number = max(found, default=-1) + 1
        self._group.save(f"{PREFIX}{number:09d}", _PATIENCE)
        self._saved = versions  # gradients that came since are in it, too, and it is written again
        self._next = time.monotonic() + max(INTERVAL, SHARE * (time.monotonic() - start))
        kept = complete_checkpoints(self._folder)[-KEEP:]
        for path in found.values():
            if path not in kept:
                shutil.rmtree(path, ignore_errors=True)


def complete_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints of a folder, oldest first."""
    return [path for _, path in sorted(_numbered(folder).items()) if is_complete(path)]


def _numbered(folder: Path) -> dict[int, Path]:
    found = folder.glob(f"{PREFIX}*")
    return {int(number): path for path in found if (number := path.name[len(PREFIX) :]).isdecimal()}
