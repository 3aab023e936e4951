"""Transport over torch.distributed, for jobs started by torchrun without MPI."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import reduce
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from ...comm.large_counts import MAX_COUNT, chunk_slices
from ...comm.transport import CompletedRequest, Exchange, Message, ReduceOp, Request, Transport, closed_error
from ...errors import LaunchError, RemoteError

TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables that torchrun sets."""
FIRST_MESSAGE_TAG = 1 << 16
"""Lower tags are reserved for the caller's own messages over the same process group."""
MESSAGE_KINDS = MESSAGES, COLLECTIVES, SUMS = range(3)
"""Kinds of messages, each with its own tag: exchanges; collectives; the second half of pending sums."""
ALLREDUCE_DTYPES = ("float32", "float64", "int32", "int64")
"""Dtypes reduced by gloo's own allreduce, which does not support all dtypes."""
DIRECT_DEVICE_BACKENDS = ("cpu:gloo", "cuda:nccl")
"""Devices whose tensors a backend sends directly; gloo supports cuda in collectives, but not in messages."""
REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX} if dist.is_available() else {}

PeerTensor = tuple[int, torch.Tensor]
"""Rank of the peer, and a tensor of bytes."""


def world(max_count: int = MAX_COUNT) -> TorchTransport:
    """Return the transport over torch.distributed's default process group. Collective.

    The group is initialised with gloo, from the variables that torchrun sets, unless it is already initialised.

    Parameters
    ----------
    max_count : int
        As in `TorchTransport`.

    Raises
    ------
    LaunchError
        If there is neither a default process group nor torchrun's environment, or gloo cannot start or is missing.
    """
    if not (dist.is_available() and dist.is_gloo_available()):
        raise LaunchError(
            "this PyTorch build has no torch.distributed or no gloo backend: install another build, or run over MPI"
        )
    if not dist.is_initialized():
        missing = [name for name in TORCHRUN_VARIABLES if name not in os.environ]
        if missing:
            raise LaunchError(
                f"torch.distributed is not initialised, and the environment lacks {', '.join(missing)}: start the"
                " script with `torchrun --nproc-per-node N SCRIPT`, or call torch.distributed.init_process_group first"
            )
        try:
            dist.init_process_group("gloo")
        except (RuntimeError, ValueError) as error:
            settings = ", ".join(f"{name}={os.environ[name]}" for name in TORCHRUN_VARIABLES)
            raise LaunchError(
                f"torch.distributed does not start with {settings}: {error}; if gloo selects the wrong network"
                " interface, set GLOO_SOCKET_IFNAME"
            ) from error
    return TorchTransport(max_count=max_count)


def join_process_group(address: str, rank: int, size: int, timeout: float = 600.0) -> TorchTransport:
    """Return the transport of processes started one by one, which rendezvous at the address of rank 0. Collective.

    Parameters
    ----------
    address : str
        HOST:PORT, where rank 0 listens.
    rank, size : int
    timeout : float
        Seconds to wait for the other processes.

    Raises
    ------
    LaunchError
        If the other processes do not connect in time, or gloo cannot start or is missing.
    """
    if not (dist.is_available() and dist.is_gloo_available()):
        raise LaunchError(
            "this PyTorch build has no torch.distributed or no gloo backend: install another build, or run over MPI"
        )
    if not dist.is_initialized():
        init_url = f"tcp://{address}"
        timeout_delta = timedelta(seconds=timeout)
        try:
            dist.init_process_group("gloo", init_method=init_url, rank=rank, world_size=size, timeout=timeout_delta)
        except (RuntimeError, ValueError) as error:
            raise LaunchError(
                f"process {rank} of {size} cannot connect to the others at {address}: {str(error).splitlines()[0]};"
                " start all processes, and check that the address is that of process 0 and that its port is free"
            ) from error
    return TorchTransport()


@dataclass
class _GroupCounter:
    """Number of the last group of ranks that this process created in a process group."""

    last_number: int = 0


class _RankSubset(NamedTuple):
    """Ordered subset of the ranks of a process group, and the number of this subgroup."""

    ranks: list[int]
    group_number: int
    group_counter: _GroupCounter


class TorchTransport(Transport):
    """Transport over a torch.distributed process group, which the caller owns.

    Subgroups are not process groups, since torch creates these collectively, with a connection per pair, and frees them
    only at exit. The messages of a subgroup have their own tags; the subgroup is released with its last user.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup, optional
        A group with a gloo backend for host arrays. Default: the default process group.
    max_count : int
        Maximum number of bytes per message and of elements per reduction; larger messages and arrays are split.

    Raises
    ------
    LaunchError
        If the group has no gloo backend for host arrays, for example only nccl.

    Attributes
    ----------
    peers : list of int
        All ranks but this one.
    """

    def __init__(self, group: Any = None, subset: _RankSubset | None = None, max_count: int = MAX_COUNT) -> None:
        self._group, self.max_count = dist.group.WORLD if group is None else group, max_count
        backends = dist.get_backend_config(self._group)
        if "cpu:gloo" not in backends:
            raise LaunchError(
                f"group: expected a process group with gloo for host arrays, got one with {backends}; create one"
                " with torch.distributed.new_group(backend='gloo'), or initialise with 'cpu:gloo,cuda:nccl'"
            )
        group_ranks = dist.get_process_group_ranks(self._group)
        # ranks are numbered as in the default process group
        self._ranks, group_number, self._group_counter = subset or _RankSubset(group_ranks, 0, _GroupCounter())
        self._tags = [FIRST_MESSAGE_TAG + group_number * len(MESSAGE_KINDS) + kind for kind in MESSAGE_KINDS]
        self.rank, self.size = self._ranks.index(dist.get_rank()), len(self._ranks)
        self.peers = [peer for peer in range(self.size) if peer != self.rank]
        self.tensor_device_types = tuple(
            pair.partition(":")[0] for pair in backends.split(",") if pair in DIRECT_DEVICE_BACKENDS
        )
        self._is_whole_group = self.size == len(group_ranks)

    @property
    def group(self) -> Any:
        """The process group; an error is raised if the transport is closed."""
        if self.closed:
            raise closed_error()
        return self._group

    def split(self, color: int, key: int) -> TorchTransport:
        """Return the group of the ranks with the same colour, ordered by key."""
        colors = self.allgather((color, key))
        keys_and_ranks = sorted((key, rank) for rank, (other, key) in enumerate(colors) if other == color)
        return self._subgroup([rank for _, rank in keys_and_ranks], self._new_subgroup_number())

    def split_tiles_and_replicas(self, tiles: int) -> tuple[Transport, Transport]:
        """Return the groups of tiles and of replicas, whose members are known without communication."""
        replica, tile = divmod(self.rank, tiles)
        number = self._new_subgroup_number()
        ranks = range(self.size)
        # one number for both groups, which have only this rank in common
        return self._subgroup(ranks[replica * tiles :][:tiles], number), self._subgroup(ranks[tile::tiles], number)

    def _new_subgroup_number(self) -> int:
        """Return a group number that no two of these ranks have used together. Collective."""
        last_number = np.array([self._group_counter.last_number])
        self.allreduce(last_number, "max")
        self._group_counter.last_number = int(last_number[0]) + 1
        return self._group_counter.last_number

    def _subgroup(self, ranks: Sequence[int], group_number: int) -> TorchTransport:
        subset = _RankSubset([self._ranks[rank] for rank in ranks], group_number, self._group_counter)
        return TorchTransport(self.group, subset, self.max_count)

    def create_exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Exchange:
        """Return an exchange directly from and into the arrays, or through buffers for non-contiguous boxes."""
        return _TorchExchange(self, sends, receives)

    def allreduce(self, array: Any, op: ReduceOp = "sum") -> None:
        """Replace a contiguous array, or a tensor on a supported device, with its sum or maximum over all ranks."""
        if isinstance(array, torch.Tensor):
            self._allreduce_tensor(array, op)
        else:
            self._start_reduction(array, op, COLLECTIVES).wait()

    def iallreduce(self, array: np.ndarray) -> Request:
        """Start replacing a contiguous array with its sum over all ranks."""
        return self._start_reduction(array, "sum", SUMS)

    def _allreduce_tensor(self, tensor: torch.Tensor, op: ReduceOp) -> None:
        if self.size == 1 or not tensor.numel():
            return
        if self._can_allreduce(str(tensor.dtype).removeprefix("torch."), op):
            with self.convert_remote_errors():
                for part in tensor.view(-1).split(self.max_count):
                    dist.all_reduce(part, REDUCE_OPS[op], self.group)
            return
        tensors_by_rank = [tensor if peer == self.rank else torch.empty_like(tensor) for peer in range(self.size)]
        receives = [(peer, bytes_of(tensors_by_rank[peer])) for peer in self.peers]
        self.sendrecv([(peer, bytes_of(tensor)) for peer in self.peers], receives)
        combine: Any = torch.add if op == "sum" else torch.maximum
        tensor.copy_(reduce(combine, tensors_by_rank))

    def _can_allreduce(self, dtype: str, op: ReduceOp) -> bool:
        """Return whether the process group can reduce arrays of a dtype; gloo's maximum of floats loses NaN."""
        return self._is_whole_group and dtype in ALLREDUCE_DTYPES and (op == "sum" or not dtype.startswith("float"))

    def _start_reduction(self, array: np.ndarray, op: ReduceOp, kind: int) -> Request:
        if self.size == 1 or not array.size:
            return CompletedRequest()
        if not array.flags.forc:
            raise ValueError(f"array: expected a contiguous array, got strides {array.strides} of shape {array.shape}")
        flat = array.ravel("K")  # a view
        if not self._can_allreduce(array.dtype.name, op):
            return _PendingReduction(self, flat, op, kind)
        with self.convert_remote_errors():
            parts = torch.from_numpy(flat).split(self.max_count)
            return _PendingOps(self, [dist.all_reduce(p, REDUCE_OPS[op], self.group, async_op=True) for p in parts])

    def allgather_array(self, array: np.ndarray) -> np.ndarray:
        """Return the arrays of all ranks, stacked along a new first axis."""
        gathered = np.empty((self.size, *array.shape), array.dtype)
        gathered[self.rank] = array
        rows = [as_uint8_tensor(gathered[rank : rank + 1]) for rank in range(self.size)]
        self.sendrecv([(peer, rows[self.rank]) for peer in self.peers], [(peer, rows[peer]) for peer in self.peers])
        return gathered

    def all_to_all(self, sends: Sequence[np.ndarray], receive_shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
        """Send each rank its array, and return the arrays that the ranks sent to this rank, without pickling."""
        received = [np.empty(shape, sends[0].dtype) for shape in receive_shapes]
        received[self.rank][...] = sends[self.rank]
        outgoing = [(peer, as_uint8_tensor(np.require(sends[peer], requirements=["C", "W"]))) for peer in self.peers]
        self.sendrecv(outgoing, [(peer, as_uint8_tensor(received[peer])) for peer in self.peers])
        return received

    def allgather(self, value: Any) -> list[Any]:
        """Return copies of every rank's value, in rank order."""
        data = pickle_to_array(value)
        sizes = self.allgather_array(np.array(data.size))
        parts = self.all_to_all([data] * self.size, [(size,) for size in sizes])
        return [pickle.loads(part.tobytes()) for part in parts]

    def bcast(self, value: Any, root: int = 0) -> Any:
        """Return a copy of the value of rank `root`."""
        pickled_value = pickle_to_array(value if self.rank == root else None)
        size = np.array(pickled_value.size)
        self._broadcast(size, root)
        data: np.ndarray = pickled_value if self.rank == root else np.empty(size, np.uint8)
        self._broadcast(data, root)
        return pickle.loads(data.tobytes())

    def _broadcast(self, array: np.ndarray, root: int) -> None:
        data = as_uint8_tensor(array)
        if self.rank == root:
            self.sendrecv([(peer, data) for peer in self.peers], [])
        else:
            self.sendrecv([], [(root, data)])

    def abort(self, code: int) -> None:
        """End this rank with this exit code; torchrun then ends the other ranks, which lose their connections to it."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def post(self, sends: Iterable[PeerTensor], receives: Iterable[PeerTensor], kind: int) -> Request:
        """Start sends and receives; messages of the same kind between two ranks match in the order listed."""
        group, tag = self.group, self._tags[kind]
        with self.convert_remote_errors():
            # receives first, so that few messages arrive before their receive
            calls_and_tensors = [(dist.irecv, receives), (dist.isend, sends)]
            ops = [
                dist.P2POp(call, data[chunk], self._ranks[peer], group, tag)
                for call, tensors in calls_and_tensors
                for peer, data in tensors
                for chunk in chunk_slices(data.numel(), self.max_count)
            ]
            # as one batch: nccl runs separate operations one after the other, and two ranks could deadlock
            return _PendingOps(self, dist.batch_isend_irecv(ops) if ops else [])

    def sendrecv(self, sends: Iterable[PeerTensor], receives: Iterable[PeerTensor]) -> None:
        """Exchange the messages of a collective."""
        self.post(sends, receives, COLLECTIVES).wait()

    @contextmanager
    def convert_remote_errors(self) -> Iterator[None]:
        """Convert gloo's errors to RemoteError."""
        try:
            yield
        except RuntimeError as error:
            raise RemoteError(
                f"rank {self.rank} of {self.size}: another rank has exited or does not respond; see its output"
            ) from error


class _PendingOps(Request):
    def __init__(self, transport: TorchTransport, works: Sequence[Any]) -> None:
        self.transport, self.works = transport, works

    def wait(self) -> None:
        with self.transport.convert_remote_errors():
            for work in self.works:
                work.wait()


class _PendingReduction(Request):
    """Pending sum or maximum: each rank reduces one part of all arrays, in rank order, and sends it to the others."""

    def __init__(self, transport: TorchTransport, flat: np.ndarray, op: ReduceOp, kind: int) -> None:
        part_bounds = [flat.size * rank // transport.size for rank in range(transport.size + 1)]
        self.transport, self.kind = transport, kind
        self.combine = {"sum": np.add, "max": np.maximum}[op]
        self.parts = [flat[start:end] for start, end in pairwise(part_bounds)]
        self.own_part = self.parts[transport.rank]
        self.received_parts = [np.empty_like(self.own_part) for _ in self.parts]
        self.received_parts[transport.rank][...] = self.own_part
        self.first_exchange = self._post(self.parts, self.received_parts, COLLECTIVES)

    def wait(self) -> None:
        self.first_exchange.wait()
        self.own_part[...] = reduce(self.combine, self.received_parts)
        self._post([self.own_part] * len(self.parts), self.parts, self.kind).wait()

    def _post(self, sends: Sequence[np.ndarray], receives: Sequence[np.ndarray], kind: int) -> Request:
        transport = self.transport
        outgoing, incoming = (
            [(peer, as_uint8_tensor(ends[peer])) for peer in transport.peers] for ends in (sends, receives)
        )
        return transport.post(outgoing, incoming, kind)


class _TorchExchange(Exchange):
    transport: TorchTransport

    def __init__(self, transport: TorchTransport, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        super().__init__(transport, sends, receives)
        self.send_buffers, self.receive_buffers = (
            [_with_contiguous_buffer(m.cells) for m in group] for group in (self.sends, self.receives)
        )
        self.outgoing = [(m.peer, bytes_of(data)) for m, (_, data) in zip(self.sends, self.send_buffers, strict=True)]
        self.incoming = [
            (m.peer, bytes_of(data)) for m, (_, data) in zip(self.receives, self.receive_buffers, strict=True)
        ]

    def _start(self) -> None:
        for cells, data in self.send_buffers:
            if data is not cells:
                data[...] = cells
        self.request = self.transport.post(self.outgoing, self.incoming, MESSAGES)

    def _finish(self) -> None:
        self.request.wait()
        for cells, data in self.receive_buffers:
            if data is not cells:
                cells[...] = data


def _with_contiguous_buffer(cells: Any) -> tuple[Any, Any]:
    """Return cells and the contiguous array that is sent or received: the cells themselves, or a buffer."""
    if isinstance(cells, torch.Tensor):
        return cells, cells
    is_sendable = cells.flags.c_contiguous and cells.flags.writeable  # PyTorch warns about read-only arrays
    return cells, cells if is_sendable else np.empty(cells.shape, cells.dtype)


def as_uint8_tensor(array: np.ndarray) -> torch.Tensor:
    """Return the bytes of a contiguous array of any dtype; not a copy."""
    return torch.from_numpy(array.reshape(-1).view(np.uint8))


def bytes_of(data: Any) -> torch.Tensor:
    """Return the bytes of a contiguous array or tensor; not a copy."""
    return data.view(-1).view(torch.uint8) if isinstance(data, torch.Tensor) else as_uint8_tensor(data)


def pickle_to_array(value: Any) -> np.ndarray:
    """Return a value as an array of bytes, for pickle.loads."""
    return np.frombuffer(bytearray(pickle.dumps(value)), np.uint8)
