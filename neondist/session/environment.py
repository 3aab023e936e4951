"""environment.json: what a run ran on."""

from __future__ import annotations

import json
import os
import platform
import socket
from collections import Counter
from datetime import datetime, timezone
from importlib import metadata
from typing import Any

from ..comm import ProcessGrid

PACKAGES = ("neondist", "numpy", "mpi4py", "h5py", "PyYAML", "threadpoolctl", "torch", "cupy", "matplotlib")
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def environment(grid: ProcessGrid, **extra: Any) -> dict[str, Any]:
    """Return versions, ranks, grid, hosts and threads, and what is given beside; collective, for rank 0 to write."""
    hosts = Counter(grid.world.allgather(socket.gethostname()))
    return {
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: version for name in PACKAGES if (version := _version(name))},
        "ranks": grid.size,
        "grid": {"replicas": grid.replicas, "planes": grid.planes, "rows": grid.rows, "cols": grid.cols},
        "hosts": dict(hosts),
        "cores": os.cpu_count(),
        "threads": {name: os.environ[name] for name in THREADS if name in os.environ} | {"pools": _pools()},
        **extra,
    }


def to_json(values: dict[str, Any]) -> str:
    """Return readable JSON; what JSON does not know is written as text."""
    return json.dumps(values, indent=2, default=str) + "\n"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _pools() -> dict[str, int]:
    """Return the threads of each numerical library of this rank."""
    try:
        from threadpoolctl import threadpool_info
    except ImportError:
        return {}
    return {info["internal_api"]: info["num_threads"] for info in threadpool_info()}
