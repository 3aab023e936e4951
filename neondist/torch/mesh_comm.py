"""Tensors over a Transport: what crosses ranks in a step of a plan, counted, and its adjoint for autograd."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from math import prod
from typing import Any

import numpy as np
import torch

from ..comm import DebugTransport, Message, ProcessGrid, Transport
from ..geometry import to_slice
from ..halo.exchange import WHOLE
from ..observer import During
from ..runtime.observers.ledger import Account, Ledger
from .graph import GRADIENTS, WIDER
from .layout import Mesh
from .transfer import Piece, Transfer

_AS_INTEGERS = {torch.bfloat16: torch.int16}  # what NumPy has no type for travels as bits


class MeshComm:
    """The communicators of a grid, by the axes of its mesh, and a record of what has crossed them.

    Attributes
    ----------
    mesh : Mesh
    place : tuple of int
        This rank's.
    ledger : Ledger
        What this rank has sent in messages, and given into sums.
    sent : int
        The bytes of all that.
    phase : Phase
        Of the pass at work: what border schemes ask for.
    guarded : bool
        Whether steps are looked at for mistakes.
    """

    def __init__(self, grid: ProcessGrid, spatial: int) -> None:
        self.grid = grid
        self.mesh = Mesh.of(grid.shape, spatial)
        self.place = self.mesh.place(grid.rank)
        self.ledger: Ledger = Counter()
        self.phase = WHOLE
        self.sent = 0
        self.guarded = False
        self._groups: dict[frozenset[int], tuple[str, Transport]] = {}
        self._sums: dict[frozenset[int], list[tuple[str, Transport]]] = {}
        if grid.world.one_process:
            # autograd has one thread for each GPU, where a virtual rank that waits would block the others: let each
            # rank's own thread run its backward passes, as for tensors of the host
            grid.on_close(partial(torch.autograd.set_multithreading_enabled, torch._C._is_multithreading_enabled()))
            torch.autograd.set_multithreading_enabled(False)

    def guard(self, seed: int) -> None:
        """Look for mistakes of steps and schemes, and let messages come late; for what is planned from now on."""
        self.grid, self.guarded = copy.copy(self.grid), True
        self.grid.world = DebugTransport(self.grid.world, seed)
        self.grid.tile_comm = DebugTransport(self.grid.tile_comm, seed)

    def record(self, kind: str, step: str, direction: str, peer: int | str, nbytes: int) -> None:
        """Take note of a message to a rank, or of a sum in a group."""
        self.ledger[Account(kind, step, direction, peer, nbytes)] += 1
        self.sent += nbytes

    def group(self, axes: frozenset[int]) -> tuple[str, Transport]:
        """Return one of the mesh's groups for sums, and its name; the first call is collective."""
        found = self._groups.get(axes)
        if found is None:
            found = self._groups[axes] = self._made(axes)
        return found

    def _made(self, axes: frozenset[int]) -> tuple[str, Transport]:
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

        made = grid.world.split_by(color)
        grid.on_close(made.close)
        return f"axis {axis}", made

    def connect(self, device: torch.device) -> None:
        """Let the transport connect all ranks' devices, which NCCL wants before the first message of a few; collective.

        So a module has to be on its device when it is distributed.
        """
        if device.type != "cpu" and device.type in self.grid.world.tensors:
            self.grid.world.allreduce(torch.zeros(1, device=device))

    def carrier(self, device: torch.device) -> torch.device:
        """Return where tensors of a device lie on their way: there, if the transport takes them, else on the host."""
        return device if device.type in self.grid.world.tensors else torch.device("cpu")

    def parcels(self, group: Transport, out: Flats, back: Flats, first: int) -> StagedExchange:
        """Return the exchange of flat tensors with the ranks that they are for, or from; `first` as of `group_of`."""
        return StagedExchange(self, group, out, back, first)

    def group_of(self, axes: Collection[int | None]) -> tuple[Transport, int]:
        """Return what messages along axes go through, and the rank of its first; collective nowhere."""
        grid = self.grid  # its world may be the caller's own communicator, with messages of his; its tiles are not
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
        """Return the sum, or maximum, over axes, as a new tensor, or perhaps in place of it; collective over them."""
        groups = self._sums.get(axes)
        if groups is None:  # made by all, those without numbers too
            groups = self._sums[axes] = [self.group(one) for one in self.mesh.sums(axes)]
        if not groups or not tensor.numel():
            return tensor if in_place else tensor.clone()
        dtype = WIDER.get(tensor.dtype, tensor.dtype)
        wide = tensor.detach().to(self.carrier(tensor.device), dtype, copy=not in_place)
        if wide.is_complex() or wide.is_neg():
            wide = wide.resolve_conj().resolve_neg()
        wide = wide.contiguous()
        plain = wide.view(torch.uint8) if dtype == torch.bool else _real(wide)
        array = plain if self.grid.world.tensors else plain.numpy()
        observers = self.grid.observers
        with observers.during("sync" if step == GRADIENTS else "reduce", step, direction):
            for name, group in groups:
                self.record("sum", step, direction, name, array.nbytes)
                with observers.during("wait", "", direction, name):
                    group.allreduce(array, op)
        return wide if wide.dtype == tensor.dtype and wide.device == tensor.device else wide.to(tensor)


Flats = dict[int, torch.Tensor]
"""A flat tensor for each rank of the world."""


class StagedExchange:
    """Flat tensors that travel, through the host where the transport does not take those of their device.

    Attributes
    ----------
    exchange : Exchange
    """

    def __init__(self, wires: MeshComm, group: Transport, out: Flats, back: Flats, first: int) -> None:
        def carried(flats: Flats, staged: list[tuple[torch.Tensor, torch.Tensor]]) -> list[Message]:
            found = {}
            for peer, flat in flats.items():
                place = found[peer] = torch.empty_like(flat, device=wires.carrier(flat.device))
                if place.device == flat.device:
                    found[peer] = flat
                else:
                    staged.append((flat, place))
            return messages(found, first, bool(group.tensors))

        self._leaving: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._arriving: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.exchange = group.exchange(carried(out, self._leaving), carried(back, self._arriving))
        self.exchange.observers = wires.grid.observers

    def run(self) -> None:
        """Send what the tensors hold now, and fill those that receive."""
        self.start()
        self.finish()

    def start(self) -> None:
        """Send what the tensors hold now."""
        for flat, host in self._leaving:
            host.copy_(flat)
        self.exchange.start()

    def finish(self) -> None:
        """Fill the tensors that receive."""
        self.exchange.finish()
        for flat, host in self._arriving:
            flat.copy_(host)


class Channel:
    """The messages of one transfer, planned once; they go through flat buffers of this rank.

    Parameters
    ----------
    name : str
        Of the step.
    kind : 'halo' or 'redistribution'
    """

    def __init__(self, wires: MeshComm, name: str, transfer: Transfer, kind: str) -> None:
        self.wires, self.name, self.transfer, self.kind = wires, name, transfer, kind
        rank = wires.grid.rank
        pieces = transfer.receives(rank)
        self.own = [piece for piece in pieces if piece.peer == rank]
        self.arriving = _by_peer(piece for piece in pieces if piece.peer != rank)
        self.leaving = _by_peer(transfer.sends(rank))
        self.silent = transfer.silent
        self.group, self.first = wires.group_of({at for w in transfer.wants for at in (w.axis, w.source.axis)})
        self._moved = {want.dim for want in transfer.wants}
        self._planned: dict[Any, Any] = {}

    def during(self, direction: str) -> During:
        """Return a block that observers are told of."""
        what = "halo" if self.kind == "halo" else "redistribute"
        return self.wires.grid.observers.during(what, self.name, direction)

    def view(self, tensor: torch.Tensor, pads: Sequence[tuple[int, int, int]] = (), fill: float = 0.0) -> torch.Tensor:
        """Return what this rank wants to see of a tensor, given its part.

        Parameters
        ----------
        pads : sequence of (dimension, before, after)
            So many indices, of value `fill`, are added around.
        """
        found = view = self.empty_view(tensor, pads)
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
        return found

    def _margins(self, view: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the parts of a view around the own one, if they may have indices that are not received."""
        if not self.transfer.has_unused:
            return
        own = [piece.target for piece in self.own]
        for at, want in enumerate(self.transfer.wants):
            lo, hi = (own[0][at].start, own[0][at].stop) if own else (0, 0)
            yield view.narrow(want.dim, 0, lo)
            yield view.narrow(want.dim, hi, view.shape[want.dim] - hi)

    def empty_view(self, tensor: torch.Tensor, pads: Sequence[tuple[int, int, int]] = ()) -> torch.Tensor:
        """Return room for what `view` returns."""
        shape = list(self.transfer.shape(tuple(tensor.shape), self.wires.grid.rank))
        for dim, before, after in pads:
            shape[dim] += before + after
        return torch.empty(shape, dtype=tensor.dtype, device=tensor.device, memory_format=format_of(tensor))

    def adjoint(
        self,
        gradient: torch.Tensor,
        shape: Sequence[int],
        pads: Sequence[tuple[int, int, int]] = (),
        in_place: bool = False,
    ) -> torch.Tensor:
        """Return the gradient of this rank's part, given that of what it saw; ranks that saw the same are added.

        Parameters
        ----------
        in_place : bool
            Whether it may be made in the memory of what is given.
        """
        for dim, before, after in pads:
            gradient = gradient.narrow(dim, before, gradient.shape[dim] - before - after)
        buffers = self._start("backward", gradient)
        found = self.own_part(gradient, shape, in_place)
        for piece, cells in buffers.finish() if buffers else ():
            self._at(found, piece.source).add_(cells)
        return found

    def own_part(self, gradient: torch.Tensor, shape: Sequence[int], in_place: bool = False) -> torch.Tensor:
        """Return the gradient of this rank's part by what it saw of that itself; perhaps as a view of it."""
        own = [self._at(gradient, piece.target) for piece in self.own]
        if len(own) == 1 and own[0].shape == tuple(shape):  # all that this rank has, once
            return own[0] if in_place else own[0].clone(memory_format=format_of(gradient))
        found = gradient.new_zeros(tuple(shape))
        for piece, cells in zip(self.own, own, strict=True):
            self._at(found, piece.source).add_(cells)
        return found

    def _at(self, tensor: torch.Tensor, indices: Sequence[range]) -> torch.Tensor:
        where = [slice(None)] * tensor.dim()
        for want, cells in zip(self.transfer.wants, indices, strict=True):
            where[want.dim] = to_slice(cells)
        return tensor[tuple(where)]

    def _start(self, direction: str, tensor: torch.Tensor) -> _Buffers | None:
        """Send what others want of a tensor, or have shown of it; return a handle to wait on; None: no rank sends."""
        if self.silent:
            return None
        sizes = tuple(n for dim, n in enumerate(tensor.shape) if dim not in self._moved)
        key = direction, (tensor.dtype, tensor.device), sizes
        buffers = self._planned.get(key)
        if buffers is None:
            self._planned = {of: kept for of, kept in self._planned.items() if of[1:] == key[1:]}  # no other batch's
            buffers = self._planned[key] = _Buffers(self, tensor, direction == "forward")
        for piece, cells in buffers.leaving:
            cells.copy_(self._at(tensor, piece.source if direction == "forward" else piece.target))
        for message in buffers.parcels.exchange.sends:
            self.wires.record(self.kind, self.name, direction, self.first + message.peer, message.nbytes)
        buffers.parcels.start()
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
        def placed(pieces: _Pieces, has: bool) -> tuple[Flats, list[tuple[Piece, torch.Tensor]]]:
            flats, places = dict[int, torch.Tensor](), list[tuple[Piece, torch.Tensor]]()
            for peer, parts in pieces.items():
                shapes = []
                for piece in parts:
                    shape = list(like.shape)
                    for want, cells in zip(channel.transfer.wants, piece.source if has else piece.target, strict=True):
                        shape[want.dim] = len(cells)
                    shapes.append(shape)
                sizes = list(map(prod, shapes))
                flats[peer] = torch.empty(sum(sizes), dtype=like.dtype, device=like.device)
                flat = zip(flats[peer].split(sizes), shapes, strict=True)
                places += zip(parts, (part.view(shape) for part, shape in flat), strict=True)
            return flats, places

        out, back = (channel.leaving, channel.arriving) if forward else (channel.arriving, channel.leaving)
        leaving, self.leaving = placed(out, forward)
        arriving, self.arriving = placed(back, not forward)
        self.parcels = channel.wires.parcels(channel.group, leaving, arriving, channel.first)

    def finish(self) -> list[tuple[Piece, torch.Tensor]]:
        """Wait for what others send; return it by piece."""
        self.parcels.finish()
        return self.arriving


def messages(buffers: Flats, first: int, tensors: bool) -> list[Message]:
    """Return a message for each buffer, by rank of the world; `first` is that of the group's first.

    They are of tensors, where the transport takes those, or of NumPy's arrays on their memory.
    """
    found = []
    for peer, numbers in buffers.items():
        flat = _real(numbers)
        if tensors:
            found.append(Message(peer - first, flat, (slice(0, flat.numel()),)))
            continue
        array = flat.view(_AS_INTEGERS.get(flat.dtype, flat.dtype)).numpy()
        array = array.view(np.uint8) if array.dtype == np.bool_ else array
        found.append(Message(peer - first, array, (slice(0, flat.numel()),)))
    return found


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory as real numbers: complex ones cross as two, since no transport has to know them."""
    return torch.view_as_real(tensor).reshape(-1) if tensor.is_complex() else tensor


def _by_peer(pieces: Iterable[Piece]) -> _Pieces:
    found: _Pieces = {}
    for piece in sorted(pieces, key=lambda p: p.peer):
        found.setdefault(piece.peer, []).append(piece)
    return found


CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""The memory format of images and volumes, by the dimensions of their tensors."""


def format_of(tensor: torch.Tensor) -> torch.memory_format:
    """Return channels-last for a tensor, or a part of one, that lies so and not otherwise too, else contiguous."""
    if tensor.dim() in CHANNELS_LAST and tensor.shape[1] > 1 and tensor.stride(1) == 1:
        cells = zip(tensor.shape[2:], tensor.stride()[2:], strict=True)
        if any(n > 1 for n, _ in cells) and not tensor.is_contiguous():
            return CHANNELS_LAST[tensor.dim()]
    return torch.contiguous_format
