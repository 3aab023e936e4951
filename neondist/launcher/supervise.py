"""Supervision of mpirun: forwards signals, and returns the exit code or a loss, leaving no process behind."""

from __future__ import annotations

import os
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

from ..system.signals import INTERRUPTED, STOPPED, signal_name
from .filter_mpirun import Filter, copy
from .monitor import ENDED, Monitor
from .parent_watch import bind_child, end_process

_UNNOTICED = 20.0
"""seconds after the end of the ranks before an mpirun that has not noticed it is ended"""
_NOTICE = 0.2
"""seconds for mpirun to report a lost daemon, whose ranks die with it"""
_GRACE = 2.0
"""seconds for mpirun to exit and to remove its files after a loss"""
FORWARDED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
ENDING = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class Ending:
    """End of a job.

    Attributes
    ----------
    code : int
        Exit code of `neondist run`; never 0 after a loss.
    loss : str
        Description of the lost rank or node; '' if none.
    nodes : tuple of str
        Nodes whose daemons were lost.
    silent : tuple of int
        Ranks without a heartbeat.
    changed : bool
        Whether the job was stopped, with a checkpoint, because `change` returned true.
    """

    code: int
    loss: str = ""
    nodes: tuple[str, ...] = ()
    silent: tuple[int, ...] = ()
    changed: bool = False


def supervise(
    command: Sequence[str],
    env: Mapping[str, str],
    inherited: Sequence[int] = (),
    graceful: bool = False,
    monitor: Monitor | None = None,
    received: Sequence[str] = (),
    change: Callable[[], bool] | None = None,
) -> Ending:
    """Run a command to its end; the exit code is 128 + n if signal n ended it, and above 128 after a loss.

    It inherits the file descriptors `inherited`. If ranks listen, SIGTERM is forwarded as SIGUSR1, which requests a
    stop: after SIGTERM mpirun would kill them within seconds, during a checkpoint. If `graceful`, both are held back
    until all ranks of the monitor listen, since SIGUSR1 would kill the others. `received` names earlier signals. Once
    `change` returns true, listening ranks are requested to stop as well.
    """
    job, changing = _Job(graceful), False
    handlers = _install(job.forward)  # before the start: a signal must not end this process alone
    try:
        for name in received:
            job.forward(getattr(signal, name))
        if job.deferred:
            return Ending(STOPPED)
        job.process = process = subprocess.Popen(
            command,
            env=dict(env),
            pass_fds=inherited,
            stdin=subprocess.DEVNULL,
            stdout=None if os.isatty(1) else subprocess.PIPE,  # mpirun ends the job if its output is closed
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches it once, through this process
            preexec_fn=bind_child(),
        )
        messages = Filter()
        copiers = [_start_copier(process.stderr, sys.stderr.fileno(), messages), _start_copier(process.stdout, 1)]
        job.send(job.pending)
        code = None
        while code is None:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(0.1)
            job.ready = monitor.all_listen() if monitor is not None else graceful
            if job.ready:
                job.send(job.deferred)
            if job.ready and not changing and change is not None and change():
                changing = True
                job.send([signal.SIGUSR1])
            if code is None and monitor is not None and (monitor.loss or _lingers(monitor)):
                code = 128 + signal.SIGKILL if monitor.loss else monitor.code
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_NOTICE)
                monitor.end_ranks()
                end_process(process, _GRACE)  # hangs if it waits for a lost daemon
        if monitor is not None:
            monitor.settle()
        for copier in filter(None, copiers):
            copier.join(timeout=10)  # the reader may be slow
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    signals = [number for number in job.received if number in ENDING]
    ending = _judge(code, signals, monitor, messages)
    if changing and ending.code == STOPPED and not job.received:
        ending = replace(ending, changed=True)
    if not ending.loss:
        sys.stderr.write(messages.from_mpi.decode(errors="replace"))
        if ending.code not in (0, STOPPED) and not messages.has_output:  # no rank reported an error: mpirun names it
            sys.stderr.write(messages.notices.decode(errors="replace"))
    return ending


def _lingers(monitor: Monitor) -> bool:
    """Whether the ranks ended or one failed, but mpirun has not noticed."""
    return monitor.ending is not None and time.monotonic() - monitor.ending > _UNNOTICED


def _judge(code: int, signals: Sequence[int], monitor: Monitor | None, messages: Filter) -> Ending:
    """Return the end of the job, from mpirun's exit code, the signals for it, and the messages of the ranks."""
    killed, code = code < 0, 128 - code if code < 0 else code
    if code in (0, STOPPED) and (monitor is None or not monitor.unreported_ranks()):
        return Ending(code)
    if signals and code != 0:
        return Ending(128 + signals[0])
    if monitor is None or code == INTERRUPTED:
        return Ending(code)
    loss = monitor.loss
    if killed:
        loss = f"mpirun was killed ({signal_name(code)})"
    elif len(nodes := messages.lost_nodes) == 1:
        loss = f"node {nodes[0]} was lost: its daemon was killed, or the network to it failed"
    elif nodes:
        loss = f"nodes {', '.join(nodes)} were lost: their daemons were killed, or the network to them failed"
    elif monitor.lost in messages.signals:
        loss = f"{monitor.describe(monitor.lost)} was killed by {messages.signals[monitor.lost]}"
    elif not loss and code == 0:
        loss = f"{monitor.describe(monitor.unreported_ranks()[0])} {ENDED}"
    elif not loss and messages.signals:
        rank, text = next(iter(messages.signals.items()))
        loss = f"{monitor.describe(rank)} was killed by {text}"
    elif not loss and code > 128:
        loss = f"a rank was killed ({signal_name(code)})"
    if not loss:
        return Ending(code)
    return Ending(code if code > 128 else 128 + signal.SIGKILL, loss, messages.lost_nodes, monitor.silent)


def _start_copier(source: IO[bytes] | None, target: int, messages: Filter | None = None) -> threading.Thread | None:
    """Copy a pipe, if any, to a file descriptor in a thread, until it is closed."""
    if source is None:
        return None
    thread = threading.Thread(target=copy, args=(source.fileno(), target, messages), daemon=True)
    thread.start()
    return thread


class _Job:
    """Running command, and the signals to forward to it."""

    def __init__(self, graceful: bool) -> None:
        self.graceful, self.ready = graceful, False
        self.process: subprocess.Popen[bytes] | None = None
        self.received: list[int] = []
        self.pending: list[int] = []  # to be sent once the command runs
        self.deferred: list[int] = []  # to be sent once the ranks listen

    def forward(self, number: int, frame: FrameType | None = None) -> None:
        """Receive a signal, and forward it once the command can handle it."""
        self.received.append(number)
        sent = _translate(number, self.graceful or self.ready)
        (self.deferred if self.graceful and sent == signal.SIGUSR1 else self.pending).append(sent)
        self.send(self.pending)
        if self.ready:
            self.send(self.deferred)

    def send(self, numbers: list[int]) -> None:
        """Send and remove the signals of a list, to which more may be added meanwhile."""
        while numbers and self.process is not None:
            with suppress(IndexError):
                self.process.send_signal(numbers.pop(0))


def _translate(number: int, graceful: bool) -> int:
    if number in (signal.SIGTERM, signal.SIGHUP):
        return signal.SIGUSR1 if graceful and number == signal.SIGTERM else signal.SIGTERM
    return number


def _install(forward: Callable[[int, FrameType | None], None]) -> dict[int, Any]:
    """Install the handler for supported signals that are not ignored; return the previous handlers."""
    numbers = [getattr(signal, name) for name in FORWARDED if hasattr(signal, name)]
    handled = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
    return {number: signal.signal(number, forward) for number in handled}
