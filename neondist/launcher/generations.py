"""Generations of a supervised job: after a failure or a change of hosts, the next one resumes from a checkpoint."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..cluster.preflight import UnusableNodesError
from ..errors import UserError
from ..io.run_event_log import RunEventLog
from ..system.job import GENERATION_VARIABLE
from ..system.signals import STOPPED_EXIT_CODE
from ..terminal.console import counted, say
from ..train.validate import experiment_grid_shape
from . import restarts
from .launch import launch, report_failure, supervisor_addresses
from .members import (
    HOST_WAIT_SECONDS,
    GenerationMembers,
    HostWatcher,
    RankRoster,
    describe_rank_shortage,
    make_rank_count_check,
    wait_for_members,
)
from .placement import list_own_addresses
from .snapshots import SnapshotKeepers
from .supervision import JobEnding

GenerationStarter = Callable[[argparse.Namespace, Sequence[str], Mapping[str, str], Callable[[], bool]], JobEnding]


def run_generations(
    arguments: argparse.Namespace,
    experiment: Any,
    start: GenerationStarter = launch,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Run a command's job, one generation at a time, and return the exit code.

    Parameters
    ----------
    arguments : argparse.Namespace
    experiment : FitExperiment or None
        None: a script, which manages its own checkpoints.
    start, sleep : callable
        Replacements for `launch` and time.sleep in tests.
    """
    arguments.signals.needs_cleanup = True
    addresses = supervisor_addresses(os.environ) if arguments.source is None else list_own_addresses()
    with SnapshotKeepers(addresses) as snapshot_keepers, ExitStack() as stack:
        log = None
        if experiment is not None:
            log = stack.enter_context(closing(RunEventLog(arguments.folder, bool(arguments.resume))))
        if arguments.source is not None:
            stack.callback(arguments.source.wait_closed)
        run = _MultiGenerationRun(arguments, experiment, log, snapshot_keepers, start, sleep)
        code = run.run()
        run.log_event("end", code=code)
    return code


class _MultiGenerationRun:
    """Job of several generations."""

    def __init__(
        self,
        arguments: argparse.Namespace,
        experiment: Any,
        log: RunEventLog | None,
        snapshot_keepers: SnapshotKeepers,
        start: GenerationStarter,
        sleep: Callable[[float], None],
    ) -> None:
        self.arguments, self.experiment, self.log = arguments, experiment, log
        self.snapshot_keepers, self.start, self.sleep = snapshot_keepers, start, sleep
        self.received_signals: list[str] = arguments.signals.received_signals
        self.roster = RankRoster(arguments, make_rank_count_check(experiment))
        self.words, self.start_time = list(arguments.words), time.time()
        self.wait_limit = arguments.wait or HOST_WAIT_SECONDS
        self.generation = self.restarts = 0
        self.spares, self.is_failure_counted = self.roster.spares, False
        self.has_own_checkpoint = bool(arguments.resume)
        if experiment is not None:
            if experiment.checkpoint.keep < restarts.MIN_KEPT_CHECKPOINTS:
                self.words += ["--set", f"checkpoint.keep={restarts.MIN_KEPT_CHECKPOINTS}"]
            if arguments.snapshot is None and arguments.restarts is not None:
                self.words += ["--snapshot", "auto"]

    def run(self) -> int:
        """Run all generations; return the exit code of the last one."""
        while True:
            is_stopped, is_first_generation = lambda: bool(self.received_signals), not self.generation
            members = wait_for_members(
                self.roster, self.wait_limit, is_stopped, self.report_wait, self.sleep, is_first_generation
            )
            if members is None:
                return self.report_giving_up()
            self.generation += 1
            try:
                ending = self.run_generation(members)
            except UnusableNodesError as error:
                if self.generation == 1 or not self.may_restart or not self.roster.exclude_hosts(error.nodes):
                    raise
                self.restarts += not self.is_failure_counted  # nodes lost together count as one restart
                self.is_failure_counted = False
                self.report_wait(str(error))
                continue
            self.is_failure_counted = False
            is_stopping = bool(self.received_signals) or ending.stop_requested
            if ending.failure_message and not is_stopping and self.may_restart:
                self.report_failure(members, ending)
            elif ending.stopped_for_host_change:
                self.report_host_change(members)
            else:
                if ending.failure_message:
                    self.log_event("loss", what=ending.failure_message)
                    self.snapshot_keepers.exit_message = ""  # keep the snapshots for --resume
                return report_failure(ending, self.arguments)

    @property
    def may_restart(self) -> bool:
        return self.restarts < (self.arguments.restarts or 0)

    def run_generation(self, members: GenerationMembers) -> JobEnding:
        fields: dict[str, Any] = {"ranks": members.ranks, "hosts": members.hosts, "resources": self.roster.resources}
        fields |= {"generation": self.generation, "words": self.words, "begun": self.start_time}
        arguments = self.arguments
        arguments = argparse.Namespace(**{**vars(arguments), **fields})
        self.checkpoints_before = self.checkpoint_versions()
        spares = {"spares": members.spares} if self.roster.spares else {}
        self.log_event(
            "start", ranks=members.ranks, grid=self.grid_factors(members.ranks), hosts=members.hosts, **spares
        )
        say(f"generation {self.generation}: {members}{self.describe_spares(members)}")
        self.roster.keep_rank_count_of(members)
        variables = {GENERATION_VARIABLE: str(self.generation), **self.snapshot_keepers.environment}
        with HostWatcher(self.roster, members) as watcher:
            return self.start(arguments, self.received_signals, variables, watcher.should_end_generation)

    def report_failure(self, members: GenerationMembers, ending: JobEnding) -> None:
        """Report a failure, and the checkpoint from which the next generation resumes."""
        self.restarts += 1
        self.is_failure_counted = True
        hosts = self.roster.record_loss(members, ending.lost_nodes, ending.silent_ranks)
        self.log_event("loss", what=ending.failure_message, host=", ".join(hosts) or None)
        attempt, excluded = f"restart {self.restarts} of {self.arguments.restarts}", ""
        if hosts and self.roster.host_pool is not None:
            verb = "is" if len(hosts) == 1 else "are"
            excluded = f"; {', '.join(hosts)} {verb} excluded for {self.roster.host_pool.cooldown:g} s"
        say(f"{attempt}: {ending.failure_message}{excluded}; {self.prepare_resume()}, on {self.describe_next_ranks()}")

    def report_host_change(self, members: GenerationMembers) -> None:
        """Report a change of hosts, and the checkpoint from which the next generation resumes."""
        slots = self.roster.host_pool.list_usable_hosts() if self.roster.host_pool is not None else {}
        old_hosts = members.hosts or {}
        added = [host for host, count in slots.items() if count > old_hosts.get(host, 0)]
        removed = [host for host, count in old_hosts.items() if slots.get(host, 0) < count]
        self.log_event("hosts", added=added, removed=removed)
        texts = [f"{' '.join(hosts)} {verb}" for hosts, verb in ((added, "added"), (removed, "removed")) if hosts]
        say(f"hosts changed: {', '.join(texts)}; {self.prepare_resume()}, on {self.describe_next_ranks()}")

    def describe_next_ranks(self) -> str:
        """Describe the number of ranks of the next generation, as far as it is known."""
        if self.roster.host_pool is not None:
            self.roster.host_pool.refresh_host_list()
        members = self.roster.choose_members()
        return (
            f"{counted(self.roster.min_ranks, 'rank')} or more, once enough hosts are available"
            if members is None
            else counted(members.ranks, "rank")
        )

    def describe_spares(self, members: GenerationMembers) -> str:
        spares_before, self.spares = self.spares, members.spares
        if not self.roster.spares:
            return ""
        text = f"; {members.spares} of {self.roster.spares} spare slots"
        if spares_before and not members.spares:
            effect = "reduces the number of ranks" if self.roster.elastic else "suspends the run until a host joins"
            text += f": none left; the next failure {effect}"
        return text

    def prepare_resume(self) -> str:
        """Make the next generation resume from the newest checkpoint, if any; return a description of this."""
        if self.experiment is None:
            return "restarting the script"
        checkpoints = self.checkpoint_versions()
        # ignore checkpoints of the run that is being replaced
        if checkpoints.items() - self.checkpoints_before.items() or (checkpoints and self.has_own_checkpoint):
            self.has_own_checkpoint = True
            name = restarts.restore_newest_checkpoint(self.arguments.folder).name
            self.words = restarts.resume_arguments(self.words)
            return f"resuming from {name}" + ("" if self.arguments.snapshot == 0 else " or a newer snapshot")
        return "starting over"

    def checkpoint_versions(self) -> dict[Path, tuple[int, int]]:
        """Return the checkpoints of the run; empty for a script."""
        return {} if self.experiment is None else restarts.checkpoint_versions(self.arguments.folder)

    def grid_factors(self, ranks: int) -> dict[str, int] | None:
        if self.experiment is None:
            return None
        with suppress(UserError):
            return asdict(experiment_grid_shape(self.experiment, ranks))
        return None

    def report_giving_up(self) -> int:
        if self.received_signals:
            say(f"stopped while waiting for hosts: received {self.received_signals[0]}; continue with --resume")
            return STOPPED_EXIT_CODE
        resume = "" if self.experiment is None else " with --resume"
        say(
            f"error: gave up after {self.wait_limit:g} s: {describe_rank_shortage(self.roster)}; reduce the number of"
            f" ranks, or rerun the command{resume} once hosts are available",
            sys.stderr,
        )
        return 1

    def report_wait(self, text: str) -> None:
        self.log_event("wait", what=text)
        say(text)

    def log_event(self, event: str, **fields: Any) -> None:
        if self.log is not None:
            self.log.log_event(event, generation=self.generation, **fields)
