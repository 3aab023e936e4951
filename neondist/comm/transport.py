"""Interface of transports: MPI, loopback and single process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ..arrays.namespace import HostStagingBuffer, synchronize_stream
from ..errors import GridError
from ..observer import Observers

ReduceOp = Literal["sum", "max"]


@dataclass(frozen=True)
class Message:
    """A box of a fixed array that is sent to, or received from, rank `peer`."""

    peer: int
    array: Any
    box: tuple[slice, ...]

    @property
    def cells(self) -> Any:
        """View of the transferred part of the array."""
        return self.array[self.box]

    @property
    def nbytes(self) -> int:
        """Bytes sent over the transport."""
        return int(self.cells.nbytes)


class Exchange(ABC):
    """Set of messages that is planned once and run many times; empty messages are omitted.

    Parameters
    ----------
    transport : Transport
        After it is closed, running the exchange raises GridError.

    Attributes
    ----------
    sends, receives : list of Message
    bytes_sent : int
        Bytes sent per run.
    run_count : int
        Number of runs so far.
    observers : Observers
        Notified of waits.
    is_running : bool
        Whether the exchange has been started, but not finished.
    """

    def __init__(self, transport: Transport, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        self.transport = transport
        self._device_arrays = [
            m.array for m in (*sends, *receives) if m.nbytes and transport.accepts_device_array(m.array)
        ]
        self.sends, self._outgoing_buffers = self._stage_on_host([message for message in sends if message.nbytes])
        self.receives, self._incoming_buffers = self._stage_on_host([message for message in receives if message.nbytes])
        self.bytes_sent = sum(message.nbytes for message in self.sends)
        self.run_count, self.is_running = 0, False
        self.observers = Observers()

    def run(self) -> None:
        """Send the contents of the send boxes, and fill the receive boxes."""
        self.start()
        self.finish()

    def start(self) -> None:
        """Send the contents of the send boxes; the arrays must not be accessed before `finish`."""
        if self.transport.closed:
            raise closed_error()
        self.run_count, self.is_running = self.run_count + 1, True
        for buffer in self._incoming_buffers:
            buffer.wait_until_reusable()
        for buffer in self._outgoing_buffers:
            buffer.copy_to_host()
        for array in self._device_arrays[:1]:
            synchronize_stream(array)
        self._run_observed(self._start)

    def finish(self) -> None:
        """Wait until the receive boxes are filled and the send boxes can be reused; return at once if not started."""
        if self.is_running:
            self._run_observed(self._finish)
            self.is_running = False
            for buffer in self._incoming_buffers:
                buffer.copy_to_device()

    def _stage_on_host(self, messages: Sequence[Message]) -> tuple[list[Message], list[HostStagingBuffer]]:
        """Return messages of arrays that the transport accepts, with host buffers in place of all other arrays.

        An array that its messages cover entirely has a single buffer, and is copied as a whole.
        """
        staged_messages, buffers, buffer_by_array_id = [], list[HostStagingBuffer](), dict[int, HostStagingBuffer]()
        covered_bytes = Counter[int]()
        for message in messages:
            covered_bytes[id(message.array)] += message.nbytes
        for message in messages:
            array, key = message.array, id(message.array)
            if self.transport.accepts_array(array):
                staged_messages.append(message)
            elif covered_bytes[key] == array.nbytes:
                if key not in buffer_by_array_id:
                    buffer_by_array_id[key] = HostStagingBuffer(array)
                    buffers.append(buffer_by_array_id[key])
                staged_messages.append(Message(message.peer, buffer_by_array_id[key].host, message.box))
            else:
                buffers.append(HostStagingBuffer(message.cells))
                box = tuple(slice(0, n) for n in buffers[-1].host.shape)
                staged_messages.append(Message(message.peer, buffers[-1].host, box))
        return staged_messages, buffers

    def _run_observed(self, work: Callable[[], None]) -> None:
        if not self.observers:
            work()
            return
        with self.observers.observe("wait", subject=self):
            work()

    @abstractmethod
    def _start(self) -> None: ...

    @abstractmethod
    def _finish(self) -> None: ...


class _ClosedTransport:
    def __getattr__(self, name: str) -> Any:
        raise closed_error()


def closed_error() -> GridError:
    """Return the error of calls on a closed grid."""
    return GridError("this process grid is closed: create another with nd.ProcessGrid(), and build models on it")


CLOSED: Any = _ClosedTransport()
"""Placeholder of a closed communicator: every attribute access raises."""


class Request(ABC):
    """A nonblocking sum."""

    @abstractmethod
    def wait(self) -> None:
        """Wait until the array holds the sum; the array must not be accessed before."""


class CompletedRequest(Request):
    """A request that is already complete."""

    def wait(self) -> None:
        """Return at once."""


class Transport(ABC):
    """A group of ranks. All methods that communicate are collective, except `abort`.

    Attributes
    ----------
    rank, size : int
    closed : bool
        Whether `close` was called.
    tensor_device_types : tuple of str
        Device types whose PyTorch tensors exchanges and `allreduce` accept directly.
    shares_process : bool
        Whether all ranks share one process, and thus its global random generators.
    """

    rank: int
    size: int
    closed: bool = False
    tensor_device_types: tuple[str, ...] = ()
    shares_process: bool = False

    @property
    def ended(self) -> bool:
        """Whether communication is no longer possible."""
        return self.closed

    def accepts_array(self, array: Any) -> bool:
        """Return whether exchanges and `allreduce` accept an array directly; other arrays are staged on the host."""
        kind = getattr(getattr(array, "device", None), "type", None)  # PyTorch's devices have a type
        return isinstance(array, np.ndarray) or kind in self.tensor_device_types or self.accepts_device_array(array)

    def accepts_device_array(self, array: Any) -> bool:
        """Return whether the transport accepts a CuPy array in device memory whose kernels have finished."""
        return False

    def begin_call(self, call: str) -> None:  # noqa: B027
        """Record the collective call that this rank begins, if ranks share a process."""

    @abstractmethod
    def split(self, color: int, key: int) -> Transport:
        """Return the group of the ranks with the same colour, ordered by key."""

    def wait_for_root(self) -> None:  # noqa: B027
        """Wait until rank 0 makes this call, without occupying a core for long. Collective."""

    def split_by(self, color: Callable[[int], int]) -> Transport:
        """Return the group of the ranks with this rank's colour, in order; `color` must be equal on all ranks."""
        return self.split(color(self.rank), self.rank)

    def split_tiles_and_replicas(self, tiles: int) -> tuple[Transport, Transport]:
        """Return this rank's group of `tiles` consecutive ranks, and the ranks at its position in all such groups."""
        replica, tile = divmod(self.rank, tiles)
        return self.split(replica, tile), self.split(tile, replica)

    def close(self) -> None:
        """Free the group's resources; communication is no longer possible."""
        self.closed = True

    def share_cores(self) -> Callable[[], None]:
        """Share a machine's cores among its ranks unless the user has set threads; return a function to undo this."""
        return lambda: None

    @abstractmethod
    def create_exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Exchange:
        """Return an exchange over fixed arrays; messages between two ranks match in the order listed."""

    @abstractmethod
    def allreduce(self, array: Any, op: ReduceOp = "sum") -> None:
        """Replace a contiguous array, or a tensor of `tensor_device_types`, by its sum, or maximum, over all ranks."""

    @abstractmethod
    def iallreduce(self, array: np.ndarray) -> Request:
        """Begin to replace a contiguous array by its sum over all ranks.

        All ranks begin their sums, and wait for them, in the same order.
        """

    @abstractmethod
    def allgather_array(self, array: np.ndarray) -> np.ndarray:
        """Return every rank's array (same shape and dtype on all ranks) in a new array (size, *shape)."""

    @abstractmethod
    def all_to_all(self, sends: Sequence[np.ndarray], receive_shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
        """Send an array to every rank, and return the arrays received from all ranks, in rank order.

        Parameters
        ----------
        sends : one array for each rank
            Arrays of one dtype; shapes may differ, and arrays may be empty.
        receive_shapes : one shape for each rank
            Shapes of the arrays to receive.

        Returns
        -------
        list of np.ndarray
            New contiguous arrays, not shared with other ranks.
        """

    @abstractmethod
    def allgather(self, value: Any) -> list[Any]:
        """Return copies of every rank's picklable value, in rank order."""

    @abstractmethod
    def bcast(self, value: Any, root: int = 0) -> Any:
        """Return a copy of the value of rank `root`; values of other ranks are ignored."""

    @abstractmethod
    def abort(self, code: int) -> None:
        """End the job on all ranks with this exit code."""
