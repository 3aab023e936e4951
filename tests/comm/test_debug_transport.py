"""Debug transport: detection of writes to messages in flight."""

import threading

import numpy as np
import pytest

from neondist.comm import DebugTransport, Message, loopback
from neondist.errors import HaloError


@pytest.mark.parametrize("end", ["send", "receive"])
@pytest.mark.parametrize("dtype", ["float32", "uint8"])
def test_writes_to_buffers_in_flight(end, dtype):
    """Write from an unrelated thread, during one message each way of cells inside larger arrays."""

    def exchange_cells(comm, debug):
        arrays = {name: np.ones((4, 4), dtype) for name in ("send", "receive")}
        box = (slice(1, 3), slice(0, 2))
        messages = [[Message(1 - comm.rank, arrays[name], box)] for name in ("send", "receive")]
        exchange = debug(comm).create_exchange(*messages)
        exchange.start()
        if comm.rank == 0:
            thread = threading.Thread(target=lambda: arrays[end].__setitem__((2, 1), 7))
            thread.start()
            thread.join()
        exchange.finish()
        return arrays["receive"]

    loopback.run(2, lambda comm: exchange_cells(comm, lambda c: c))
    description = "outgoing cells for rank 1" if end == "send" else "cells being received from rank 1"
    with pytest.raises(HaloError, match=f"rank 0 of 2: {description} were modified between start and finish"):
        loopback.run(2, lambda comm: exchange_cells(comm, DebugTransport))
