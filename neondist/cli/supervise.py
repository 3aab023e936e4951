"""Watching over mpirun: signals go to it, its exit code comes back, nothing is left behind."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

from .quiet import copy_without_notices

FORWARDED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
ENDING = (signal.SIGINT, signal.SIGTERM)
STOPPED = 75
"""Exit code of a run that has stopped with a checkpoint."""
_PR_SET_PDEATHSIG = 1


def supervise(
    command: Sequence[str], env: Mapping[str, str], inherited: Sequence[int] = (), gently: bool = False
) -> int:
    """Run a command to its end and return its exit code, 128 + n if signal n ended it.

    It inherits the file descriptors `inherited`. With `gently`, the first SIGTERM is passed on as SIGUSR1, which asks
    the ranks to stop: after a SIGTERM mpirun would kill them within seconds, in the middle of a checkpoint.
    """
    received: list[int] = []
    process: subprocess.Popen[bytes] | None = None

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if process is not None:
            process.send_signal(as_sent(number))

    def as_sent(number: int) -> int:
        first = received.count(signal.SIGTERM) == 1
        return signal.SIGUSR1 if gently and number == signal.SIGTERM and first else _as_sent(number)

    before = _handle(forward)  # before the start, so that no signal ends this process and leaves the other
    process = subprocess.Popen(
        command,
        env=dict(env),
        pass_fds=inherited,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C reaches it once, through us
        preexec_fn=_die_with_parent(),
    )
    for number in received:
        process.send_signal(as_sent(number))
    assert process.stderr is not None
    copier = threading.Thread(
        target=copy_without_notices, args=(process.stderr.fileno(), sys.stderr.fileno()), daemon=True
    )
    copier.start()
    try:
        code = process.wait()
        copier.join(timeout=1)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    ended = [number for number in received if number in ENDING]
    if ended and code not in (0, STOPPED):
        return 128 + ended[0]
    return 128 - code if code < 0 else code


def _as_sent(number: int) -> int:
    return signal.SIGTERM if number == signal.SIGHUP else number


def _handle(forward: Callable[[int, FrameType | None], None]) -> dict[int, Any]:
    """Install the handler for the signals that this system has; return what was there. What is ignored stays so."""
    numbers = [getattr(signal, name) for name in FORWARDED if hasattr(signal, name)]
    heeded = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
    return {number: signal.signal(number, forward) for number in heeded}


def _die_with_parent() -> Callable[[], None] | None:
    """Return what the child does before exec, so that it ends when this process is killed (Linux)."""
    if sys.platform != "linux":
        return None
    libc, parent = ctypes.CDLL(None), os.getpid()

    def ask() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it died in between
            os._exit(1)

    return ask
