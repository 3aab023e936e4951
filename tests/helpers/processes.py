"""Processes of a job."""

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import psutil


def children(pid):
    """All processes below `pid`, as (pid, name)."""
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append((child.pid, child.name()))
    return found


def commands(pid):
    """The words of the commands of all processes below `pid`, without zombies, which have none."""
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append(child.cmdline())
    return found


def alive(pid):
    """Whether a process is there and no zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kill(pids):
    """kill -9, whoever is still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 9)


def finish(process, seconds=300):
    """Return stdout and stderr of a command at its end; if that does not come in time, fail with what it waits for.

    That is a line for each of its processes, and the calls of all threads of those of Python, which they write to
    stderr after a SIGABRT (PYTHONFAULTHANDLER in conftest.py). All of them are ended.
    """
    try:
        return process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        code, found = process.poll(), _processes(process)
    lines = [_describe(one) for one in found]
    for one in reversed(found):  # children before who would start them again
        with contextlib.suppress(psutil.NoSuchProcess):
            one.send_signal(signal.SIGABRT)
            _await_end(one)
    try:
        told = process.communicate(timeout=20)
    except subprocess.TimeoutExpired:  # one that is stopped, or no Python
        kill(one.pid for one in found)
        told = process.communicate(timeout=20)
    state = "runs still" if code is None else f"has ended with {code}, but not all that write to its pipes have"
    raise AssertionError("\n".join([f"{process.args} {state} after {seconds} s", *lines, *map(str, told)]))


def _await_end(one, seconds=5):
    """Wait a little for the end of a process: two that write their calls into one pipe at once would mix them."""
    limit = time.monotonic() + seconds
    while one.status() != psutil.STATUS_ZOMBIE and time.monotonic() < limit:
        time.sleep(0.01)


def _processes(process):
    """Return a command's process and those below, and orphans that hold its pipes."""
    open_ones = [one for one in (process.stdout, process.stderr) if one is not None and not one.closed]
    pipes = {os.readlink(f"/proc/self/fd/{one.fileno()}") for one in open_ones if os.path.isdir("/proc/self/fd")}
    found = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        top = psutil.Process(process.pid)
        found = {one.pid: one for one in (top, *top.children(recursive=True))}
    for one in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.Error):
            held = {os.readlink(path) for path in Path(f"/proc/{one.pid}/fd").iterdir()} if pipes else set()
            if one.pid != os.getpid() and held & pipes:
                found.setdefault(one.pid, one)
    return list(found.values())


def _describe(one):
    try:
        waits = Path(f"/proc/{one.pid}/wchan").read_text() if Path("/proc").is_dir() else ""
        return f"{one.pid} of {one.ppid()}: {one.status()} {waits} {' '.join(one.cmdline())}"
    except (OSError, psutil.Error):
        return f"{one.pid}: is gone"
