"""A barrier in which waiting ranks sleep, so that they do not disturb the measurement of other ranks."""

from __future__ import annotations

import time

from ..comm import Transport


def sleeping_barrier(world: Transport) -> None:
    """Sleep until all ranks have called this function; MPI's own barrier would keep the core busy."""
    comm = getattr(world, "comm", None)
    if comm is None:
        return
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(0.001)
