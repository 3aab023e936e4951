"""Python's cyclic garbage collector during imports."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def permanent_objects() -> Iterator[None]:
    """Exempt the objects that the block creates, such as modules that it imports, from garbage collection for ever.

    The collector would traverse PyTorch's million objects repeatedly during the import, a fifth of its time, and again
    in each forked process, where that copies the pages it writes to. Use it once in a process, in its main thread.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
