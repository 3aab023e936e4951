"""Processes of a job."""

import contextlib
import os

import psutil


def children(pid):
    """All processes below `pid`, as (pid, name)."""
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append((child.pid, child.name()))
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
