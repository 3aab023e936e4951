"""Interface of a communicator; MPI, loopback and a single process implement it alike."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ..arrays.namespace import HostTwin, wait_for
from ..errors import GridError
from ..observer import Observers

ReduceOp = Literal["sum", "max"]


@dataclass(frozen=True)
class Message:
    """A box of a fixed array that goes to, or comes from, rank `peer`."""

    peer: int
    array: Any
    box: tuple[slice, ...]

    @property
    def cells(self) -> Any:
        """The part of the array that travels (a view)."""
        return self.array[self.box]

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return int(self.cells.nbytes)


class Exchange(ABC):
    """Messages that are planned once and run many times; empty messages are left out.

    Parameters
    ----------
    transport : Transport
        Once it is closed nothing can be sent.

    Attributes
    ----------
    sends, receives : list of Message
    bytes_sent : int
        Of one run.
    runs : int
        How often they were sent.
    observers : Observers
        Are told when it waits.
    under_way : bool
        Whether they have been started and not finished.
    """

    def __init__(self, transport: Transport, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        self.transport = transport
        self._direct = [m.array for m in (*sends, *receives) if m.nbytes and transport.takes_of_device(m.array)]
        self.sends, self._leaving = self._on_host([message for message in sends if message.nbytes])
        self.receives, self._arriving = self._on_host([message for message in receives if message.nbytes])
        self.bytes_sent = sum(message.nbytes for message in self.sends)
        self.runs, self.under_way = 0, False
        self.observers = Observers()

    def run(self) -> None:
        """Send what the send boxes hold now, and fill the receive boxes."""
        self.start()
        self.finish()

    def start(self) -> None:
        """Send what the send boxes hold now; none of the arrays may be touched before `finish`."""
        if self.transport.closed:
            raise closed_error()
        self.runs, self.under_way = self.runs + 1, True
        for twin in self._arriving:
            twin.settle()
        for twin in self._leaving:
            twin.fetch()
        for array in self._direct[:1]:
            wait_for(array)
        self._watched(self._start)

    def finish(self) -> None:
        """Wait until the receive boxes are filled and the send boxes free again; at once, if nothing is under way."""
        if self.under_way:
            self._watched(self._finish)
            self.under_way = False
            for twin in self._arriving:
                twin.put()

    def _on_host(self, messages: Sequence[Message]) -> tuple[list[Message], list[HostTwin]]:
        """Return messages of arrays that the transport takes, and the twins of those that it does not.

        An array that its messages fill has one twin, which is copied at once.
        """
        found, twins, whole = [], list[HostTwin](), dict[int, HostTwin]()
        filled = Counter[int]()
        for message in messages:
            filled[id(message.array)] += message.nbytes
        for message in messages:
            array, key = message.array, id(message.array)
            if self.transport.takes(array):
                found.append(message)
            elif filled[key] == array.nbytes:
                if key not in whole:
                    whole[key] = HostTwin(array)
                    twins.append(whole[key])
                found.append(Message(message.peer, whole[key].host, message.box))
            else:
                twins.append(HostTwin(message.cells))
                box = tuple(slice(0, n) for n in twins[-1].host.shape)
                found.append(Message(message.peer, twins[-1].host, box))
        return found, twins

    def _watched(self, work: Callable[[], None]) -> None:
        if not self.observers:
            work()
            return
        with self.observers.during("wait", subject=self):
            work()

    @abstractmethod
    def _start(self) -> None: ...

    @abstractmethod
    def _finish(self) -> None: ...


class _Closed:
    def __getattr__(self, name: str) -> Any:
        raise closed_error()


def closed_error() -> GridError:
    """Return the error that tells that a grid is closed."""
    return GridError("this process grid is closed: create another with nd.ProcessGrid(), and build models on it")


CLOSED: Any = _Closed()
"""Stands where a communicator was: whatever is asked of it is an error."""


class Request(ABC):
    """A sum under way."""

    @abstractmethod
    def wait(self) -> None:
        """Return when the array holds the sum; until then it must not be accessed."""


class Done(Request):
    """There was nothing to wait for."""

    def wait(self) -> None:
        """Return at once."""


class Transport(ABC):
    """A group of ranks. All methods but `abort` are collective.

    Attributes
    ----------
    rank, size : int
    closed : bool
        Whether `close` was called.
    tensors : tuple of str
        The kinds of devices whose PyTorch tensors it takes itself, in exchanges and as `allreduce`'s array.
    one_process : bool
        Whether all ranks share one process, and so the global generators of random numbers.
    call : str
        The collective call that this rank has begun last, for messages about ranks that do not join it.
    """

    rank: int
    size: int
    closed: bool = False
    tensors: tuple[str, ...] = ()
    one_process: bool = False
    call: str = ""

    @property
    def ended(self) -> bool:
        """Whether nothing can be sent any more."""
        return self.closed

    def takes(self, array: Any) -> bool:
        """Return whether exchanges and `allreduce` take an array themselves; others go through the host."""
        kind = getattr(getattr(array, "device", None), "type", None)  # PyTorch's
        return isinstance(array, np.ndarray) or kind in self.tensors or self.takes_of_device(array)

    def takes_of_device(self, array: Any) -> bool:
        """Return whether it takes an array of CuPy's from the device, where what computes it has to be waited for."""
        return False

    def begin(self, call: str) -> None:
        """Take note of the collective call that this rank begins."""
        self.call = call

    @abstractmethod
    def split(self, color: int, key: int) -> Transport:
        """Return the group of the ranks that gave the same colour, ordered by key."""

    def split_by(self, color: Callable[[int], int]) -> Transport:
        """Return the group of the ranks of this one's colour, in their order; every rank gives the same function."""
        return self.split(color(self.rank), self.rank)

    def cut(self, tiles: int) -> tuple[Transport, Transport]:
        """Return the group of `tiles` consecutive ranks that this one is in, and that of its place in all of them."""
        replica, tile = divmod(self.rank, tiles)
        return self.split(replica, tile), self.split(tile, replica)

    def close(self) -> None:
        """Free what this group has of its own; nothing can be sent through it any more."""
        self.closed = True

    def share_cores(self) -> Callable[[], None]:
        """Let ranks on one machine share its cores unless threads are set by the user; return a function to undo it."""
        return lambda: None

    @abstractmethod
    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Exchange:
        """Return an exchange over fixed arrays; messages between two ranks match in the order listed."""

    @abstractmethod
    def allreduce(self, array: Any, op: ReduceOp = "sum") -> None:
        """Replace a contiguous array, or one of its `tensors`, by its sum, or maximum, over all ranks."""

    @abstractmethod
    def iallreduce(self, array: np.ndarray) -> Request:
        """Begin to replace a contiguous array by its sum over all ranks; all ranks begin their sums in the same order.

        They wait for them in that order, too.
        """

    @abstractmethod
    def allgather_array(self, array: np.ndarray) -> np.ndarray:
        """Return every rank's array, of one shape and dtype on all ranks, as a new array (size, *shape)."""

    @abstractmethod
    def all_to_all(self, sends: Sequence[np.ndarray], receive_shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
        """Send an array to every rank, and return what every rank sent to this one, in rank order.

        Parameters
        ----------
        sends : one array for each rank
            Of one dtype on all ranks; shapes may differ, and arrays may be empty.
        receive_shapes : one shape for each rank
            Of what it sends to this one.

        Returns
        -------
        list of np.ndarray
            Contiguous, and not shared.
        """

    @abstractmethod
    def allgather(self, value: Any) -> list[Any]:
        """Return copies of every rank's value, in rank order; values are what `pickle` can copy."""

    @abstractmethod
    def bcast(self, value: Any, root: int = 0) -> Any:
        """Return a copy of the value of rank `root`; what other ranks give does not matter."""

    @abstractmethod
    def abort(self, code: int) -> None:
        """End the job on all ranks with this exit code."""
