"""Python's cyclic garbage collector during imports."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def exempt_new_objects_from_gc() -> Iterator[None]:
    """Exempt the objects that the block creates, such as imported modules, permanently from garbage collection.

    The collector would traverse PyTorch's million objects repeatedly during the import, for a fifth of its time, and
    again in each forked process, which would copy shared memory pages. Only the first block of a process has this
    effect: a later one would also exempt objects of earlier work, such as large arrays in reference cycles.
    """
    if gc.get_freeze_count():
        yield
        return
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
