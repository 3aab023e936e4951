"""Watching over mpirun: signals go to it, its exit code or a loss comes back, nothing is left behind."""

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
from .parent_watch import end_child_with_us, end_process

_UNNOTICED = 20.0
"""seconds in which mpirun does not see that its ranks end, after which it is ended"""
_NOTICE = 0.2
"""seconds that mpirun has to say that it has lost a daemon, whose ranks die with it"""
_GRACE = 2.0
"""seconds that mpirun has to end and to remove its files after a loss"""
FORWARDED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
ENDING = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class Ending:
    """The end of a job.

    Attributes
    ----------
    code : int
        Of `neondist run`: never 0 after a loss.
    loss : str
        The rank or node that was lost, in words; '' if there is none.
    nodes : tuple of str
        The nodes whose daemons were lost.
    silent : tuple of int
        The ranks without a heartbeat.
    changed : bool
        Whether it was stopped, with a checkpoint, because `change` has asked for that.
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
    gently: bool = False,
    monitor: Monitor | None = None,
    received: Sequence[str] = (),
    change: Callable[[], bool] | None = None,
) -> Ending:
    """Run a command to its end; the exit code is 128 + n if signal n ended it, and above 128 after a loss.

    It inherits the file descriptors `inherited`. Where ranks listen, SIGTERM is passed on as SIGUSR1, which asks them
    to stop: after a SIGTERM mpirun would kill them within seconds, in the middle of a checkpoint. With `gently`, both
    wait until the ranks that the monitor knows listen: others would be killed. `received` names earlier signals. Once
    `change` returns true, ranks that listen are asked to stop as well.
    """
    job, changing = _Job(gently), False
    before = _handle(job.forward)  # before the start, so that no signal ends this process and leaves the other
    try:
        for name in received:
            job.forward(getattr(signal, name))
        if job.asked:
            return Ending(STOPPED)
        job.process = process = subprocess.Popen(
            command,
            env=dict(env),
            pass_fds=inherited,
            stdin=subprocess.DEVNULL,
            stdout=None if os.isatty(1) else subprocess.PIPE,  # mpirun ends the job if its output is closed
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches it once, through us
            preexec_fn=end_child_with_us(),
        )
        messages = Filter()
        copiers = [_copier(process.stderr, sys.stderr.fileno(), messages), _copier(process.stdout, 1)]
        job.send(job.waiting)
        code = None
        while code is None:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(0.1)
            job.ready = monitor.all_listen() if monitor is not None else gently
            if job.ready:
                job.send(job.asked)
            if job.ready and not changing and change is not None and change():
                changing = True
                job.send([signal.SIGUSR1])
            if code is None and monitor is not None and (monitor.loss or _lingers(monitor)):
                code = 128 + signal.SIGKILL if monitor.loss else monitor.code
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_NOTICE)
                monitor.end_ranks()
                end_process(process, _GRACE)  # it hangs where it waits for a daemon that is gone
        if monitor is not None:
            monitor.settle()
        for copier in filter(None, copiers):
            copier.join(timeout=10)  # whoever reads us may be slow
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    signals = [number for number in job.received if number in ENDING]
    ending = _judge(code, signals, monitor, messages)
    if changing and ending.code == STOPPED and not job.received:
        ending = replace(ending, changed=True)
    if not ending.loss:
        sys.stderr.write(messages.of_mpi.decode(errors="replace"))
        if ending.code not in (0, STOPPED) and not messages.spoken:  # no rank has said why: mpirun names the one
            sys.stderr.write(messages.left_out.decode(errors="replace"))
    return ending


def _lingers(monitor: Monitor) -> bool:
    """Whether the ranks have ended, or one has failed, and mpirun does not notice."""
    return monitor.ending is not None and time.monotonic() - monitor.ending > _UNNOTICED


def _judge(code: int, ended: Sequence[int], monitor: Monitor | None, messages: Filter) -> Ending:
    """Return how the job ended, from mpirun's exit code, signals that came for it, and what the ranks have sent."""
    killed, code = code < 0, 128 - code if code < 0 else code
    if code in (0, STOPPED) and (monitor is None or not monitor.without_word()):
        return Ending(code)
    if ended and code != 0:
        return Ending(128 + ended[0])
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
        loss = f"{monitor.describe(monitor.without_word()[0])} {ENDED}"
    elif not loss and messages.signals:
        rank, text = next(iter(messages.signals.items()))
        loss = f"{monitor.describe(rank)} was killed by {text}"
    elif not loss and code > 128:
        loss = f"a rank was killed ({signal_name(code)})"
    if not loss:
        return Ending(code)
    return Ending(code if code > 128 else 128 + signal.SIGKILL, loss, messages.lost_nodes, monitor.silent)


def _copier(source: IO[bytes] | None, target: int, messages: Filter | None = None) -> threading.Thread | None:
    """Copy what comes from a pipe, if there is one, as long as it comes."""
    if source is None:
        return None
    thread = threading.Thread(target=copy, args=(source.fileno(), target, messages), daemon=True)
    thread.start()
    return thread


class _Job:
    """A command under way, and the signals for it."""

    def __init__(self, gently: bool) -> None:
        self.gently, self.ready = gently, False
        self.process: subprocess.Popen[bytes] | None = None
        self.received: list[int] = []  # all that came
        self.waiting: list[int] = []  # to be sent as soon as the command is there
        self.asked: list[int] = []  # to be sent as soon as the ranks listen

    def forward(self, number: int, frame: FrameType | None = None) -> None:
        """Take a signal, and pass it on if the command is there for it."""
        self.received.append(number)
        sent = _as_sent(number, self.gently or self.ready)
        (self.asked if self.gently and sent == signal.SIGUSR1 else self.waiting).append(sent)
        self.send(self.waiting)
        if self.ready:
            self.send(self.asked)

    def send(self, numbers: list[int]) -> None:
        """Pass on what waits in a list, while more may come into it."""
        while numbers and self.process is not None:
            with suppress(IndexError):
                self.process.send_signal(numbers.pop(0))


def _as_sent(number: int, gently: bool) -> int:
    if number in (signal.SIGTERM, signal.SIGHUP):
        return signal.SIGUSR1 if gently and number == signal.SIGTERM else signal.SIGTERM
    return number


def _handle(forward: Callable[[int, FrameType | None], None]) -> dict[int, Any]:
    """Install the handler for the signals that this system has; return what was there. What is ignored stays so."""
    numbers = [getattr(signal, name) for name in FORWARDED if hasattr(signal, name)]
    heeded = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
    return {number: signal.signal(number, forward) for number in heeded}
