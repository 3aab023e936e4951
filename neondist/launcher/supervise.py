"""Watching over mpirun: signals go to it, its exit code comes back, nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from math import inf
from types import FrameType
from typing import IO, Any

import psutil

from ..signals import STOPPED
from .filter_mpirun import Filter, copy
from .parent_watch import end_child_with_us

_UNNOTICED = 20
"""seconds in which mpirun does not see that processes of it have ended, after which it is not waited for"""
FORWARDED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
ENDING = (signal.SIGINT, signal.SIGTERM)


def supervise(
    command: Sequence[str],
    env: Mapping[str, str],
    inherited: Sequence[int] = (),
    gently: bool = False,
    ready: Callable[[], bool] = lambda: True,
    heard: Sequence[str] = (),
) -> int:
    """Run a command to its end and return its exit code, 128 + n if signal n ended it.

    It inherits the file descriptors `inherited`. With `gently`, SIGTERM is passed on as SIGUSR1, which asks the ranks
    to stop: after a SIGTERM mpirun would kill them within seconds, in the middle of a checkpoint. Both wait until the
    ranks are `ready`: who does not listen yet would be killed. `heard` are names of signals that came before.
    """
    job = _Job(gently)
    before = _handle(job.forward)  # before the start, so that no signal ends this process and leaves the other
    try:
        for name in heard:
            job.forward(getattr(signal, name))
        if job.asked:
            return STOPPED
        job.process = process = subprocess.Popen(
            command,
            env=dict(env),
            pass_fds=inherited,
            stdin=subprocess.DEVNULL,
            stdout=None if os.isatty(1) else subprocess.PIPE,  # mpirun ends the job where nobody reads on
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches it once, through us
            preexec_fn=end_child_with_us(),
        )
        messages = Filter()
        copiers = [_copier(process.stderr, sys.stderr.fileno(), messages), _copier(process.stdout, 1)]
        job.send(job.waiting)
        mpirun, code = _Mpirun(process), None
        while code is None and not ready():
            code = mpirun.wait(0.1)
        job.ready = True
        job.send(job.asked)
        while code is None:
            code = mpirun.wait(1)
        for copier in filter(None, copiers):
            copier.join(timeout=10)  # whoever reads us may be slow
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    ended = [number for number in job.received if number in ENDING]
    if ended and code not in (0, STOPPED):
        return 128 + ended[0]
    if code not in (0, STOPPED) and not messages.spoken:  # no rank has said why: mpirun's message names the one
        sys.stderr.write(messages.left_out.decode(errors="replace"))
    return 128 - code if code < 0 else code


class _Mpirun:
    """Waits for mpirun, and ends it where it does not notice that a process that it has started is gone.

    A rank that has ended stays a zombie then, and those that are left wait for it. Where it starts ranks without a
    process of its own, as some batch systems let it, it is left alone.
    """

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self._looked, self._well = time.monotonic(), inf  # when processes of it were looked for, and all there last

    def wait(self, seconds: float) -> int | None:
        """Return its exit code; None: it runs on after so many seconds."""
        with suppress(subprocess.TimeoutExpired):
            return self.process.wait(seconds)
        now = time.monotonic()
        if now - self._looked >= 1:
            self._looked = now
            running, ended = _children(self.process.pid)
            if ended:
                self._well = min(self._well, now)
            elif running:
                self._well = now
            if now - self._well >= _UNNOTICED:
                self.process.kill()
                self.process.wait()
                return 1
        return None


def _children(number: int) -> tuple[int, int]:
    """Return how many of a process's children run, and how many ranks among them have ended, which it has not seen."""
    with suppress(psutil.Error):
        children = psutil.Process(number).children()
        ended = [child.name() for child in children if child.status() == psutil.STATUS_ZOMBIE]
        return len(children) - len(ended), ended.count(os.path.basename(sys.executable))
    return 1, 0  # nobody can tell


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
        sent = _as_sent(number, self.gently)
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
