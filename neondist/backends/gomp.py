"""What starts the threads of compiled kernels."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from ctypes.util import find_library
from functools import cache
from pathlib import Path

import psutil

from ..threads import cores


def count_threads() -> int:
    """Return OMP_NUM_THREADS, else how many cores this process may use: a core's second thread gains nothing here."""
    share = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    return max(1, int(share)) if share.isdecimal() else min(cores(), psutil.cpu_count(logical=False) or cores())


@cache
def gomp_parallel() -> int:
    """Return the address of what starts the threads that PyTorch's kernels use, else GCC's; 0 if there is none.

    They wait for work, turning round, so that others would have to share their cores: after an operation of PyTorch's
    two of Python's threads are as slow as one, and these 1.7 times faster. PyTorch is not imported.
    """
    spec = importlib.util.find_spec("torch")
    folders = [] if spec is None else spec.submodule_search_locations or []
    bundled = [str(path) for folder in folders for path in (Path(folder) / "lib").glob("libgomp*.so*")]
    for path in filter(None, [*bundled, find_library("gomp")]):
        try:
            return ctypes.cast(ctypes.CDLL(path).GOMP_parallel, ctypes.c_void_p).value or 0
        except (OSError, AttributeError):
            continue
    return 0
