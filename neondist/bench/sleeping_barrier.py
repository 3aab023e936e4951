"""A barrier whose waiting ranks sleep, so that they do not disturb measurements of one process."""

from __future__ import annotations

import time

from ..comm import Transport


def sleeping_barrier(world: Transport) -> None:
    """Wait for all ranks, sleeping; MPI's own barrier keeps its core busy."""
    comm = getattr(world, "comm", None)
    if comm is None:
        return
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(0.001)
