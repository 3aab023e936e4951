"""The workers of a job with servers: restarted when they are killed, and in an elastic job fewer or more of them."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ..errors import LaunchError, ServiceUnavailableError
from ..system.signals import INTERRUPTED, STOPPED
from ..terminal.console import counted, say
from .fork_server import Process
from .job_nodes import JobNodes
from .remote import UNREACHABLE, cause_of
from .scaling import Scaling, choose_released, describe_change
from .service_process import ServiceProcess

T = TypeVar("T")
MOST_RESTARTS = 5
"""Of a worker that is killed."""
PATIENCE = 60.0
"""Seconds that a worker has to finish its minibatch and end, before it is killed for another job."""


@dataclass(frozen=True)
class TaskProgress:
    """Progress of the tasks of a job.

    Attributes
    ----------
    todo : int
        Tasks that no worker has yet.
    begun : frozenset of int
        Workers that have asked for a task.
    """

    todo: int
    begun: frozenset[int]


@dataclass
class _Worker:
    """A worker that runs: its process, its host, and until when it has to end for another job, if it has to."""

    process: Process
    host: str
    deadline: float | None = None


class WorkerProcesses:
    """The workers of a job.

    Parameters
    ----------
    start : callable
        Starts a worker by its number and the name of its machine, for the first time or again.
    nodes : JobNodes
        The machine of each worker at the beginning, and of one whose machine is gone.
    services : sequence of ServiceProcess
    lost : callable
        Called with the number of a worker that has ended, before it is started again; if it returns False, as where a
        service did not answer, once more while there is no such worker, for others would wait for it.
    scaling : Scaling, optional
        The slots of an elastic job.
    progress : callable, optional
        Returns the tasks of an elastic job; None if that is not known now.
    note : callable
        Called with the name and the fields of each event.
    """

    def __init__(
        self,
        start: Callable[[int, str, bool], Process],
        nodes: JobNodes,
        services: Sequence[ServiceProcess],
        lost: Callable[[int], bool],
        scaling: Scaling | None = None,
        progress: Callable[[], TaskProgress | None] = lambda: None,
        note: Callable[..., object] = lambda event, **fields: None,
    ) -> None:
        self._start, self._nodes, self._services, self._lost, self._note = start, nodes, services, lost, note
        self._scaling, self._progress = scaling, progress
        self._losses: dict[int, int] = {}
        self._codes: dict[int, int] = {}
        self._untold: set[int] = set()
        self._stopping = False
        self._workers: dict[int, _Worker] = {}
        for host in nodes.workers:
            self._add(host)
        note("start", workers=len(nodes.workers))

    @property
    def restarted(self) -> str:
        """Numbers of restarts of workers and services, as text."""
        services = sum(service.restarts for service in self._services)
        more = f" and {counted(services, 'service')}" if services else ""
        return f"{counted(sum(self._losses.values()), 'worker')}{more} started again"

    def forward(self, name: str) -> None:
        """Pass a signal on to all workers."""
        self._stopping = True
        for worker in list(self._workers.values()):
            if worker.process.poll() is None:
                worker.process.send_signal(getattr(signal, name))

    def watch(self) -> int:
        """Wait for all workers, start those again that were killed, and return the exit code."""
        while True:
            try:
                self._keep_services()
            except LaunchError:
                for worker in self._workers.values():
                    worker.process.kill()  # else each would say that it cannot reach the service
                raise
            for at, worker in list(self._workers.items()):
                code = worker.process.poll()
                if code is not None and (failed := self._end(at, worker, code)) is not None:
                    return failed
            self._untold = {at for at in self._untold - self._workers.keys() if not self._lost(at)}
            if not self._workers and (ended := self._end_of_all()) is not None:
                return ended
            if self._scaling is not None and self._scaling.is_due():
                self._scale(self._scaling)
            time.sleep(0.05)

    def insist(self, call: Callable[[], T], patience: float = 120.0) -> T:
        """Return what a call of services returns, once these have been restarted."""
        end = time.monotonic() + patience
        while True:
            self._keep_services()
            try:
                return call()
            except ServiceUnavailableError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.1)

    def _end_of_all(self) -> int | None:
        """Return the exit code of a job without workers; None if it has got others for those whose hosts are gone."""
        if self._codes or self._scaling is None:
            return max(self._codes.values())
        hosts = self._scaling.wait_for_minimum(lambda: self._stopping, lambda text: say(text, sys.stderr))
        if hosts is None:
            if not self._stopping:
                self._scaling.give_up()
            return STOPPED if self._stopping else 1
        self._report(len(hosts), "hosts are back")
        for host in hosts:
            self._add(host)
        return None

    def _end(self, at: int, worker: _Worker, code: int) -> int | None:
        """Take note of the end of a worker, which may be started again; return the exit code if it ends the job."""
        if not self._lost(at):
            self._untold.add(at)
        leaves = worker.deadline is not None and (code == STOPPED or _was_killed(code))
        if not leaves and not self._stopping and _was_killed(code):
            return self._restart(at, worker, code)
        del self._workers[at]
        if self._scaling is not None:
            self._scaling.give(worker.host, for_good=not leaves)
        if leaves:
            return None
        self._codes[at] = code if not _was_killed(code) else STOPPED  # before it listened to a signal passed on
        return None if self._codes[at] in (0, STOPPED) else code

    def _restart(self, at: int, worker: _Worker, code: int) -> int | None:
        losses = self._losses.get(at, 0)
        if losses == MOST_RESTARTS:
            say(f"error: worker {at} was killed {MOST_RESTARTS + 1} times; start the command again", sys.stderr)
            return 128 - code if code < 0 else code
        self._losses[at] = losses + 1
        if code == UNREACHABLE and self._scaling is not None:
            self._report(-1, f"{worker.host} cannot be reached")
            del self._workers[at]
            self._scaling.lose(worker.host)
            return None
        cause, where = cause_of(code, worker.host), ""
        if code == UNREACHABLE:
            others = [one.host for one in self._workers.values() if one is not worker]
            worker.host = self._nodes.replace(worker.host, others)
            where = f" on {worker.host}"
        say(f"worker {at} was killed ({cause}); started again{where}", sys.stderr)
        self._note("restart", worker=at, cause=cause, host=worker.host)
        worker.process = self._start(at, worker.host, True)
        return None

    def _scale(self, scaling: Scaling) -> None:
        """Let workers end for other jobs, or start more where slots are free."""
        if self._stopping:
            return
        for worker in self._workers.values():
            if worker.deadline is not None and time.monotonic() > worker.deadline:
                worker.process.kill()
        if 0 in self._codes.values():  # all tasks are done
            self._release(len(self._workers), "all tasks are done", only_idle=True)
            return
        leaving = sum(worker.deadline is not None for worker in self._workers.values())
        surplus = scaling.surplus() - leaving
        if surplus > 0:
            self._release(surplus, scaling.reason())
        elif not leaving and self._codes == {}:
            self._grow(scaling)

    def _release(self, count: int, reason: str, only_idle: bool = False) -> None:
        """Let the last workers end: at the end of their minibatch, or at once if they have not begun yet."""
        present = [at for at, worker in self._workers.items() if worker.deadline is None]
        progress = self._progress()
        if only_idle:
            present = [at for at in present if progress is not None and at not in progress.begun]
        chosen = choose_released(present, count)
        if not chosen:
            return
        self._report(-len(chosen), reason)
        for at in chosen:
            self._workers[at].deadline = time.monotonic() + PATIENCE
            begun = progress is None or at in progress.begun
            self._workers[at].process.send_signal(signal.SIGTERM if begun else signal.SIGKILL)

    def _grow(self, scaling: Scaling) -> None:
        """Start more workers, if there are slots and tasks for them."""
        if not scaling.has_room():
            return
        progress = self._progress()
        if progress is None or not progress.todo:
            return
        if hosts := scaling.take():
            self._report(len(hosts), "slots are free")
            for host in hosts:
                self._add(host)

    def _report(self, change: int, reason: str) -> None:
        before = sum(worker.deadline is None for worker in self._workers.values())
        say(describe_change(before, before + change, reason), sys.stderr)
        self._note("scale", workers=before + change, before=before, reason=reason)

    def _add(self, host: str) -> None:
        """Start the worker with the lowest number that is free."""
        at = next(number for number in range(len(self._workers) + 1) if number not in self._workers)
        self._workers[at] = _Worker(self._start(at, host, at in self._losses), host)
        self._losses.setdefault(at, 0)
        if self._stopping:  # a signal came in between
            self._workers[at].process.send_signal(signal.SIGTERM)

    def _keep_services(self) -> None:
        for service in self._services:
            service.keep()


def worker_numbers(names: Sequence[Any]) -> frozenset[int]:
    """Return the numbers of workers by their names."""
    return frozenset(int(str(name).rpartition("-")[2]) for name in names)


def _was_killed(code: int) -> bool:
    """Whether an exit code is that of a process, or of a job, that was killed."""
    return code < 0 or (code > 128 and code != INTERRUPTED)
