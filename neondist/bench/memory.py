"""Memory of this process, in bytes."""

from __future__ import annotations

import contextlib
import resource
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")


def resident() -> int:
    """Return what is in memory now (without /proc: the peak so far)."""
    return _field("VmRSS")


def forget_peak() -> None:
    """Let `peak` count from now on, where the system can."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak() -> int:
    """Return the most that was in memory at a time."""
    return _field("VmHWM")


def _field(name: str) -> int:
    try:
        lines = _STATUS.read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))
    except (OSError, StopIteration):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
