"""Communication of tensors over a Transport for the steps of a plan, with accounting, and its adjoints."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import numpy as np
import torch

from ...comm import DebugTransport, Message, ProcessGrid, Transport
from ...geometry import Lattice, Piece, Transfer, to_slice
from ...halo.exchange import DEFAULT_PHASE
from ...observer import ObservedEvent
from ...runtime.observers.ledger import Ledger, LedgerKey
from ..ir.graph import ACCUMULATION_DTYPE, GRADIENTS
from ..ir.layout import Mesh

_AS_INTEGERS = {torch.bfloat16: torch.int16}  # dtypes that NumPy lacks are sent as bits


class MeshComm:
    """Communicators of a grid by the axes of its mesh, and a ledger of their traffic.

    Attributes
    ----------
    mesh : Mesh
    place : tuple of int
        This rank's.
    ledger : Ledger
        Messages sent by this rank, and its contributions to sums.
    sent : int
        Their total bytes.
    phase : Phase
        Of the current pass, for border schemes.
    guarded : bool
        Whether steps are checked for errors.
    """

    def __init__(self, grid: ProcessGrid, spatial: int) -> None:
        self.grid = grid
        self.mesh = Mesh.of(grid.shape, spatial)
        self.place = self.mesh.place(grid.rank)
        self.ledger: Ledger = Counter()
        self.phase = DEFAULT_PHASE
        self.bytes_sent = 0
        self.guarded = False
        self._groups: dict[frozenset[int], tuple[str, Transport]] = {}
        self._sums: dict[frozenset[int], list[tuple[str, Transport]]] = {}
        if grid.world.shares_process:
            # autograd has one thread per GPU, where a waiting virtual rank would block the others: let each rank's own
            # thread run its backward passes, as for CPU tensors
            grid.on_close(partial(torch.autograd.set_multithreading_enabled, torch._C._is_multithreading_enabled()))
            torch.autograd.set_multithreading_enabled(False)

    def guard(self, seed: int) -> None:
        """Check steps and schemes for errors, and delay messages, in everything planned from now on."""
        self.grid, self.guarded = copy.copy(self.grid), True
        self.grid.world = DebugTransport(self.grid.world, seed)
        self.grid.tile_comm = DebugTransport(self.grid.tile_comm, seed)

    def record(self, kind: str, step: str, direction: str, peer: int | str, nbytes: int) -> None:
        """Record a message to a rank, or a sum in a group."""
        self.ledger[LedgerKey(kind, step, direction, peer, nbytes)] += 1
        self.bytes_sent += nbytes

    def group(self, axes: frozenset[int]) -> tuple[str, Transport]:
        """Return the name and the transport of a group for sums; the first call is collective."""
        group = self._groups.get(axes)
        if group is None:
            group = self._groups[axes] = self._make_group(axes)
        return group

    def _make_group(self, axes: frozenset[int]) -> tuple[str, Transport]:
        every, grid = self.mesh.axes, self.grid
        if axes == every:
            return "world", grid.world
        if axes == every - {0}:
            return "tiles", grid.tile_comm
        if axes == {0}:
            return "replicas", grid.replica_comm
        (axis,) = axes
        others = Mesh(tuple(parts for other, parts in enumerate(self.mesh.parts) if other != axis))

        def color(rank: int) -> int:
            return others.rank([at for other, at in enumerate(self.mesh.place(rank)) if other != axis])

        group = grid.world.split_by(color)
        grid.on_close(group.close)
        return f"axis {axis}", group

    def connect(self, device: torch.device) -> None:
        """Connect the devices of all ranks, which NCCL needs before messages between only some of them; collective.

        A module must therefore be on its device when it is distributed.
        """
        if device.type != "cpu" and device.type in self.grid.world.tensor_device_types:
            self.grid.world.allreduce(torch.zeros(1, device=device))

    def staging_device(self, device: torch.device) -> torch.device:
        """Return the device from which tensors are sent: their own if the transport supports it, else the CPU."""
        return device if device.type in self.grid.world.tensor_device_types else torch.device("cpu")

    def staged_exchange(self, group: Transport, out: Flats, back: Flats, first: int) -> StagedExchange:
        """Return the exchange of flat tensors, keyed by the peer's rank; `first` as of `reduction_group`."""
        return StagedExchange(self, group, out, back, first)

    def reduction_group(self, axes: Collection[int]) -> tuple[Transport, int]:
        """Return the transport for messages along axes, and the rank of its first member; not collective."""
        grid = self.grid  # its world may be the caller's communicator, with messages of its own; its tiles are not
        return (grid.world, 0) if 0 in axes else (grid.tile_comm, grid.rank - grid.tile)

    def reduce(
        self,
        step: str,
        direction: str,
        tensor: torch.Tensor,
        axes: frozenset[int],
        op: Any = "sum",
        in_place: bool = False,
    ) -> Any:
        """Return the sum, or maximum, over axes as a new tensor, or possibly in place; collective over the axes."""
        groups = self._sums.get(axes)
        if groups is None:  # created by all ranks, those without elements too
            groups = self._sums[axes] = [self.group(group_axes) for group_axes in self.mesh.reduction_axes(axes)]
        if not groups or not tensor.numel():
            return tensor if in_place else tensor.clone()
        dtype = ACCUMULATION_DTYPE.get(tensor.dtype, tensor.dtype)
        wide = tensor.detach().to(self.staging_device(tensor.device), dtype, copy=not in_place)
        if wide.is_complex() or wide.is_neg():
            wide = wide.resolve_conj().resolve_neg()
        wide = wide.contiguous()
        real = wide.view(torch.uint8) if dtype == torch.bool else _real(wide)
        array = real if self.grid.world.tensor_device_types else real.numpy()
        observers = self.grid.observers
        with observers.observe("sync" if step == GRADIENTS else "reduce", step, direction):
            for name, group in groups:
                self.record("sum", step, direction, name, array.nbytes)
                with observers.observe("wait", "", direction, name):
                    group.allreduce(array, op)
        return wide if wide.dtype == tensor.dtype and wide.device == tensor.device else wide.to(tensor)


Flats = dict[int, torch.Tensor]
"""A flat tensor for each rank of the world."""


class StagedExchange:
    """Exchange of flat tensors, staged through the host if the transport does not support their device.

    Attributes
    ----------
    exchange : Exchange
    """

    def __init__(self, comm: MeshComm, group: Transport, out: Flats, back: Flats, first: int) -> None:
        def stage(flats: Flats, staged: list[tuple[torch.Tensor, torch.Tensor]]) -> list[Message]:
            by_peer = {}
            for peer, flat in flats.items():
                buffer = by_peer[peer] = torch.empty_like(flat, device=comm.staging_device(flat.device))
                if buffer.device == flat.device:
                    by_peer[peer] = flat
                else:
                    staged.append((flat, buffer))
            return create_messages(by_peer, first, bool(group.tensor_device_types))

        self._leaving: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._arriving: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.exchange = group.create_exchange(stage(out, self._leaving), stage(back, self._arriving))
        self.exchange.observers = comm.grid.observers

    def run(self) -> None:
        """Send the current contents of the outgoing tensors, and fill the incoming ones."""
        self.start()
        self.finish()

    def start(self) -> None:
        """Send the current contents of the outgoing tensors."""
        for flat, host in self._leaving:
            host.copy_(flat)
        self.exchange.start()

    def finish(self) -> None:
        """Fill the incoming tensors."""
        self.exchange.finish()
        for flat, host in self._arriving:
            flat.copy_(host)


class Channel:
    """Messages of one transfer through flat buffers, planned once.

    Parameters
    ----------
    name : str
        Of the step.
    kind : 'halo' or 'redistribution'
    """

    def __init__(self, comm: MeshComm, name: str, transfer: Transfer, kind: str) -> None:
        self.comm, self.name, self.transfer, self.kind = comm, name, transfer, kind
        rank, part = comm.grid.rank, [-request.source.range(comm.place)[0] for request in transfer.requests]
        self.own, leaving = (  # in coordinates of this rank's part
            [replace(piece, source=piece.source.shift(part)) for piece in pieces]
            for pieces in (transfer.local(rank), transfer.sends(rank))
        )
        self.arriving = _by_peer(piece for piece in transfer.receives(rank) if piece.peer != rank)
        self.leaving = _by_peer(leaving)
        self.group, self.first = comm.reduction_group({axis for request in transfer.requests for axis in request.axes})
        self._moved = {request.dim for request in transfer.requests}
        self._planned: dict[Any, Any] = {}

    def observe(self, direction: str) -> ObservedEvent:
        """Return the context manager that reports this exchange to observers."""
        event = "halo" if self.kind == "halo" else "redistribute"
        return self.comm.grid.observers.observe(event, self.name, direction)

    def view(self, tensor: torch.Tensor, pads: Sequence[tuple[int, int, int]] = (), fill: float = 0.0) -> torch.Tensor:
        """Return this rank's view of a tensor, from its part.

        Parameters
        ----------
        pads : sequence of (dimension, before, after)
            Numbers of indices of value `fill` added around the view.
        """
        result = view = self.empty_view(tensor, pads)
        for dim, before, after in pads:
            for start, length in ((0, before), (view.shape[dim] - after, after)):
                if length:
                    view.narrow(dim, start, length).fill_(fill)
            view = view.narrow(dim, before, view.shape[dim] - before - after)
        for margin in self._margins(view):
            margin.fill_(fill)
        buffers = self._start("forward", tensor)
        for piece in self.own:
            self._at(view, piece.target).copy_(self._at(tensor, piece.source))
        for piece, cells in buffers.finish() if buffers else ():
            self._at(view, piece.target).copy_(cells)
        return result

    def _margins(self, view: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the parts of a view around the rank's own one, if they may have indices that are not received."""
        if not self.transfer.has_unused:
            return
        own = [piece.target.ranges for piece in self.own]
        for at, request in enumerate(self.transfer.requests):
            lo, hi = (own[0][at].start, own[0][at].stop) if own else (0, 0)
            yield view.narrow(request.dim, 0, lo)
            yield view.narrow(request.dim, hi, view.shape[request.dim] - hi)

    def empty_view(self, tensor: torch.Tensor, pads: Sequence[tuple[int, int, int]] = ()) -> torch.Tensor:
        """Return an uninitialised tensor of the shape of `view`'s result."""
        shape = list(self.transfer.shape(tuple(tensor.shape), self.comm.grid.rank))
        for dim, before, after in pads:
            shape[dim] += before + after
        return torch.empty(shape, dtype=tensor.dtype, device=tensor.device, memory_format=memory_format_of(tensor))

    def adjoint(
        self,
        gradient: torch.Tensor,
        shape: Sequence[int],
        pads: Sequence[tuple[int, int, int]] = (),
        in_place: bool = False,
    ) -> torch.Tensor:
        """Return the gradient of this rank's part from the gradients of all views of it, which are summed.

        Parameters
        ----------
        in_place : bool
            Whether the result may share memory with `gradient`.
        """
        for dim, before, after in pads:
            gradient = gradient.narrow(dim, before, gradient.shape[dim] - before - after)
        buffers = self._start("backward", gradient)
        part = self.own_part(gradient, shape, in_place)
        for piece, cells in buffers.finish() if buffers else ():
            self._at(part, piece.source).add_(cells)
        return part

    def own_cells(
        self, view: torch.Tensor, shape: Sequence[int], pads: Sequence[tuple[int, int, int]] = ()
    ) -> torch.Tensor | None:
        """Return the cells of this rank's part, of this shape, in a result of `view`; None if it lacks some."""
        for dim, before, after in pads:
            view = view.narrow(dim, before, view.shape[dim] - before - after)
        own = [self._at(view, piece.target) for piece in self.own]
        return own[0] if len(own) == 1 and own[0].shape == tuple(shape) else None

    def own_part(self, gradient: torch.Tensor, shape: Sequence[int], in_place: bool = False) -> torch.Tensor:
        """Return the gradient of this rank's part from its own view only; possibly a view of `gradient`."""
        whole = self.own_cells(gradient, shape)
        if whole is not None:
            return whole if in_place else whole.clone(memory_format=memory_format_of(gradient))
        part = gradient.new_zeros(tuple(shape))
        for piece in self.own:
            self._at(part, piece.source).add_(self._at(gradient, piece.target))
        return part

    def _at(self, tensor: torch.Tensor, indices: Lattice) -> torch.Tensor:
        slices = [slice(None)] * tensor.dim()
        for request, cells in zip(self.transfer.requests, indices.ranges, strict=True):
            slices[request.dim] = to_slice(cells)
        return tensor[tuple(slices)]

    def _start(self, direction: str, tensor: torch.Tensor) -> _Buffers | None:
        """Start sending parts of a tensor, or of its views; return a handle to wait on; None: no rank sends."""
        if self.transfer.needs_no_messages:
            return None
        sizes = tuple(n for dim, n in enumerate(tensor.shape) if dim not in self._moved)
        key = direction, (tensor.dtype, tensor.device), sizes
        buffers = self._planned.get(key)
        if buffers is None:
            self._planned = {k: kept for k, kept in self._planned.items() if k[1:] == key[1:]}  # one batch size
            buffers = self._planned[key] = _Buffers(self, tensor, direction == "forward")
        for piece, cells in buffers.leaving:
            cells.copy_(self._at(tensor, piece.source if direction == "forward" else piece.target))
        for message in buffers.staged.exchange.sends:
            self.comm.record(self.kind, self.name, direction, self.first + message.peer, message.nbytes)
        buffers.staged.start()
        return buffers


_Pieces = dict[int, list[Piece]]


class _Buffers:
    """Flat buffers for the messages of one direction, and their exchange.

    Attributes
    ----------
    leaving, arriving : list of (Piece, torch.Tensor)
        The places of pieces in the buffers, in their shapes.
    """

    def __init__(self, channel: Channel, like: torch.Tensor, forward: bool) -> None:
        def allocate(pieces: _Pieces) -> tuple[Flats, list[tuple[Piece, torch.Tensor]]]:
            flats, places = dict[int, torch.Tensor](), list[tuple[Piece, torch.Tensor]]()
            for peer, parts in pieces.items():
                shapes = []
                for piece in parts:
                    shape = list(like.shape)
                    for request, length in zip(channel.transfer.requests, piece.source.shape, strict=True):
                        shape[request.dim] = length
                    shapes.append(shape)
                sizes = list(map(prod, shapes))
                flats[peer] = torch.empty(sum(sizes), dtype=like.dtype, device=like.device)
                flat = zip(flats[peer].split(sizes), shapes, strict=True)
                places += zip(parts, (part.view(shape) for part, shape in flat), strict=True)
            return flats, places

        out, back = (channel.leaving, channel.arriving) if forward else (channel.arriving, channel.leaving)
        leaving, self.leaving = allocate(out)
        arriving, self.arriving = allocate(back)
        self.staged = channel.comm.staged_exchange(channel.group, leaving, arriving, channel.first)

    def finish(self) -> list[tuple[Piece, torch.Tensor]]:
        """Wait for the messages of others, and return their contents by piece."""
        self.staged.finish()
        return self.arriving


def create_messages(buffers: Flats, first: int, tensors: bool) -> list[Message]:
    """Return a message for each buffer, keyed by rank of the world; `first` is the rank of the group's first member.

    Messages are of tensors if the transport supports them, else of NumPy arrays sharing their memory.
    """
    result = []
    for peer, tensor in buffers.items():
        flat = _real(tensor)
        if tensors:
            result.append(Message(peer - first, flat, (slice(0, flat.numel()),)))
            continue
        array = flat.view(_AS_INTEGERS.get(flat.dtype, flat.dtype)).numpy()
        array = array.view(np.uint8) if array.dtype == np.bool_ else array
        result.append(Message(peer - first, array, (slice(0, flat.numel()),)))
    return result


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory as real numbers, since transports need not support complex ones."""
    return torch.view_as_real(tensor).reshape(-1) if tensor.is_complex() else tensor


def _by_peer(pieces: Iterable[Piece]) -> _Pieces:
    by_peer: _Pieces = {}
    for piece in sorted(pieces, key=lambda p: p.peer):
        by_peer.setdefault(piece.peer, []).append(piece)
    return by_peer


CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""The memory format of images and volumes, by the dimensions of their tensors."""


def memory_format_of(tensor: torch.Tensor) -> torch.memory_format:
    """Return channels-last for a tensor, or a slice of one, with only that memory format, else contiguous."""
    if tensor.dim() in CHANNELS_LAST and tensor.shape[1] > 1 and tensor.stride(1) == 1:
        cells = zip(tensor.shape[2:], tensor.stride()[2:], strict=True)
        if any(n > 1 for n, _ in cells) and not tensor.is_contiguous():
            return CHANNELS_LAST[tensor.dim()]
    return torch.contiguous_format
