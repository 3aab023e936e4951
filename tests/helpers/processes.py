"""Processes of a job, by what Linux says of them."""

import os
from pathlib import Path


def children(pid):
    """All processes below `pid`, as (pid, name)."""
    by_parent = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                head, tail = (entry / "stat").read_text().rsplit(")", 1)
            except OSError:
                continue
            by_parent.setdefault(int(tail.split()[1]), []).append((int(entry.name), head.split("(", 1)[1]))
    found, waiting = [], [pid]
    while waiting:
        below = by_parent.get(waiting.pop(), [])
        found += below
        waiting += [each for each, _ in below]
    return found


def alive(pid):
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def kill(pids):
    """kill -9, whoever is still there."""
    for pid in pids:
        try:
            os.kill(pid, 9)
        except ProcessLookupError:
            continue
