"""No process outlives its parent: mpirun ends with `neondist run -n N`, a rank with mpirun.

MPI would let a rank compute on until it talks to another one.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ..system.job import LAUNCHED, detect

if TYPE_CHECKING:
    from .fork_server import Process

_PR_SET_PDEATHSIG = 1


def end_child_with_us() -> Callable[[], None] | None:
    """Return what a child does before exec, so that it gets a SIGTERM when this process is killed (Linux).

    Processes of neondist are bound by `safe_path.command`, which is safe beside threads of gRPC.
    """
    if sys.platform != "linux":
        return None
    libc, parent = ctypes.CDLL(None), os.getpid()

    def ask() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it died in between
            os._exit(1)

    return ask


def end_process(process: subprocess.Popen[Any] | Process, seconds: float, sig: int = signal.SIGTERM) -> None:
    """Send a process a signal, and kill it if it has not ended so many seconds later; wait for its end."""
    process.send_signal(sig)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def die_with_launcher(env: Mapping[str, str]) -> None:
    """Let a rank be killed with the process that has started it, while MPI starts too (Linux)."""
    if sys.platform == "linux" and detect(env) is not None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if LAUNCHED in env and os.getppid() == 1:  # it died in between
            os._exit(1)


def end_with_parent(seconds: float = 1.0) -> None:
    """From now on, end this process soon after the process that has started it; looks every so many seconds."""
    parent = os.getppid()

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(seconds)
        os._exit(1)

    threading.Thread(target=look, name="end_with_parent", daemon=True).start()
