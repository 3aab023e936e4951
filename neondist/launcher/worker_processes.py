"""Workers of a job with servers: restarted when killed, and added or released in an elastic job."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ..errors import LaunchError, ServiceUnavailableError
from ..system.signals import INTERRUPTED_EXIT_CODE, STOPPED_EXIT_CODE
from ..terminal.console import counted, say
from .fork_server import Process
from .job_nodes import JobNodes
from .remote import UNREACHABLE_EXIT_CODE, describe_exit_cause
from .scaling import ElasticSlots, choose_workers_to_release, describe_worker_count_change
from .service_process import ServiceProcess

T = TypeVar("T")
MAX_WORKER_RESTARTS = 5
RELEASE_TIMEOUT = 60.0
"""Seconds for a worker to finish its minibatch and exit before it is killed to free its slots."""


@dataclass(frozen=True)
class TaskProgress:
    """Progress of a job: the number of unassigned tasks, and the workers that have requested a task."""

    unassigned_tasks: int
    started_workers: frozenset[int]


@dataclass
class _Worker:
    """Running worker: its process, its host, and its deadline to exit if it is being released."""

    process: Process
    host: str
    deadline: float | None = None


class WorkerProcesses:
    """Workers of a job.

    Parameters
    ----------
    start : callable
        Starts a worker, given its index, the name of its machine, and whether it is a restart.
    nodes : JobNodes
        Initial machine of each worker, and replacements of lost machines.
    services : sequence of ServiceProcess
    report_lost : callable
        Called with the index of an ended worker before this worker is restarted. Returns False if a service did not
        respond; it is then called again while the worker is absent, since other workers would wait for that worker.
    elastic_slots : ElasticSlots, optional
        Slots of an elastic job.
    fetch_progress : callable, optional
        Returns the progress of an elastic job; None if currently unknown.
    log_event : callable
        Called with the name and the fields of each event.
    """

    def __init__(
        self,
        start: Callable[[int, str, bool], Process],
        nodes: JobNodes,
        services: Sequence[ServiceProcess],
        report_lost: Callable[[int], bool],
        elastic_slots: ElasticSlots | None = None,
        fetch_progress: Callable[[], TaskProgress | None] = lambda: None,
        log_event: Callable[..., object] = lambda event, **fields: None,
    ) -> None:
        self._start, self._nodes, self._services, self._report_lost, self._log_event = (
            start, nodes, services, report_lost, log_event,
        )  # fmt: skip
        self._elastic_slots, self._fetch_progress = elastic_slots, fetch_progress
        self._restart_counts: dict[int, int] = {}
        self._exit_codes: dict[int, int] = {}
        self._unreported_workers: set[int] = set()
        self._stopping = False
        self._workers: dict[int, _Worker] = {}
        for host in nodes.workers:
            self._start_worker(host)
        log_event("start", workers=len(nodes.workers))

    @property
    def restart_summary(self) -> str:
        """Description of the restarts of workers and services."""
        service_restarts = sum(service.restarts for service in self._services)
        suffix = f" and {counted(service_restarts, 'service')}" if service_restarts else ""
        return f"{counted(sum(self._restart_counts.values()), 'worker')}{suffix} restarted"

    def forward_signal(self, name: str) -> None:
        """Pass a signal on to all workers."""
        self._stopping = True
        for worker in list(self._workers.values()):
            if worker.process.poll() is None:
                worker.process.send_signal(getattr(signal, name))

    def watch_workers(self) -> int:
        """Wait for all workers, restart those that were killed, and return the exit code."""
        while True:
            try:
                self._restart_killed_services()
            except LaunchError:
                for worker in self._workers.values():
                    worker.process.kill()  # otherwise each would report the unreachable service
                raise
            for index, worker in list(self._workers.items()):
                code = worker.process.poll()
                if code is not None and (failed := self._handle_exit(index, worker, code)) is not None:
                    return failed
            self._unreported_workers = {
                index for index in self._unreported_workers - self._workers.keys() if not self._report_lost(index)
            }
            if not self._workers and (ended := self._exit_code_or_new_workers()) is not None:
                return ended
            if self._elastic_slots is not None and self._elastic_slots.is_check_due():
                self._adjust_worker_count(self._elastic_slots)
            time.sleep(0.05)

    def call_with_restarts(self, call: Callable[[], T], timeout: float = 120.0) -> T:
        """Call services, restarting them as needed, until the call succeeds; return its result."""
        deadline = time.monotonic() + timeout
        while True:
            self._restart_killed_services()
            try:
                return call()
            except ServiceUnavailableError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def _exit_code_or_new_workers(self) -> int | None:
        """Return the exit code of a job without workers; None if hosts for new workers were found."""
        if self._exit_codes or self._elastic_slots is None:
            return max(self._exit_codes.values())
        hosts = self._elastic_slots.wait_for_minimum(lambda: self._stopping, lambda text: say(text, sys.stderr))
        if hosts is None:
            if not self._stopping:
                self._elastic_slots.report_giving_up()
            return STOPPED_EXIT_CODE if self._stopping else 1
        self._report_change(len(hosts), "hosts are back")
        for host in hosts:
            self._start_worker(host)
        return None

    def _handle_exit(self, index: int, worker: _Worker, code: int) -> int | None:
        """Record the exit of a worker and restart it if needed; return the exit code if it ends the job."""
        if not self._report_lost(index):
            self._unreported_workers.add(index)
        is_released = worker.deadline is not None and (code == STOPPED_EXIT_CODE or _was_killed(code))
        if not is_released and not self._stopping and _was_killed(code):
            return self._restart_worker(index, worker, code)
        del self._workers[index]
        if self._elastic_slots is not None:
            self._elastic_slots.free_worker_slots(worker.host, is_job_ending=not is_released)
        if is_released:
            return None
        # a killed worker received the signal before its handler was installed
        self._exit_codes[index] = code if not _was_killed(code) else STOPPED_EXIT_CODE
        return None if self._exit_codes[index] in (0, STOPPED_EXIT_CODE) else code

    def _restart_worker(self, index: int, worker: _Worker, code: int) -> int | None:
        restarts = self._restart_counts.get(index, 0)
        if restarts == MAX_WORKER_RESTARTS:
            say(
                f"error: worker {index} was killed {MAX_WORKER_RESTARTS + 1} times; continue with --resume auto",
                sys.stderr,
            )
            return 128 - code if code < 0 else code
        self._restart_counts[index] = restarts + 1
        if code == UNREACHABLE_EXIT_CODE and self._elastic_slots is not None:
            self._report_change(-1, f"{worker.host} cannot be reached")
            del self._workers[index]
            self._elastic_slots.free_slots_on_lost_host(worker.host)
            return None
        cause, location = describe_exit_cause(code, worker.host), ""
        if code == UNREACHABLE_EXIT_CODE:
            hosts = [other.host for other in self._workers.values() if other is not worker]
            worker.host = self._nodes.choose_replacement_node(worker.host, hosts)
            location = f" on {worker.host}"
        say(f"worker {index} was killed ({cause}); restarted{location}", sys.stderr)
        self._log_event("restart", worker=index, cause=cause, host=worker.host)
        worker.process = self._start(index, worker.host, True)
        return None

    def _adjust_worker_count(self, elastic_slots: ElasticSlots) -> None:
        """Release workers for other jobs, or start more where slots are free."""
        if self._stopping:
            return
        for worker in self._workers.values():
            if worker.deadline is not None and time.monotonic() > worker.deadline:
                worker.process.kill()
        if 0 in self._exit_codes.values():  # all tasks are done
            self._release_workers(len(self._workers), "all tasks are done", only_idle=True)
            return
        num_leaving = sum(worker.deadline is not None for worker in self._workers.values())
        surplus = elastic_slots.surplus_workers() - num_leaving
        if surplus > 0:
            self._release_workers(surplus, elastic_slots.release_reason())
        elif not num_leaving and self._exit_codes == {}:
            self._add_workers(elastic_slots)

    def _release_workers(self, count: int, reason: str, only_idle: bool = False) -> None:
        """Release the workers with the highest indices, after their minibatch, or at once if they have no task."""
        candidate_indices = [index for index, worker in self._workers.items() if worker.deadline is None]
        progress = self._fetch_progress()
        if only_idle:
            candidate_indices = [
                index for index in candidate_indices if progress is not None and index not in progress.started_workers
            ]
        released_indices = choose_workers_to_release(candidate_indices, count)
        if not released_indices:
            return
        self._report_change(-len(released_indices), reason)
        for index in released_indices:
            self._workers[index].deadline = time.monotonic() + RELEASE_TIMEOUT
            has_started = progress is None or index in progress.started_workers
            self._workers[index].process.send_signal(signal.SIGTERM if has_started else signal.SIGKILL)

    def _add_workers(self, elastic_slots: ElasticSlots) -> None:
        """Start more workers if slots and tasks are available."""
        if not elastic_slots.has_free_slots():
            return
        progress = self._fetch_progress()
        if progress is None or not progress.unassigned_tasks:
            return
        if hosts := elastic_slots.take_slots():
            self._report_change(len(hosts), "slots are free")
            for host in hosts:
                self._start_worker(host)

    def _report_change(self, change: int, reason: str) -> None:
        old_count = sum(worker.deadline is None for worker in self._workers.values())
        say(describe_worker_count_change(old_count, old_count + change, reason), sys.stderr)
        self._log_event("scale", workers=old_count + change, before=old_count, reason=reason)

    def _start_worker(self, host: str) -> None:
        index = next(number for number in range(len(self._workers) + 1) if number not in self._workers)
        self._workers[index] = _Worker(self._start(index, host, index in self._restart_counts), host)
        self._restart_counts.setdefault(index, 0)
        if self._stopping:  # a signal arrived in the meantime
            self._workers[index].process.send_signal(signal.SIGTERM)

    def _restart_killed_services(self) -> None:
        for service in self._services:
            service.restart_if_killed()


def worker_indices(names: Sequence[Any]) -> frozenset[int]:
    """Return the indices in the names of workers."""
    return frozenset(int(str(name).rpartition("-")[2]) for name in names)


def _was_killed(code: int) -> bool:
    return code < 0 or (code > 128 and code != INTERRUPTED_EXIT_CODE)
