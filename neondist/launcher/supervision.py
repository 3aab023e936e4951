"""Supervision of mpirun: forwards signals, reports the exit code or a loss, and leaves no process behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import FrameType
from typing import IO, Any

from ..system.signals import INTERRUPTED_EXIT_CODE, STOP_SIGNALS, STOPPED_EXIT_CODE, describe_exit_code
from .monitor import UNREPORTED_EXIT_TEXT, Monitor
from .mpirun_notices import NoticeFilter, copy_stream
from .parent_watch import end_process, parent_death_preexec

_MPIRUN_EXIT_TIMEOUT = 20.0
"""seconds from the end of the ranks until mpirun is ended if it still runs"""
_LOST_NODE_REPORT_TIMEOUT = 0.2
"""seconds for mpirun to report a lost daemon, whose ranks die with it"""
_EXIT_TIMEOUT_AFTER_LOSS = 2.0
"""seconds for mpirun to exit and to remove its files after a loss"""
FORWARDED_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class JobEnding:
    """End of a job.

    Attributes
    ----------
    exit_code : int
        Exit code of `neondist run`; never 0 after a loss.
    failure_message : str
        Description of the lost rank or node; '' if none.
    lost_nodes : tuple of str
        Nodes whose daemons were lost.
    silent_ranks : tuple of int
        Ranks without a heartbeat.
    stopped_for_host_change : bool
        Whether the job was stopped, with a checkpoint, because `hosts_changed` returned true.
    stop_requested : bool
        Whether SIGTERM or SIGUSR1 requested a stop.
    """

    exit_code: int
    failure_message: str = ""
    lost_nodes: tuple[str, ...] = ()
    silent_ranks: tuple[int, ...] = ()
    stopped_for_host_change: bool = False
    stop_requested: bool = False


def supervise_command(
    command: Sequence[str],
    env: Mapping[str, str],
    inherited_descriptors: Sequence[int] = (),
    ranks_handle_stop: bool = False,
    monitor: Monitor | None = None,
    received_signals: Sequence[str] = (),
    hosts_changed: Callable[[], bool] | None = None,
) -> JobEnding:
    """Run a command to its end; the exit code is 128 + n if signal n ended it, and above 128 after a loss.

    The command inherits the file descriptors `inherited_descriptors`. If ranks handle SIGUSR1, SIGTERM is forwarded as
    SIGUSR1, which requests a stop: after SIGTERM mpirun would kill them within seconds, during a checkpoint. If
    `ranks_handle_stop`, both signals are held back until all ranks of the monitor handle SIGUSR1, which would kill a
    rank without a handler. `received_signals` names earlier signals. A stop is also requested once `hosts_changed`
    returns true.
    """
    forwarder, stop_sent = _SignalForwarder(ranks_handle_stop), False
    old_handlers = _install_handlers(forwarder.forward)  # before the start: a signal must not end this process alone
    try:
        for name in received_signals:
            forwarder.forward(getattr(signal, name))
        if forwarder.deferred_signals:
            return JobEnding(STOPPED_EXIT_CODE)
        forwarder.process = process = subprocess.Popen(
            command,
            env=dict(env),
            pass_fds=inherited_descriptors,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,  # mpirun ends the job if its output is closed
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches mpirun once, through this process
            preexec_fn=parent_death_preexec(),
        )
        notice_filter, stdout_filter = NoticeFilter(), NoticeFilter(filters_warnings=False)
        copiers = [
            _start_copier(process.stderr, sys.stderr.fileno(), notice_filter),
            _start_copier(process.stdout, 1, stdout_filter),
        ]
        forwarder.send(forwarder.pending_signals)
        code = None
        while code is None:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(0.1)
            forwarder.ranks_listen = monitor.all_ranks_handle_sigusr1() if monitor is not None else ranks_handle_stop
            if forwarder.ranks_listen:
                forwarder.send(forwarder.deferred_signals)
            if forwarder.ranks_listen and not stop_sent and hosts_changed is not None and hosts_changed():
                stop_sent = True
                forwarder.send([signal.SIGUSR1])
            if code is None and monitor is not None and (monitor.failure_message or _is_mpirun_overdue(monitor)):
                code = 128 + signal.SIGKILL if monitor.failure_message else monitor.exit_code
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_LOST_NODE_REPORT_TIMEOUT)
                monitor.kill_remaining_ranks()
                end_process(process, _EXIT_TIMEOUT_AFTER_LOSS)  # mpirun hangs if it waits for a lost daemon
        if monitor is not None:
            monitor.drain_connections()
        for copier in filter(None, copiers):
            copier.join(timeout=10)  # the reader may be slow
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)
    notice_filter.notices += stdout_filter.notices  # such as the notice of a daemon whose ssh exited
    ending_signals = [number for number in forwarder.received_signals if number in ENDING_SIGNALS]
    ending = _determine_ending(code, ending_signals, monitor, notice_filter)
    if stop_sent and ending.exit_code == STOPPED_EXIT_CODE and not forwarder.received_signals:
        ending = replace(ending, stopped_for_host_change=True)
    stop_requested = any(signal.Signals(n).name in STOP_SIGNALS for n in forwarder.received_signals)
    ending = replace(ending, stop_requested=stop_requested)
    daemons_failed = ending.lost_nodes and monitor is not None and not monitor.rank_states  # before any rank started
    _write_withheld_notices(ending, notice_filter, bool(daemons_failed))
    return ending


def _write_withheld_notices(ending: JobEnding, notice_filter: NoticeFilter, daemons_failed: bool) -> None:
    """Write the notices of mpirun about a failure that no other message explains."""
    if daemons_failed:
        sys.stderr.write(notice_filter.notices.decode(errors="replace"))
    if not ending.failure_message:
        sys.stderr.write(notice_filter.fatal_lines.decode(errors="replace"))
        failed = ending.exit_code not in (0, STOPPED_EXIT_CODE)
        if failed and not notice_filter.has_output:  # no rank has reported the error, but mpirun has
            sys.stderr.write(notice_filter.notices.decode(errors="replace"))


def _is_mpirun_overdue(monitor: Monitor) -> bool:
    """Whether mpirun still runs long after all ranks have ended or one has failed."""
    return monitor.job_end_time is not None and time.monotonic() - monitor.job_end_time > _MPIRUN_EXIT_TIMEOUT


def _determine_ending(
    code: int, signals: Sequence[int], monitor: Monitor | None, notice_filter: NoticeFilter
) -> JobEnding:
    """Return how the job ended, from mpirun's exit code, the received signals, and the messages of the ranks."""
    was_killed, code = code < 0, 128 - code if code < 0 else code
    if code in (0, STOPPED_EXIT_CODE) and (monitor is None or not monitor.ranks_without_exit_code()):
        return JobEnding(code)
    if signals:
        return JobEnding(128 + signals[0])
    if monitor is None or code == INTERRUPTED_EXIT_CODE:
        return JobEnding(code)
    loss = monitor.failure_message
    if was_killed:
        loss = f"mpirun was killed ({describe_exit_code(code)})"
    elif len(lost_nodes := notice_filter.lost_nodes) == 1:
        loss = f"node {lost_nodes[0]} was lost: its daemon was killed, or the network to it failed"
    elif lost_nodes:
        loss = f"nodes {', '.join(lost_nodes)} were lost: their daemons were killed, or the network to them failed"
    elif monitor.lost_rank in notice_filter.signals_by_rank:
        cause = notice_filter.signals_by_rank[monitor.lost_rank]
        loss = f"{monitor.describe_rank(monitor.lost_rank)} was killed by {cause}"
    elif not loss and code == 0:
        loss = f"{monitor.describe_rank(monitor.ranks_without_exit_code()[0])} {UNREPORTED_EXIT_TEXT}"
    elif not loss and notice_filter.signals_by_rank:
        rank, cause = next(iter(notice_filter.signals_by_rank.items()))
        loss = f"{monitor.describe_rank(rank)} was killed by {cause}"
    elif not loss and code > 128:
        loss = f"a rank was killed ({describe_exit_code(code)})"
    if not loss:
        return JobEnding(code)
    return JobEnding(code if code > 128 else 128 + signal.SIGKILL, loss, notice_filter.lost_nodes, monitor.silent_ranks)


def _start_copier(
    source: IO[bytes] | None, target: int, notice_filter: NoticeFilter | None = None
) -> threading.Thread | None:
    """Copy a pipe, if any, to a file descriptor in a thread, until the pipe is closed."""
    if source is None:
        return None
    thread = threading.Thread(target=copy_stream, args=(source.fileno(), target, notice_filter), daemon=True)
    thread.start()
    return thread


class _SignalForwarder:
    """Running command, and the signals to forward to it."""

    def __init__(self, ranks_handle_stop: bool) -> None:
        self.ranks_handle_stop, self.ranks_listen = ranks_handle_stop, False
        self.process: subprocess.Popen[bytes] | None = None
        self.received_signals: list[int] = []
        self.pending_signals: list[int] = []  # to be sent once the command runs
        self.deferred_signals: list[int] = []  # to be sent once the ranks handle SIGUSR1

    def forward(self, number: int, frame: FrameType | None = None) -> None:
        """Receive a signal, and forward it once the command can handle it."""
        self.received_signals.append(number)
        sent_signal = _translate_signal(number, self.ranks_handle_stop or self.ranks_listen)
        is_deferred = self.ranks_handle_stop and sent_signal == signal.SIGUSR1
        (self.deferred_signals if is_deferred else self.pending_signals).append(sent_signal)
        self.send(self.pending_signals)
        if self.ranks_listen:
            self.send(self.deferred_signals)

    def send(self, signal_numbers: list[int]) -> None:
        """Send and remove the signals of a list, to which the signal handler may append at any time."""
        while signal_numbers and self.process is not None:
            with suppress(IndexError):
                self.process.send_signal(signal_numbers.pop(0))


def _translate_signal(number: int, ranks_handle_stop: bool) -> int:
    if number in (signal.SIGTERM, signal.SIGHUP):
        return signal.SIGUSR1 if ranks_handle_stop and number == signal.SIGTERM else signal.SIGTERM
    return number


def _install_handlers(forward: Callable[[int, FrameType | None], None]) -> dict[int, Any]:
    """Install the handler for supported signals that are not ignored; return the previous handlers."""
    signal_numbers = [getattr(signal, name) for name in FORWARDED_SIGNALS if hasattr(signal, name)]
    handled_signals = [number for number in signal_numbers if signal.getsignal(number) != signal.SIG_IGN]
    return {number: signal.signal(number, forward) for number in handled_signals}
