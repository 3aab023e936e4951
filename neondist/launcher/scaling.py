"""Number of workers of an elastic job, within its bounds, as the slots used by other jobs change."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from ..cluster.hosts import HostPool, HostSource, unusable
from ..errors import LaunchError
from ..system import threads
from ..terminal.console import say
from .members import COOL_DOWN, POLL, WAIT
from .monitor import LOOPBACK
from .slots import Demand, SlotTable

LOCAL = "localhost"
INTERVAL = 0.25
"""Seconds between checks of the slots of other jobs."""
_REPORT = 30.0
"""Seconds between messages of a waiting job."""


def read_slots(source: HostSource | None, again: bool = False) -> dict[str, int]:
    """Return the slots of each host of a source; without one, the cores of this machine, as 'localhost'.

    The source is read only once, unless `again`.

    Raises
    ------
    ConfigError
        The list of hosts cannot be read.
    """
    if source is None:
        return {LOCAL: threads.cores()}
    node = os.uname().nodename
    slots_by_host: dict[str, int] = {}
    for host, slots in (source.read() if again else source.at_start).items():
        name = LOCAL if host in (LOCAL, LOOPBACK, node, node.partition(".")[0]) else host
        slots_by_host[name] = slots_by_host.get(name, 0) + slots
    return slots_by_host


def check_bounds(demand: Demand, source: HostSource | None) -> None:
    """Raise an error if a job can never reach its maximum; the list of a script may grow."""
    hosts = read_slots(source)
    slots, capacity = sum(hosts.values()), sum(slots // demand.width for slots in hosts.values())
    if demand.high > capacity and (source is None or not source.is_script):
        place = f"{source.path} lists" if source is not None else "this machine has"
        each = f" of {demand.width} tiles" if demand.width > 1 else ""
        remedy = f"give at most {capacity}, or more slots with --hosts-from FILE" if capacity else "list more slots"
        raise LaunchError(
            f"--num-workers {demand.low}:{demand.high}: {place} {slots} slots, too few for {demand.high} workers{each};"
            f" {remedy} (localhost:SLOTS or HOST:SLOTS)"
        )


class Scaling:
    """Slots of an elastic job.

    Parameters
    ----------
    table : SlotTable
    hosts : callable
        Returns the current slots of each host.
    fail : callable
        Called with an unreachable host, which `hosts` then excludes for a while.
    limit : float
        Seconds for which the job waits for its minimum.
    cooling : callable
        Returns the excluded hosts and the remaining seconds.
    """

    def __init__(
        self,
        table: SlotTable,
        hosts: Callable[[], Mapping[str, int]],
        fail: Callable[[str], None] = lambda host: None,
        limit: float = WAIT,
        cooling: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        self._table, self._hosts, self._fail, self.limit, self._cooling = table, hosts, fail, limit, cooling
        self._next = 0.0

    def wait_for_minimum(
        self,
        stopped: Callable[[], bool],
        report: Callable[[str], None],
        sleep: Callable[[float], None] = time.sleep,
    ) -> list[str] | None:
        """Wait for the minimum; return the host of each worker, or None after the limit or if stopped."""
        start, reports, limit = time.monotonic(), -1, self.limit
        while not stopped():
            if hosts := self._table.take(self._hosts()):
                return hosts
            waited = time.monotonic() - start
            if waited >= limit:
                return None
            if int(waited / _REPORT) > reports:
                reports = int(waited / _REPORT)
                report(f"waiting for slots: {self.describe()}; giving up in {limit - waited:.0f} s")
            sleep(INTERVAL)
        return None

    def is_due(self) -> bool:
        """Whether it is time to compare the number of workers with the slots."""
        if time.monotonic() < self._next:
            return False
        self._next = time.monotonic() + INTERVAL
        return True

    def has_room(self) -> bool:
        """Whether more workers may be started now."""
        return self._table.has_room(self._hosts())

    def take(self) -> list[str]:
        """Return the hosts of workers that may be started now."""
        return self._table.take(self._hosts())

    def surplus(self) -> int:
        """Return the number of workers to release, including those that are already being released."""
        return self._table.surplus(self._hosts())

    def reason(self) -> str:
        """Describe the reason for the release of workers."""
        used = self._table.workers * self._table.demand.width
        return "there are fewer slots" if used > sum(self._hosts().values()) else "another job waits"

    def give(self, host: str, for_good: bool) -> None:
        """Free the slots of a worker, as `SlotTable.give`."""
        self._table.give(host, for_good)

    def lose(self, host: str) -> None:
        """Free the slots of a worker on an unreachable host, and exclude that host for a while."""
        self._fail(host)
        self._table.give(host)

    def give_up(self) -> None:
        """Report that the job ends after it waited too long for its minimum."""
        remedy = "start it again later, or lower --num-workers"
        if cooling := self._cooling():
            remedy = f"correct the list, or the error shown by `ssh {next(iter(cooling))}`"
        say(f"error: gave up after {self.limit:g} s: {self.describe()}; {remedy}", sys.stderr)

    def describe(self) -> str:
        """Describe the users of the slots, and the excluded hosts."""
        texts = [f"{host} is left out for {seconds:.0f} s" for host, seconds in self._cooling().items()]
        return "; ".join([self._table.describe(self._hosts()), *texts])


@contextmanager
def open_scaling(demand: Demand, source: HostSource | None, limit: float = WAIT) -> Iterator[Scaling]:
    """Yield the slots of a job, which shares them with other jobs; the list of hosts is polled meanwhile.

    New hosts are checked first, and are excluded for a while if they cannot run workers.
    """
    pool, closed = HostPool(lambda: read_slots(source, again=True), COOL_DOWN), threading.Event()
    hosts = pool.listed = read_slots(source)
    checked = set(hosts)

    def usable() -> dict[str, int]:
        cooling = pool.cooling()
        return {host: slots for host, slots in hosts.items() if host in checked and host not in cooling}

    def check(joined: set[str]) -> None:
        reasons = unusable(joined - {LOCAL}, os.environ)
        for message in pool.exclude(reasons):
            say(message, sys.stderr)
        checked.update(joined - reasons.keys())

    def watch() -> None:
        nonlocal hosts
        reported, shrunk = "", 0
        while not closed.wait(POLL):
            pool.refresh()
            if pool.error not in ("", reported):
                say(f"hosts: {pool.error}; keeping the last list", sys.stderr)
            reported = pool.error
            shrunk = shrunk + 1 if sum(pool.listed.values()) < sum(hosts.values()) else 0
            if shrunk != 1:  # a partially written list has fewer hosts
                hosts = dict(pool.listed)
            if joined := hosts.keys() - checked - pool.cooling().keys():
                check(joined)

    with SlotTable(demand) as table:
        if source is not None:
            threading.Thread(target=watch, name="hosts", daemon=True).start()
        try:
            yield Scaling(table, usable, pool.fail, limit, pool.cooling)
        finally:
            closed.set()


def describe_change(before: int, after: int, reason: str) -> str:
    """Describe a change of the number of workers."""
    return f"workers: {before} -> {after} ({reason})"


def choose_released(indices: Sequence[int], count: int) -> list[int]:
    """Return the workers to release: the last ones; never worker 0, which writes the run."""
    return sorted((index for index in indices if index > 0), reverse=True)[:count]
