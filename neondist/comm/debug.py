"""Transport that checks for misuse of messages: slow, for `--debug-halo`."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import HaloError
from .transport import Exchange, Message, ReduceOp, Request, Transport

MAX_MESSAGE_DELAY_SECONDS = 0.002


class DebugTransport(Transport):
    """Wrapper around a transport that delays messages and checks their buffers between `start` and `finish`.

    Messages are copied: receive boxes are poisoned until `finish`, and `finish` raises HaloError if a send or receive
    box has been modified since `start`. Results are bit-for-bit those of the wrapped transport.

    Parameters
    ----------
    wrapped : Transport
    seed : int
        Seed of the delays, which differ between ranks.
    """

    def __init__(self, wrapped: Transport, seed: int = 0) -> None:
        self.wrapped, self.rank, self.size, self.seed = wrapped, wrapped.rank, wrapped.size, seed
        self.random = random.Random(f"{seed} {wrapped.rank}")
        self.shares_process = wrapped.shares_process

    def wait_randomly(self) -> None:
        """Wait for a random time of at most MAX_MESSAGE_DELAY_SECONDS."""
        time.sleep(self.random.random() * MAX_MESSAGE_DELAY_SECONDS)

    def split(self, color: int, key: int) -> Transport:
        """Return the wrapped group of the ranks with the same colour."""
        return DebugTransport(self.wrapped.split(color, key), self.seed)

    def split_tiles_and_replicas(self, tiles: int) -> tuple[Transport, Transport]:
        """Return the wrapped groups of tiles and of replicas."""
        tile_group, replica_group = self.wrapped.split_tiles_and_replicas(tiles)
        return DebugTransport(tile_group, self.seed), DebugTransport(replica_group, self.seed)

    def begin_call(self, call: str) -> None:
        """Record the call that begins."""
        self.wrapped.begin_call(call)

    def wait_for_root(self) -> None:
        """Wait until rank 0 makes this call."""
        self.wrapped.wait_for_root()

    def close(self) -> None:
        """Close the wrapped group."""
        super().close()
        self.wrapped.close()

    def create_exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Exchange:
        """Return an exchange over fixed arrays, which need not be contiguous."""
        return _DebugExchange(self, sends, receives)

    def allreduce(self, array: np.ndarray, op: ReduceOp = "sum") -> None:
        """Replace the array by its sum, or maximum, after a delay."""
        self.wait_randomly()
        self.wrapped.allreduce(array, op)

    def iallreduce(self, array: np.ndarray) -> Request:
        """Begin a sum after a delay."""
        self.wait_randomly()
        return self.wrapped.iallreduce(array)

    def allgather_array(self, array: np.ndarray) -> np.ndarray:
        """Return every rank's array, after a delay."""
        self.wait_randomly()
        return self.wrapped.allgather_array(array)

    def all_to_all(self, sends: Sequence[np.ndarray], receive_shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
        """Send an array to every rank, and return the arrays received from all ranks, after a delay."""
        self.wait_randomly()
        return self.wrapped.all_to_all(sends, receive_shapes)

    def allgather(self, value: Any) -> list[Any]:
        """Return every rank's value, after a delay."""
        self.wait_randomly()
        return self.wrapped.allgather(value)

    def bcast(self, value: Any, root: int = 0) -> Any:
        """Return the value of rank `root`, after a delay."""
        self.wait_randomly()
        return self.wrapped.bcast(value, root)

    def abort(self, code: int) -> None:
        """End the job on all ranks."""
        self.wrapped.abort(code)


class _DebugExchange(Exchange):
    transport: DebugTransport

    def __init__(self, transport: DebugTransport, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        super().__init__(transport, sends, receives)
        self.send_copies, self.receive_copies = (
            [_create_message_like(m) for m in messages] for messages in (self.sends, self.receives)
        )
        self.wrapped = transport.wrapped.create_exchange(self.send_copies, self.receive_copies)

    def _start(self) -> None:
        for message, copy in zip(self.sends, self.send_copies, strict=True):
            copy.array[...] = message.cells
        for message in self.receives:
            fill_with_poison(message.cells)
        self.transport.wait_randomly()
        self.wrapped.start()

    def _finish(self) -> None:
        self.wrapped.finish()
        for message, copy in zip(self.sends, self.send_copies, strict=True):
            if not _equal_with_nan(message.cells, copy.array):
                raise self._modification_error(f"outgoing cells for rank {message.peer}")
        for message, copy in zip(self.receives, self.receive_copies, strict=True):
            if not _equal_with_nan(message.cells, fill_with_poison(np.empty_like(copy.array))):
                raise self._modification_error(f"cells being received from rank {message.peer}")
            message.cells[...] = copy.array

    def _modification_error(self, subject: str) -> HaloError:
        group = self.transport
        return HaloError(
            f"rank {group.rank} of {group.size}: {subject} were modified between start and finish of an exchange; do"
            " not modify the exchange's arrays until finish, or send copies"
        )


def fill_with_poison(array: np.ndarray) -> np.ndarray:
    """Fill an array with NaN, or the largest integer, and return it."""
    array[...] = np.nan if array.dtype.kind in "fc" else np.iinfo(array.dtype).max
    return array


def _create_message_like(message: Message) -> Message:
    """Return a message of the same shape with a new array."""
    array = np.zeros_like(message.cells, order="C")
    return Message(message.peer, array, tuple(slice(0, n) for n in array.shape))


def _equal_with_nan(a: np.ndarray, b: np.ndarray) -> bool:
    return np.array_equal(a, b, equal_nan=a.dtype.kind in "fc")
