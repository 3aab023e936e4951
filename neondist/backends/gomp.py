"""Start of the threads of compiled kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from ..version import find_module_spec


@cache
def gomp_parallel_address() -> int:
    """Return the address of GOMP_parallel in PyTorch's libgomp, or in GCC's; 0 if there is no libgomp.

    Idle threads of libgomp spin, so other threads would have to share their cores: after an operation of PyTorch, two
    Python threads are as slow as one, whereas two libgomp threads are 1.7 times as fast. PyTorch is not imported.
    """
    for path in _libgomp_paths():
        try:
            return ctypes.cast(ctypes.CDLL(path).GOMP_parallel, ctypes.c_void_p).value or 0
        except (OSError, AttributeError):
            continue
    return 0


def _libgomp_paths() -> Iterator[str]:
    spec = find_module_spec("torch")
    for folder in [] if spec is None else spec.submodule_search_locations or []:
        yield from map(str, (Path(folder) / "lib").glob("libgomp*.so*"))
    from ctypes.util import find_library  # may start processes

    library = find_library("gomp")
    if library:
        yield library
