"""Views of partitioned tensors with cells of other ranks, and their adjoints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch

from ...geometry import Lattice, Piece, ViewTransfer, to_slice
from ...observer import EventScope
from .mesh_comm import MeshComm, StagedExchange, TensorsByRank


class TransferChannel:
    """Exchange of the messages of one transfer through flat buffers, planned once.

    Parameters
    ----------
    kind : 'halo' or 'redistribution'
    """

    def __init__(self, comm: MeshComm, name: str, transfer: ViewTransfer, kind: str) -> None:
        self.comm, self.name, self.transfer, self.kind = comm, name, transfer, kind
        rank = comm.grid.rank
        part_shift = [-request.source.range(comm.place)[0] for request in transfer.requests]
        self.own_pieces, outgoing_pieces = (  # in coordinates of this rank's part
            [replace(piece, source=piece.source.shift(part_shift)) for piece in pieces]
            for pieces in (transfer.local(rank), transfer.sends(rank))
        )
        self.view_includes_own_part = transfer.view_includes_own_part(rank)
        self.incoming = _group_pieces_by_peer(piece for piece in transfer.receives(rank) if piece.peer != rank)
        self.outgoing = _group_pieces_by_peer(outgoing_pieces)
        exchanged_axes = {axis for request in transfer.requests for axis in request.axes}
        self.group, self.first_rank = comm.message_group(exchanged_axes)
        self._exchanged_dims = {request.dim for request in transfer.requests}
        self._message_buffers: dict[Any, Any] = {}

    def observe(self, direction: str) -> EventScope:
        """Return the context manager that reports this exchange to observers."""
        event = "halo" if self.kind == "halo" else "redistribute"
        return self.comm.grid.observers.observe(event, self.name, direction)

    def view(self, tensor: torch.Tensor, pads: Sequence[tuple[int, int, int]] = (), fill: float = 0.0) -> torch.Tensor:
        """Return this rank's view of a partitioned tensor, given the rank's part.

        Parameters
        ----------
        pads : sequence of (dimension, before, after)
            Widths of the padding, filled with `fill`, before and after the view along each dimension.
        """
        result = view = self.empty_like_view(tensor, pads)
        for dim, before, after in pads:
            for start, length in ((0, before), (view.shape[dim] - after, after)):
                if length:
                    view.narrow(dim, start, length).fill_(fill)
            view = view.narrow(dim, before, view.shape[dim] - before - after)
        for margin in self._margin_views(view):
            margin.fill_(fill)
        buffers = self._start_exchange("forward", tensor)
        for piece in self.own_pieces:
            self._lattice_view(view, piece.target).copy_(self._lattice_view(tensor, piece.source))
        for piece, cells in buffers.finish() if buffers else ():
            self._lattice_view(view, piece.target).copy_(cells)
        return result

    def _margin_views(self, view: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the parts of a view around the rank's own part, if they may include cells that are not received."""
        if not self.transfer.has_unused_cells:
            return
        own_ranges = [piece.target.ranges for piece in self.own_pieces]
        for at, request in enumerate(self.transfer.requests):
            lo, hi = (own_ranges[0][at].start, own_ranges[0][at].stop) if own_ranges else (0, 0)
            yield view.narrow(request.dim, 0, lo)
            yield view.narrow(request.dim, hi, view.shape[request.dim] - hi)

    def empty_like_view(self, tensor: torch.Tensor, pads: Sequence[tuple[int, int, int]] = ()) -> torch.Tensor:
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
        """Return the gradient of this rank's part: the sum of the gradients of all ranks' views of its cells.

        Parameters
        ----------
        in_place : bool
            Whether the result may share memory with `gradient`.
        """
        gradient = without_padding(gradient, pads)
        buffers = self._start_exchange("backward", gradient)
        part = self.own_gradient_contribution(gradient, shape, in_place)
        for piece, cells in buffers.finish() if buffers else ():
            self._lattice_view(part, piece.source).add_(cells)
        return part

    def own_part_of(self, view: torch.Tensor, pads: Sequence[tuple[int, int, int]] = ()) -> torch.Tensor | None:
        """Return this rank's part of a result of `view`, or None if the result lacks some cells of the part."""
        if not self.view_includes_own_part:
            return None
        return self._lattice_view(without_padding(view, pads), self.own_pieces[0].target)

    def own_gradient_contribution(
        self, gradient: torch.Tensor, shape: Sequence[int], in_place: bool = False
    ) -> torch.Tensor:
        """Return the gradient of this rank's part from its own view only; possibly a view of `gradient`."""
        own_part = self.own_part_of(gradient)
        if own_part is not None:
            return own_part if in_place else own_part.clone(memory_format=memory_format_of(gradient))
        part = gradient.new_zeros(tuple(shape))
        for piece in self.own_pieces:
            self._lattice_view(part, piece.source).add_(self._lattice_view(gradient, piece.target))
        return part

    def _lattice_view(self, tensor: torch.Tensor, indices: Lattice) -> torch.Tensor:
        slices = [slice(None)] * tensor.dim()
        for request, cells in zip(self.transfer.requests, indices.ranges, strict=True):
            slices[request.dim] = to_slice(cells)
        return tensor[tuple(slices)]

    def _start_exchange(self, direction: str, tensor: torch.Tensor) -> _MessageBuffers | None:
        """Start sending parts of a tensor or of its views; return buffers to wait for, or None if no rank sends."""
        if self.transfer.needs_no_messages:
            return None
        sizes = tuple(n for dim, n in enumerate(tensor.shape) if dim not in self._exchanged_dims)
        key = direction, (tensor.dtype, tensor.device), sizes
        buffers = self._message_buffers.get(key)
        if buffers is None:
            # keep the buffers of one batch size only
            self._message_buffers = {k: kept for k, kept in self._message_buffers.items() if k[1:] == key[1:]}
            buffers = self._message_buffers[key] = _MessageBuffers(self, tensor, direction == "forward")
        for piece, cells in buffers.outgoing:
            cells.copy_(self._lattice_view(tensor, piece.source if direction == "forward" else piece.target))
        for message in buffers.staged_exchange.exchange.sends:
            self.comm.record_traffic(self.kind, self.name, direction, self.first_rank + message.peer, message.nbytes)
        buffers.staged_exchange.start()
        return buffers


_PiecesByPeer = dict[int, list[Piece]]


class _MessageBuffers:
    """Flat buffers for the messages of one direction, and their exchange.

    Attributes
    ----------
    outgoing, incoming : list of (Piece, torch.Tensor)
        Views into the buffers, one per piece and of the piece's shape.
    """

    def __init__(self, channel: TransferChannel, like: torch.Tensor, is_forward: bool) -> None:
        def allocate(pieces_by_peer: _PiecesByPeer) -> tuple[TensorsByRank, list[tuple[Piece, torch.Tensor]]]:
            flats = dict[int, torch.Tensor]()
            piece_views = list[tuple[Piece, torch.Tensor]]()
            for peer, pieces in pieces_by_peer.items():
                shapes = []
                for piece in pieces:
                    shape = list(like.shape)
                    for request, length in zip(channel.transfer.requests, piece.source.shape, strict=True):
                        shape[request.dim] = length
                    shapes.append(shape)
                sizes = list(map(prod, shapes))
                flats[peer] = torch.empty(sum(sizes), dtype=like.dtype, device=like.device)
                parts_and_shapes = zip(flats[peer].split(sizes), shapes, strict=True)
                piece_views += zip(pieces, (part.view(shape) for part, shape in parts_and_shapes), strict=True)
            return flats, piece_views

        sent_pieces, received_pieces = (
            (channel.outgoing, channel.incoming) if is_forward else (channel.incoming, channel.outgoing)
        )
        outgoing_flats, self.outgoing = allocate(sent_pieces)
        incoming_flats, self.incoming = allocate(received_pieces)
        self.staged_exchange = StagedExchange(
            channel.comm, channel.group, outgoing_flats, incoming_flats, channel.first_rank
        )

    def finish(self) -> list[tuple[Piece, torch.Tensor]]:
        """Wait for the messages of other ranks, and return their contents by piece."""
        self.staged_exchange.finish()
        return self.incoming


def without_padding(view: torch.Tensor, pads: Sequence[tuple[int, int, int]]) -> torch.Tensor:
    """Return the part of a padded view without the (dimension, before, after) indices of its padding."""
    for dim, before, after in pads:
        view = view.narrow(dim, before, view.shape[dim] - before - after)
    return view


def _group_pieces_by_peer(pieces: Iterable[Piece]) -> _PiecesByPeer:
    pieces_by_peer: _PiecesByPeer = {}
    for piece in sorted(pieces, key=lambda p: p.peer):
        pieces_by_peer.setdefault(piece.peer, []).append(piece)
    return pieces_by_peer


CHANNELS_LAST_BY_NDIM = {4: torch.channels_last, 5: torch.channels_last_3d}
"""The channels-last memory format, by the number of dimensions of a tensor."""


def with_default_strides(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor; of dimensions of size 1, other strides may stand for channels-last."""
    return tensor.contiguous().view(-1).view(tensor.shape)


def memory_format_of(tensor: torch.Tensor) -> torch.memory_format:
    """Return channels-last if only this format fits a tensor, or the tensor it is a slice of; otherwise contiguous."""
    if tensor.dim() in CHANNELS_LAST_BY_NDIM and tensor.shape[1] > 1 and tensor.stride(1) == 1:
        sizes_and_strides = zip(tensor.shape[2:], tensor.stride()[2:], strict=True)
        if any(n > 1 for n, _ in sizes_and_strides) and not tensor.is_contiguous():
            return CHANNELS_LAST_BY_NDIM[tensor.dim()]
    return torch.contiguous_format
