"""Members of a generation (the ranks between two restarts): how many run on each host, as hosts join and leave."""

from __future__ import annotations

import argparse
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..cluster import ResourceSpec
from ..cluster.hosts import UNREACHABLE_TEXT, HostPool, HostSource, find_unusable_hosts, ranks_per_host, slots_by_node
from ..cluster.ssh_config import login_shells_for_mpirun, unreachable_host_remedy
from ..errors import ConfigError, LaunchError, UserError
from ..system.job import LAUNCHED_RANKS_VARIABLE, Job
from ..system.signals import STOPPED_EXIT_CODE
from ..terminal.console import counted, say

HOST_COOLDOWN_SECONDS = 60.0
HOST_WAIT_SECONDS = 600.0
DEFAULT_RESTARTS = 10
"""default number of restarts of a run whose hosts may change"""
HOST_LIST_POLL_SECONDS = 1.0
_HOST_LIST_OPTIONS = {"cooldown": "--cooldown", "wait": "--wait"}


@dataclass(frozen=True)
class GenerationMembers:
    """Ranks of a generation.

    Attributes
    ----------
    ranks : int
    hosts : dict of str to int, or None
        Number of ranks on each host, in order of rank; None if mpirun places the ranks.
    spares : int
        Slots reserved to replace lost ranks, at most the requested number.
    """

    ranks: int
    hosts: dict[str, int] | None = None
    spares: int = 0

    def host_of_rank(self, rank: int) -> str:
        """Return the host of a rank; '' if unknown."""
        host_by_rank = [host for host, count in (self.hosts or {}).items() for _ in range(count)]
        return host_by_rank[rank] if 0 <= rank < len(host_by_rank) else ""

    def __str__(self) -> str:
        text = counted(self.ranks, "rank")
        if self.hosts is None:
            return text
        return f"{text} on {', '.join(f'{host}:{count}' for host, count in self.hosts.items())}"


def resolve_host_options(arguments: argparse.Namespace, job: Job | None) -> None:
    """Read the source of hosts, and set defaults of related options.

    Raises
    ------
    LaunchError
        The options contradict each other or the hosts.
    """
    if job is not None and LAUNCHED_RANKS_VARIABLE in os.environ:
        return  # a rank, whose supervisor has resolved the options
    elastic, hosts = arguments.elastic, arguments.hosts_from
    if hosts is not None:
        _resolve_hosts(arguments, job)
    if arguments.spares and arguments.source is None:
        raise LaunchError("--spares requires a list of hosts; give --hosts-from, or use neondist launch")
    if arguments.spares and arguments.restarts is None:
        arguments.restarts = DEFAULT_RESTARTS
    if elastic is not None:
        min_ranks, max_ranks = elastic
        if arguments.restarts is None:
            if hosts is None:
                raise LaunchError("--elastic sets the number of ranks after a restart; also give --restarts")
            arguments.restarts = DEFAULT_RESTARTS
        if arguments.ranks is None:
            arguments.ranks = max_ranks
        elif not min_ranks <= arguments.ranks <= max_ranks:
            raise LaunchError(
                f"-n {arguments.ranks} is not within --elastic {min_ranks}:{max_ranks}; change one of them"
            )
    if arguments.restarts is not None and (job is not None or (arguments.ranks is None and hosts is None)):
        raise LaunchError(
            "--restarts: `neondist run` restarts only ranks that it started itself: give their number with -n,"
            " outside an MPI job; in a batch job, requeue the job instead"
        )
    if arguments.snapshot is not None and arguments.restarts is None:
        raise LaunchError("--snapshot: snapshots are used by restarts; also give --restarts")
    for name, option in _HOST_LIST_OPTIONS.items():
        if getattr(arguments, name) is not None and arguments.source is None:
            raise LaunchError(
                f"{option}: applies to hosts that may change; give --hosts-from as well, or leave {option} out"
            )
    if arguments.source is not None:
        _resolve_ranks(arguments)


def needs_generations(arguments: argparse.Namespace) -> bool:
    """Return whether a job may need several generations: after failures, or if its hosts change."""
    return arguments.restarts is not None or arguments.source is not None


def _resolve_hosts(arguments: argparse.Namespace, job: Job | None) -> None:
    if job is not None:
        raise LaunchError("--hosts-from: an MPI job has already placed its ranks; leave out --hosts-from")
    if getattr(arguments, "virtual", None) is not None:
        raise LaunchError("--hosts-from: --virtual runs all ranks in this process; give only one of the two")
    arguments.source = HostSource(arguments.hosts_from)
    if arguments.source.is_resource_file:
        arguments.resources = ResourceSpec(arguments.hosts_from)


def report_early_stop(received_signals: Sequence[str]) -> None:
    """Report that a stop was requested before the start of the ranks."""
    say(f"stopped before the ranks were started: received {received_signals[0]}; start the same command again")


def _resolve_ranks(arguments: argparse.Namespace) -> None:
    source, spares = arguments.source, arguments.spares
    arguments.signals.add_listener(lambda name: source.close())
    try:
        slots = sum(source.slots_at_start.values())
    except ConfigError:
        if not arguments.signals.received_signals:
            raise
        report_early_stop(arguments.signals.received_signals)
        raise SystemExit(STOPPED_EXIT_CODE) from None
    if arguments.ranks is None:
        if not slots:
            raise LaunchError(
                f"--hosts-from {source.path}: lists no hosts yet; give -n or --elastic MIN:MAX to wait for them"
            )
        arguments.ranks = max(1, slots - spares)
    min_ranks = arguments.elastic[0] if arguments.elastic is not None else arguments.ranks
    if slots < min_ranks and not source.is_script:
        alternative = "reduce the number of ranks, or " if slots else ""
        raise LaunchError(
            f"--hosts-from {source.path}: has {counted(slots, 'slot')} for at least {counted(min_ranks, 'rank')};"
            f" {alternative}list more hosts"
        )
    if spares > slots - min_ranks and not source.is_script:
        raise LaunchError(
            f"--spares {spares}: {source.path} has {counted(slots, 'slot')}, and the ranks need at least {min_ranks};"
            f" give at most --spares {slots - min_ranks}, or list more hosts"
        )


class RankRoster:
    """Composition of a run: the supported numbers of ranks, and the available hosts.

    Parameters
    ----------
    arguments : argparse.Namespace
        `ranks`, `elastic`, `spares`, `source`, `resources`, `cooldown`.
    is_valid_rank_count : callable
        Whether the experiment can run on a given number of ranks.

    Attributes
    ----------
    host_pool : HostPool or None
        None: mpirun places the ranks.
    min_ranks, max_ranks : int
        Minimum and maximum number of ranks.
    spares : int
        Slots to reserve as replacements for lost ranks, beyond those that the last generation used.
    resources : ResourceSpec or None
        The resource file as last read; None if there is none.
    """

    def __init__(self, arguments: argparse.Namespace, is_valid_rank_count: Callable[[int], bool]) -> None:
        self.elastic = arguments.elastic is not None
        self.min_ranks, self.max_ranks = arguments.elastic or (arguments.ranks, arguments.ranks)
        self.ranks, self.spares, self._rank_count_to_keep = arguments.ranks, arguments.spares, self.min_ranks
        self.resources: ResourceSpec | None = arguments.resources
        self._host_source: Any = arguments.source
        self._is_valid_rank_count, self._validity_by_rank_count = is_valid_rank_count, dict[int, bool]()
        self.host_pool = (
            None
            if self._host_source is None
            else HostPool(self._read_slots, arguments.cooldown or HOST_COOLDOWN_SECONDS)
        )
        self._slot_read_count = 0

    def choose_members(self) -> GenerationMembers | None:
        """Return members with the most ranks that the usable hosts and the experiment allow; None if there are none."""
        if self.host_pool is None:
            return self._largest_members_within(self.ranks)
        usable_slots = self.host_pool.list_usable_hosts()
        slots = sum(usable_slots.values())
        members = self._largest_members_within(max(slots - self.spares, min(self._rank_count_to_keep, slots)))
        return members and GenerationMembers(
            members.ranks, ranks_per_host(usable_slots, members.ranks), min(self.spares, slots - members.ranks)
        )

    def keep_rank_count_of(self, members: GenerationMembers) -> None:
        """Keep this generation's number of ranks in later generations, using spare slots, if there are enough hosts."""
        self._rank_count_to_keep = members.ranks

    def record_loss(
        self, members: GenerationMembers, lost_nodes: tuple[str, ...], silent_ranks: tuple[int, ...]
    ) -> list[str]:
        """Record a loss; return the hosts that are excluded for the cooldown.

        If a run of fixed size cannot continue without a lost host, that host is not excluded.
        """
        if self.host_pool is None:
            smaller_members = self._largest_members_within(self.ranks - 1)
            self.ranks = smaller_members.ranks if smaller_members is not None else self.ranks
            return []
        hosts = [self.host_pool.listed_host_of(node) for node in lost_nodes] or [
            members.host_of_rank(rank) for rank in silent_ranks
        ]
        excluded = []
        for host in dict.fromkeys(hosts):
            remaining_slots = sum(slots for other, slots in self.host_pool.list_usable_hosts().items() if other != host)
            if host and host != self._chief_address and (self.elastic or remaining_slots >= self.min_ranks):
                self.host_pool.exclude_temporarily(host)
                excluded.append(host)
        return excluded

    def exclude_hosts(self, hosts: Iterable[str]) -> list[str]:
        """Exclude unusable hosts, except the chief; return the excluded hosts."""
        if self.host_pool is None:
            return []
        excluded = [host for host in hosts if host != self._chief_address]
        for host in excluded:
            self.host_pool.exclude_temporarily(host)
        return excluded

    def should_end_generation(self, members: GenerationMembers) -> bool:
        """Whether a generation should end: a host was removed, or more ranks are possible."""
        if self.host_pool is None or members.hosts is None:
            return False
        if any(self.host_pool.listed_slots.get(host, 0) < count for host, count in members.hosts.items()):
            return True
        larger_members = self.choose_members()
        return larger_members is not None and larger_members.ranks > members.ranks

    def find_unusable_hosts(self, members: GenerationMembers) -> dict[str, str]:
        """Return unusable hosts with reasons; nodes of a resource file are checked at the start of a job."""
        if self.host_pool is None or members.hosts is None or self.resources is not None:
            return {}
        return find_unusable_hosts(
            ranks_per_host(self.host_pool.list_usable_hosts(), members.ranks + members.spares), os.environ,
            login_shells_for_mpirun(os.environ),
        )  # fmt: skip

    @property
    def _chief_address(self) -> str:
        return self.resources.chief.address if self.resources is not None else ""

    def _read_slots(self) -> dict[str, int]:
        if self._host_source.is_resource_file:
            self.resources = ResourceSpec(self._host_source.path)
            return slots_by_node(self.resources)
        self._slot_read_count += 1
        slots: dict[str, int] = (
            self._host_source.slots_at_start if self._slot_read_count == 1 else self._host_source.read()
        )
        return slots

    def _largest_members_within(self, slots: int) -> GenerationMembers | None:
        for ranks in range(min(self.max_ranks, slots), self.min_ranks - 1, -1):
            if ranks not in self._validity_by_rank_count:
                self._validity_by_rank_count[ranks] = self._is_valid_rank_count(ranks)
            if self._validity_by_rank_count[ranks]:
                return GenerationMembers(ranks)
        return None


class HostWatcher:
    """Poller of the list of hosts while a generation of an elastic run is running; a context manager."""

    def __init__(self, roster: RankRoster, members: GenerationMembers) -> None:
        self._roster, self._members = roster, members
        self._end, self._hosts_changed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._poll, name="hosts", daemon=True)

    def __enter__(self) -> HostWatcher:
        if self._roster.host_pool is not None and self._roster.elastic:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        if self._thread.is_alive():
            self._thread.join(HOST_LIST_POLL_SECONDS)

    def should_end_generation(self) -> bool:
        """Whether the generation should end."""
        return self._hosts_changed.is_set()

    def _poll(self) -> None:
        host_pool, changed_polls = self._roster.host_pool, 0
        assert host_pool is not None
        reported_error = host_pool.refresh_error
        while not self._end.wait(HOST_LIST_POLL_SECONDS):
            host_pool.refresh_host_list()
            if host_pool.refresh_error not in ("", reported_error) and not self._end.is_set():
                say(f"hosts: {host_pool.refresh_error}; keeping the last list")
            reported_error = host_pool.refresh_error
            changed_polls = changed_polls + 1 if self._roster.should_end_generation(self._members) else 0
            if changed_polls >= 2 and not self._exclude_unusable_hosts():  # a partially written list has fewer hosts
                self._hosts_changed.set()
                return

    def _exclude_unusable_hosts(self) -> bool:
        """Exclude unusable new hosts, and report each once; return whether there were any."""
        larger_members = self._roster.choose_members()
        reasons = {} if larger_members is None else self._roster.find_unusable_hosts(larger_members)
        if self._roster.host_pool is not None:
            for message in self._roster.host_pool.exclude_unusable(reasons):
                say(message)
        return bool(reasons)


def wait_for_members(
    roster: RankRoster,
    limit: float,
    is_stopped: Callable[[], bool],
    report: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
    is_first_generation: bool = False,
) -> GenerationMembers | None:
    """Wait for the members of the next generation; return None after `limit` seconds or if `is_stopped()`.

    Also return None if mpirun places the ranks, and no number of ranks is possible. Progress is reported at once and
    every 30 seconds.

    Raises
    ------
    LaunchError
        A host of the first generation lacks this version of neondist; later generations exclude such a host.
    """
    start, last_report = time.monotonic(), -1
    while True:
        if roster.host_pool is not None:
            roster.host_pool.refresh_host_list()
        members = roster.choose_members()
        if members is not None:
            reasons = roster.find_unusable_hosts(members)
            problems = {host: f"{host} {reason}" for host, reason in reasons.items() if reason != UNREACHABLE_TEXT}
            if is_first_generation and problems:
                raise LaunchError(f"--hosts-from: {'; '.join(problems.values())}, or remove the host from the list")
            excluded = roster.exclude_hosts(reasons)
            if not excluded:
                return members
            unreachable = [host for host in excluded if host not in problems]
            remedies = [unreachable_host_remedy(host, os.environ) for host in unreachable[:1]]
            report("; ".join([*(f"{host} {reasons[host]}" for host in excluded), *remedies]))
            continue
        waited = time.monotonic() - start
        if is_stopped() or waited >= limit or roster.host_pool is None:
            return None
        if int(waited / 30) > last_report:
            last_report = int(waited / 30)
            report(f"waiting for hosts: {describe_rank_shortage(roster)}; giving up in {limit - waited:.0f} s")
        sleep(HOST_LIST_POLL_SECONDS)


def describe_rank_shortage(roster: RankRoster) -> str:
    """Describe the number of possible ranks, and why it is too low."""
    if roster.host_pool is None:
        return f"the experiment cannot run on any number of ranks from {roster.min_ranks} to {roster.max_ranks}"
    slots, excluded = sum(roster.host_pool.list_usable_hosts().values()), roster.host_pool.list_excluded_hosts()
    text = f"there is room for {counted(slots, 'rank')}, but at least {roster.min_ranks} are needed"
    if slots >= roster.min_ranks:
        max_ranks = min(slots, roster.max_ranks)
        text = f"the experiment cannot run on any number of ranks from {roster.min_ranks} to {max_ranks}"
    if excluded:
        hosts = ", ".join(f"{host} ({left:.0f} s)" for host, left in excluded.items())
        text += f"; excluded after a failure: {hosts}"
    return f"{text} ({roster.host_pool.refresh_error})" if roster.host_pool.refresh_error else text


def make_rank_count_check(experiment: Any) -> Callable[[int], bool]:
    """Return a function that tells whether an experiment can run on a number of ranks; a script can run on any."""

    def is_valid_rank_count(ranks: int) -> bool:
        if experiment is None:
            return True
        try:
            experiment.validate(ranks)
        except UserError:
            return False
        return True

    return is_valid_rank_count
