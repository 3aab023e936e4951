"""Binding of processes to their parents: mpirun ends with `neondist run -n N`, and a rank with mpirun.

With MPI alone, a rank would continue until its next communication.
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

from ..system.job import LAUNCHED_RANKS_VARIABLE, detect_job

if TYPE_CHECKING:
    from .fork_server import Process

_PR_SET_PDEATHSIG = 1


def parent_death_preexec() -> Callable[[], None] | None:
    """Return a `preexec_fn` by which a child receives SIGTERM when this process is killed (Linux).

    Processes of neondist are bound by `safe_path.python_command`, which is safe with gRPC threads.
    """
    if sys.platform != "linux":
        return None
    libc, parent = ctypes.CDLL(None), os.getpid()

    def bind_to_parent() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # the parent has died in the meantime
            os._exit(1)

    return bind_to_parent


def end_process(process: subprocess.Popen[Any] | Process, grace_seconds: float, sig: int = signal.SIGTERM) -> None:
    """Send a signal to a process, kill it unless it ends within `grace_seconds`, and wait for it."""
    process.send_signal(sig)
    try:
        process.wait(grace_seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def die_with_launcher(env: Mapping[str, str]) -> None:
    """Have this rank killed together with its parent process, even during MPI startup (Linux)."""
    if sys.platform == "linux" and detect_job(env) is not None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if LAUNCHED_RANKS_VARIABLE in env and os.getppid() == 1:  # the parent has died in the meantime
            os._exit(1)


def end_with_parent(poll_seconds: float = 1.0) -> None:
    """From now on, end this process soon after its parent, which is polled every `poll_seconds`."""
    parent = os.getppid()

    def poll_parent() -> None:
        while os.getppid() == parent:
            time.sleep(poll_seconds)
        os._exit(1)

    threading.Thread(target=poll_parent, name="end_with_parent", daemon=True).start()
