"""Number of workers of an elastic job, within its bounds, as the slots used by other jobs change."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from ..cluster.hosts import HostPool, HostSource, find_unusable_hosts, is_this_machine
from ..cluster.ssh_config import unreachable_host_remedy
from ..errors import LaunchError
from ..system import threads
from ..terminal.console import counted, say
from .members import HOST_COOLDOWN_SECONDS, HOST_LIST_POLL_SECONDS, HOST_WAIT_SECONDS
from .slots import SharedSlotTable, WorkerBounds

LOCAL_HOST = "localhost"
SLOT_CHECK_SECONDS = 0.25
_WAIT_REPORT_SECONDS = 30.0


def read_slots(source: HostSource | None, reread: bool = False) -> dict[str, int]:
    """Return the slots of each host of a source; without one, the cores of this machine, as 'localhost'.

    The source is read only once, unless `reread`.

    Raises
    ------
    ConfigError
        The list of hosts cannot be read.
    """
    if source is None:
        return {LOCAL_HOST: threads.count_cores()}
    slots_by_host: dict[str, int] = {}
    for host, slots in (source.read() if reread else source.slots_at_start).items():
        name = LOCAL_HOST if is_this_machine(host) else host
        slots_by_host[name] = slots_by_host.get(name, 0) + slots
    return slots_by_host


def reject_unreachable_maximum(bounds: WorkerBounds, source: HostSource | None) -> None:
    """Raise LaunchError if a job can never reach its maximum number of workers.

    Lists produced by a script are exempt, since they may grow.
    """
    hosts = read_slots(source)
    slots, capacity = sum(hosts.values()), sum(slots // bounds.slots_per_worker for slots in hosts.values())
    if bounds.max_workers > capacity and (source is None or not source.is_script):
        place = f"{source.path} lists" if source is not None else "this machine has"
        tiles_text = f" with {bounds.slots_per_worker} tiles each" if bounds.slots_per_worker > 1 else ""
        remedy = f"give at most {capacity}, or more slots with --hosts-from FILE" if capacity else "list more slots"
        raise LaunchError(
            f"--num-workers {bounds.min_workers}:{bounds.max_workers}: {place} {counted(slots, 'slot')}, too few for"
            f" {counted(bounds.max_workers, 'worker')}{tiles_text}; {remedy} (localhost:SLOTS or HOST:SLOTS)"
        )


class ElasticSlots:
    """Slots of an elastic job.

    Parameters
    ----------
    table : SharedSlotTable
    read_hosts : callable
        Returns the current number of slots of each host.
    exclude_host : callable
        Called with an unreachable host, which `read_hosts` then excludes for a while.
    wait_limit : float
        Seconds for which the job waits for its minimum number of workers.
    list_excluded_hosts : callable
        Returns the excluded hosts and the remaining seconds.
    """

    def __init__(
        self,
        table: SharedSlotTable,
        read_hosts: Callable[[], Mapping[str, int]],
        exclude_host: Callable[[str], None] = lambda host: None,
        wait_limit: float = HOST_WAIT_SECONDS,
        list_excluded_hosts: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        self._table, self._read_hosts, self._exclude_host, self.wait_limit, self._list_excluded_hosts = (
            table, read_hosts, exclude_host, wait_limit, list_excluded_hosts,
        )  # fmt: skip
        self._next_check = 0.0

    def wait_for_minimum(
        self,
        is_stopped: Callable[[], bool],
        report: Callable[[str], None],
        sleep: Callable[[float], None] = time.sleep,
    ) -> list[str] | None:
        """Wait for slots for the minimum number of workers; return their hosts, or None on timeout or if stopped."""
        start, last_report, limit = time.monotonic(), -1, self.wait_limit
        while not is_stopped():
            if hosts := self._table.take_slots(self._read_hosts()):
                return hosts
            waited = time.monotonic() - start
            if waited >= limit:
                return None
            if int(waited / _WAIT_REPORT_SECONDS) > last_report:
                last_report = int(waited / _WAIT_REPORT_SECONDS)
                report(f"waiting for slots: {self.describe_unavailable_slots()}; giving up in {limit - waited:.0f} s")
            sleep(SLOT_CHECK_SECONDS)
        return None

    def is_check_due(self) -> bool:
        """Whether it is time to compare the number of workers with the slots."""
        if time.monotonic() < self._next_check:
            return False
        self._next_check = time.monotonic() + SLOT_CHECK_SECONDS
        return True

    def has_free_slots(self) -> bool:
        """Whether more workers may be started now."""
        return self._table.has_free_slots(self._read_hosts())

    def take_slots(self) -> list[str]:
        """Take slots for the workers that may be started now; return their hosts."""
        return self._table.take_slots(self._read_hosts())

    def surplus_workers(self) -> int:
        """Return the number of workers to release, including those that are already being released."""
        return self._table.surplus_workers(self._read_hosts())

    def release_reason(self) -> str:
        """Describe the reason for the release of workers."""
        used_slots = self._table.workers * self._table.bounds.slots_per_worker
        return "there are fewer slots" if used_slots > sum(self._read_hosts().values()) else "another job is waiting"

    def free_worker_slots(self, host: str, is_job_ending: bool) -> None:
        """Free the slots of a worker, as `SharedSlotTable.free_worker_slots` does."""
        self._table.free_worker_slots(host, is_job_ending)

    def free_slots_on_lost_host(self, host: str) -> None:
        """Free the slots of a worker on an unreachable host, and exclude that host for a while."""
        self._exclude_host(host)
        self._table.free_worker_slots(host)

    def report_giving_up(self) -> None:
        """Report that the job ends because slots for its minimum number of workers were not free in time."""
        remedy = "start the job again later, or lower --num-workers"
        if excluded := self._list_excluded_hosts():
            remedy = unreachable_host_remedy(next(iter(excluded)), os.environ)
        say(f"error: gave up after {self.wait_limit:g} s: {self.describe_unavailable_slots()}; {remedy}", sys.stderr)

    def describe_unavailable_slots(self) -> str:
        """Describe the users of the slots, and the excluded hosts."""
        seconds_by_host = self._list_excluded_hosts()
        texts = [f"{host} is excluded for another {seconds:.0f} s" for host, seconds in seconds_by_host.items()]
        return "; ".join([self._table.describe_slot_usage(self._read_hosts()), *texts])


@contextmanager
def open_elastic_slots(
    bounds: WorkerBounds, source: HostSource | None, wait_limit: float = HOST_WAIT_SECONDS
) -> Iterator[ElasticSlots]:
    """Yield the slots of a job, which shares them with other jobs; the list of hosts is polled until the block ends.

    New hosts are checked first, and are excluded for a while if they cannot run workers.
    """
    pool, closed = HostPool(lambda: read_slots(source, reread=True), HOST_COOLDOWN_SECONDS), threading.Event()
    hosts = pool.listed_slots = read_slots(source)
    checked_hosts = set(hosts)

    def list_usable_slots() -> dict[str, int]:
        excluded = pool.list_excluded_hosts()
        return {host: slots for host, slots in hosts.items() if host in checked_hosts and host not in excluded}

    def check_hosts(joined_hosts: set[str]) -> None:
        reasons = find_unusable_hosts(joined_hosts - {LOCAL_HOST}, os.environ)
        for message in pool.exclude_unusable(reasons):
            say(message, sys.stderr)
        checked_hosts.update(joined_hosts - reasons.keys())

    def watch_hosts() -> None:
        nonlocal hosts
        reported_error, shrunk_polls = "", 0
        while not closed.wait(HOST_LIST_POLL_SECONDS):
            pool.refresh_host_list()
            if pool.refresh_error not in ("", reported_error) and not closed.is_set():
                say(f"hosts: {pool.refresh_error}; keeping the last list", sys.stderr)
            reported_error = pool.refresh_error
            shrunk_polls = shrunk_polls + 1 if sum(pool.listed_slots.values()) < sum(hosts.values()) else 0
            if shrunk_polls != 1:  # a partially written list has fewer hosts
                hosts = dict(pool.listed_slots)
            if joined_hosts := hosts.keys() - checked_hosts - pool.list_excluded_hosts().keys():
                check_hosts(joined_hosts)

    with SharedSlotTable(bounds) as table:
        if source is not None:
            threading.Thread(target=watch_hosts, name="hosts", daemon=True).start()
        try:
            yield ElasticSlots(table, list_usable_slots, pool.exclude_temporarily, wait_limit, pool.list_excluded_hosts)
        finally:
            closed.set()
            if source is not None:
                source.wait_closed()


def describe_worker_count_change(old_count: int, new_count: int, reason: str) -> str:
    """Describe a change of the number of workers."""
    return f"workers: {old_count} -> {new_count} ({reason})"


def choose_workers_to_release(indices: Sequence[int], count: int) -> list[int]:
    """Return the workers to release, the last first, but never worker 0, which writes the output of the run."""
    return sorted((index for index in indices if index > 0), reverse=True)[:count]
