"""Processes of jobs and commands."""

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import psutil


def list_children(pid):
    """Return all descendants of a process as (pid, name)."""
    result = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                result.append((child.pid, child.name()))
    return result


def list_commands(pid):
    """Return the command lines of all descendants of a process, except zombies."""
    result = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                result.append(child.cmdline())
    return result


def is_alive(pid):
    """Return whether a process exists and is not a zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kill(pids):
    """Send SIGKILL to all processes that still exist."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 9)


def communicate(process, seconds=300):
    """Wait for a command and return its stdout and stderr; after a timeout, kill it and fail with its state.

    The failure has a line for each process, and the stacks of all Python threads, which the processes write to stderr
    on SIGABRT (PYTHONFAULTHANDLER in conftest.py).
    """
    try:
        return process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        code, processes = process.poll(), _find_processes(process)
    lines = [_describe(child) for child in processes]
    for child in reversed(processes):  # children before parents that may restart them
        with contextlib.suppress(psutil.NoSuchProcess):
            child.send_signal(signal.SIGABRT)
            _wait_for_end(child)
    try:
        output = process.communicate(timeout=20)
    except subprocess.TimeoutExpired:  # a stopped process, or not Python
        kill(child.pid for child in processes)
        output = process.communicate(timeout=20)
    state = "is still running" if code is None else f"has exited with {code}, but other processes hold its pipes"
    raise AssertionError("\n".join([f"{process.args} {state} after {seconds} s", *lines, *map(str, output)]))


def _wait_for_end(process, seconds=5):
    """Wait briefly for the end of a process, so that stacks in a shared pipe do not mix."""
    deadline = time.monotonic() + seconds
    while process.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.01)


def _find_processes(process):
    """Return the process of a command, its descendants, and orphans that hold its pipes."""
    open_pipes = [pipe for pipe in (process.stdout, process.stderr) if pipe is not None and not pipe.closed]
    pipes = {os.readlink(f"/proc/self/fd/{pipe.fileno()}") for pipe in open_pipes if os.path.isdir("/proc/self/fd")}
    result = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        top = psutil.Process(process.pid)
        result = {child.pid: child for child in (top, *top.children(recursive=True))}
    for child in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.Error):
            targets = {os.readlink(path) for path in Path(f"/proc/{child.pid}/fd").iterdir()} if pipes else set()
            if child.pid != os.getpid() and targets & pipes:
                result.setdefault(child.pid, child)
    return list(result.values())


def _describe(process):
    try:
        channel = Path(f"/proc/{process.pid}/wchan").read_text() if Path("/proc").is_dir() else ""
        return f"{process.pid} of {process.ppid()}: {process.status()} {channel} {' '.join(process.cmdline())}"
    except (OSError, psutil.Error):
        return f"{process.pid}: has exited"
