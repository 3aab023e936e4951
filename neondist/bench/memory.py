"""Memory of this process, in bytes."""

from __future__ import annotations

import contextlib
import resource
import sys
from pathlib import Path


def resident_bytes() -> int:
    """Return the current resident memory."""
    import psutil

    return int(psutil.Process().memory_info().rss)


def reset_peak_memory() -> None:
    """Reset the peak resident memory, if the system supports this."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """Return the peak resident memory."""
    with contextlib.suppress(OSError, StopIteration):  # not Linux; on Linux, getrusage includes the parent's memory
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
