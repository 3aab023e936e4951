"""environment.json: versions, hosts and threads of a run."""

from __future__ import annotations

import json
import os
import platform
import socket
from collections import Counter
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ..comm import ProcessGrid
from ..system.threads import THREAD_COUNT_VARIABLES
from ..version import get_versions


def describe_environment(grid: ProcessGrid, **extra: Any) -> dict[str, Any]:
    """Return versions, ranks, grid, hosts, threads and `extra` values, for rank 0 to write. Collective."""
    hosts = Counter(grid.world.allgather(socket.gethostname()))
    return {
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: version for name, version in get_versions().items() if version},
        "ranks": grid.size,
        "grid": {"replicas": grid.replicas, "planes": grid.planes, "rows": grid.rows, "cols": grid.cols},
        "hosts": dict(hosts),
        "cores": os.cpu_count(),
        "threads": {name: os.environ[name] for name in THREAD_COUNT_VARIABLES if name in os.environ}
        | {"pools": _threads_by_library()},
        **extra,
    }


def processor_model() -> str:
    """Return the processor model."""
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return platform.processor() or platform.machine()


def to_json(values: dict[str, Any]) -> str:
    """Return indented JSON; values that JSON does not support are converted to text."""
    return json.dumps(values, indent=2, default=str) + "\n"


def _threads_by_library() -> dict[str, int]:
    try:
        from threadpoolctl import threadpool_info
    except ImportError:
        return {}
    return {info["internal_api"]: info["num_threads"] for info in threadpool_info()}
