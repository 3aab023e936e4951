"""The number of workers of an elastic job: within its bounds, by the slots that other jobs leave."""

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
"""Seconds between two looks at the slots of other jobs."""
_REPORT = 30.0
"""Seconds between two messages of a job that waits."""


def read_slots(source: HostSource | None, again: bool = False) -> dict[str, int]:
    """Return the slots of each host: those of a source of hosts, or the cores of this machine, which is 'localhost'.

    The source is read once, or `again`.

    Raises
    ------
    ConfigError
        The list cannot be read.
    """
    if source is None:
        return {LOCAL: threads.cores()}
    node = os.uname().nodename
    found: dict[str, int] = {}
    for host, slots in (source.read() if again else source.at_start).items():
        name = LOCAL if host in (LOCAL, LOOPBACK, node, node.partition(".")[0]) else host
        found[name] = found.get(name, 0) + slots
    return found


def check_bounds(demand: Demand, source: HostSource | None) -> None:
    """Raise an error if a job could never have its maximum; the list of a script may grow."""
    hosts = read_slots(source)
    slots, most = sum(hosts.values()), sum(slots // demand.width for slots in hosts.values())
    if demand.high > most and (source is None or not source.is_script):
        where = f"{source.path} lists" if source is not None else "this machine has"
        each = f" of {demand.width} tiles" if demand.width > 1 else ""
        remedy = f"give at most {most}, or more slots with --hosts-from FILE" if most else "list more slots"
        raise LaunchError(
            f"--num-workers {demand.low}:{demand.high}: {where} {slots} slots, too few for {demand.high} workers{each};"
            f" {remedy} (localhost:SLOTS or HOST:SLOTS)"
        )


class Scaling:
    """The slots of an elastic job.

    Parameters
    ----------
    table : SlotTable
    hosts : callable
        Returns the slots of each host as they are now.
    fail : callable
        Called with a host that cannot be reached, which `hosts` then leaves out for a while.
    limit : float
        Seconds for which the job waits for its minimum.
    cooling : callable
        Returns the hosts that are left out, and for how many seconds still.
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
        """Return the host of each worker once the job has its minimum; None after the limit, or if stopped."""
        began, last, limit = time.monotonic(), -1, self.limit
        while not stopped():
            if found := self._table.take(self._hosts()):
                return found
            waited = time.monotonic() - began
            if waited >= limit:
                return None
            if int(waited / _REPORT) > last:
                last = int(waited / _REPORT)
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
        """Return how many workers have to end for other jobs; those that are about to end are among them."""
        return self._table.surplus(self._hosts())

    def reason(self) -> str:
        """Return in words why workers have to end."""
        used = self._table.workers * self._table.demand.width
        return "there are fewer slots" if used > sum(self._hosts().values()) else "another job waits"

    def give(self, host: str, for_good: bool) -> None:
        """Give the slots of a worker back, as `SlotTable.give`."""
        self._table.give(host, for_good)

    def lose(self, host: str) -> None:
        """Give the slots of a worker back whose host cannot be reached, and use that host no more for a while."""
        self._fail(host)
        self._table.give(host)

    def give_up(self) -> None:
        """Say that the job ends, for it has waited too long for its minimum."""
        remedy = "start it again later, or lower --num-workers"
        if cooling := self._cooling():
            remedy = f"correct the list, or the error shown by `ssh {next(iter(cooling))}`"
        say(f"error: gave up after {self.limit:g} s: {self.describe()}; {remedy}", sys.stderr)

    def describe(self) -> str:
        """Return in words who uses the slots, and which hosts are left out."""
        texts = [f"{host} is left out for {left:.0f} s" for host, left in self._cooling().items()]
        return "; ".join([self._table.describe(self._hosts()), *texts])


@contextmanager
def open_scaling(demand: Demand, source: HostSource | None, limit: float = WAIT) -> Iterator[Scaling]:
    """Yield the slots of a job, for which it waits in turn; the list of hosts is read again and again meanwhile.

    Hosts that join are checked first, and are left out for a while if they cannot run workers.
    """
    pool, closed = HostPool(lambda: read_slots(source, again=True), COOL_DOWN), threading.Event()
    hosts = pool.listed = read_slots(source)
    checked, reasons = set(hosts), dict[str, str]()

    def usable() -> dict[str, int]:
        cooling = pool.cooling()
        return {host: slots for host, slots in hosts.items() if host in checked and host not in cooling}

    def check(new: set[str]) -> None:
        found = unusable(new - {LOCAL}, os.environ)
        for host, why in found.items():
            pool.fail(host)
            if reasons.get(host) != why:
                say(f"hosts: {host} {why}; it is left out", sys.stderr)
        reasons.update(found)
        checked.update(new - found.keys())

    def watch() -> None:
        nonlocal hosts
        reported, fewer = "", 0
        while not closed.wait(POLL):
            pool.refresh()
            if pool.error not in ("", reported):
                say(f"hosts: {pool.error}; keeping the last list", sys.stderr)
            reported = pool.error
            fewer = fewer + 1 if sum(pool.listed.values()) < sum(hosts.values()) else 0
            if fewer != 1:  # a list that is just being written has fewer hosts
                hosts = dict(pool.listed)
            if new := hosts.keys() - checked - pool.cooling().keys():
                check(new)

    with SlotTable(demand) as table:
        if source is not None:
            threading.Thread(target=watch, name="hosts", daemon=True).start()
        try:
            yield Scaling(table, usable, pool.fail, limit, pool.cooling)
        finally:
            closed.set()


def describe_change(before: int, now: int, reason: str) -> str:
    """Return a change of the number of workers in words."""
    return f"workers: {before} -> {now} ({reason})"


def choose_released(indices: Sequence[int], count: int) -> list[int]:
    """Return the workers that end for other jobs: the last ones; never worker 0, which writes the run."""
    return sorted((at for at in indices if at > 0), reverse=True)[:count]
