"""Communication of tensors over a Transport for the steps of a plan, and its ledger."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from ...comm import DebugTransport, Message, ProcessGrid, Transport
from ...halo.exchange import DEFAULT_PHASE
from ...runtime.observers.ledger import Ledger, MessageLedgerKey
from ..ir.graph import ACCUMULATION_DTYPES, GRADIENTS, DimPart
from ..ir.layout import Mesh

_TRANSPORT_DTYPES = {torch.bfloat16: torch.int16}  # dtypes that NumPy lacks are sent as bits


class MeshComm:
    """Communicators of a grid by the axes of its mesh, and a ledger of their traffic.

    Attributes
    ----------
    place : tuple of int
        Coordinates of this rank in the mesh.
    ledger : Ledger
        Messages sent by this rank, and its contributions to sums.
    bytes_sent : int
        Total bytes in the ledger.
    phase : Phase
        Phase of the current pass, for border schemes.
    has_debug_checks : bool
        Whether steps are checked for errors.
    """

    def __init__(self, grid: ProcessGrid, spatial_ndim: int) -> None:
        self.grid = grid
        self.mesh = Mesh.from_grid(grid.shape, spatial_ndim)
        self.place = self.mesh.place(grid.rank)
        self.ledger: Ledger = Counter()
        self.phase = DEFAULT_PHASE
        self.bytes_sent = 0
        self.has_debug_checks = False
        self._group_by_axes: dict[frozenset[int], tuple[str, Transport]] = {}
        self._sum_groups_by_axes: dict[frozenset[int], list[tuple[str, Transport]]] = {}
        if grid.world.shares_process:
            # autograd has one thread per GPU, where a waiting virtual rank would block the others: let each rank's own
            # thread run its backward passes, as for CPU tensors
            grid.on_close(partial(torch.autograd.set_multithreading_enabled, torch._C._is_multithreading_enabled()))
            torch.autograd.set_multithreading_enabled(False)

    def guard(self, seed: int) -> None:
        """Enable checks of steps and schemes, and delays of messages, in everything planned from now on."""
        self.grid, self.has_debug_checks = copy.copy(self.grid), True
        self.grid.world = DebugTransport(self.grid.world, seed)
        self.grid.tile_comm = DebugTransport(self.grid.tile_comm, seed)

    def record_traffic(self, kind: str, step: str, direction: str, peer: int | str, nbytes: int) -> None:
        """Record a message to a rank, or a sum in a group."""
        self.ledger[MessageLedgerKey(kind, step, direction, peer, nbytes)] += 1
        self.bytes_sent += nbytes

    def group_for_sums(self, axes: frozenset[int]) -> tuple[str, Transport]:
        """Return the name and the transport of a group for sums; the first call is collective."""
        group = self._group_by_axes.get(axes)
        if group is None:
            group = self._group_by_axes[axes] = self._create_group(axes)
        return group

    def _create_group(self, axes: frozenset[int]) -> tuple[str, Transport]:
        grid = self.grid
        all_axes = self.mesh.axes
        if axes == all_axes:
            return "world", grid.world
        if axes == all_axes - {0}:
            return "tiles", grid.tile_comm
        if axes == {0}:
            return "replicas", grid.replica_comm
        (axis,) = axes
        mesh_of_other_axes = Mesh(tuple(parts for other, parts in enumerate(self.mesh.parts) if other != axis))

        def color(rank: int) -> int:
            return mesh_of_other_axes.rank([at for other, at in enumerate(self.mesh.place(rank)) if other != axis])

        group = grid.world.split_by(color)
        grid.on_close(group.close)
        return f"axis {axis}", group

    def connect_devices(self, device: torch.device) -> None:
        """Connect the devices of all ranks, which NCCL requires before messages between only some ranks. Collective.

        A module must therefore be on its device when it is distributed.
        """
        if device.type != "cpu" and device.type in self.grid.world.tensor_device_types:
            self.grid.world.allreduce(torch.zeros(1, device=device))

    def staging_device(self, device: torch.device) -> torch.device:
        """Return the device from which tensors are sent: their own if the transport supports it, else the CPU."""
        return device if device.type in self.grid.world.tensor_device_types else torch.device("cpu")

    def message_group(self, axes: Collection[int]) -> tuple[Transport, int]:
        """Return the transport for messages along axes, and the rank of its first member; not collective."""
        grid = self.grid  # grid.world may be the caller's communicator, with other messages; tile_comm is not
        return (grid.world, 0) if 0 in axes else (grid.tile_comm, grid.rank - grid.tile)

    def gather_parts(
        self,
        step: str,
        direction: str,
        own_parts: torch.Tensor,
        whole_tensors: Sequence[torch.Tensor],
        parts: Sequence[DimPart],
    ) -> None:
        """Fill tensors with the parts of all ranks that share an image. Collective over these ranks.

        Parameters
        ----------
        own_parts : torch.Tensor
            This rank's parts of the tensors, flat.
        """
        group, first_rank = self.message_group(self.mesh.axes - {0})
        place_by_rank = {rank: self.mesh.place(rank) for rank in range(first_rank, first_rank + group.size)}
        targets_by_rank = {
            rank: [part.select(tensor, place) for tensor, part in zip(whole_tensors, parts, strict=True)]
            for rank, place in place_by_rank.items()
        }
        received_by_rank = {
            rank: _receive_buffer(own_parts, targets_by_rank[rank]) for rank in place_by_rank if rank != self.grid.rank
        }
        with self.grid.observers.observe("sync", step, direction):
            if own_parts.numel():
                self.record_traffic("sum", step, direction, "tiles", own_parts.nbytes)
            StagedExchange(self, group, dict.fromkeys(received_by_rank, own_parts), received_by_rank, first_rank).run()
        for rank, flat in {**received_by_rank, self.grid.rank: own_parts}.items():
            sizes = [target.numel() for target in targets_by_rank[rank]]
            for target, values in zip(targets_by_rank[rank], flat.split(sizes), strict=True):
                if values.data_ptr() != target.data_ptr():
                    target.copy_(values.view(target.shape))

    def reduce(
        self,
        step: str,
        direction: str,
        tensor: torch.Tensor,
        axes: frozenset[int],
        op: Any = "sum",
        in_place: bool = False,
    ) -> Any:
        """Return the sum, or maximum, over axes: a new tensor unless `in_place` is set. Collective over the axes."""
        groups = self._sum_groups_by_axes.get(axes)
        if groups is None:  # created by all ranks, including those without elements
            groups = self._sum_groups_by_axes[axes] = list(map(self.group_for_sums, self.mesh.reduction_axes(axes)))
        if not groups or not tensor.numel():
            return tensor if in_place else tensor.clone()
        wide_dtype = ACCUMULATION_DTYPES.get(tensor.dtype, tensor.dtype)
        wide_tensor = tensor.detach().to(self.staging_device(tensor.device), wide_dtype, copy=not in_place)
        if wide_tensor.is_complex() or wide_tensor.is_neg():
            wide_tensor = wide_tensor.resolve_conj().resolve_neg()
        wide_tensor = wide_tensor.contiguous()
        real_view = wide_tensor.view(torch.uint8) if wide_dtype == torch.bool else _as_real(wide_tensor)
        array = real_view if self.grid.world.tensor_device_types else real_view.numpy()
        observers = self.grid.observers
        with observers.observe("sync" if step == GRADIENTS else "reduce", step, direction):
            for name, group in groups:
                self.record_traffic("sum", step, direction, name, array.nbytes)
                with observers.observe("wait", "", direction, name):
                    group.allreduce(array, op)
        return wide_tensor.to(tensor)  # the same object if dtype and device are equal


def _receive_buffer(like: torch.Tensor, targets: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return flat memory for values like `like`: the memory of the only target, if contiguous, or new memory."""
    if len(targets) == 1 and targets[0].is_contiguous():
        return targets[0].view(-1)
    return like.new_empty(sum(target.numel() for target in targets))


TensorsByRank = dict[int, torch.Tensor]
"""A flat tensor for each rank of the world."""


class StagedExchange:
    """Exchange of flat tensors with peers, staged through the host if the transport cannot send device memory.

    Parameters
    ----------
    group, first_rank : results of `MeshComm.message_group`
    """

    def __init__(
        self, comm: MeshComm, group: Transport, outgoing: TensorsByRank, incoming: TensorsByRank, first_rank: int
    ) -> None:
        def stage(flats: TensorsByRank, staged_pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> list[Message]:
            buffers_by_peer = {}
            for peer, flat in flats.items():
                buffer = buffers_by_peer[peer] = torch.empty_like(flat, device=comm.staging_device(flat.device))
                if buffer.device == flat.device:
                    buffers_by_peer[peer] = flat
                else:
                    staged_pairs.append((flat, buffer))
            return create_messages(buffers_by_peer, first_rank, bool(group.tensor_device_types))

        self._staged_sends: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._staged_receives: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.exchange = group.create_exchange(
            stage(outgoing, self._staged_sends), stage(incoming, self._staged_receives)
        )
        self.exchange.observers = comm.grid.observers

    def run(self) -> None:
        """Send the current contents of the outgoing tensors, and fill the incoming ones."""
        self.start()
        self.finish()

    def start(self) -> None:
        """Send the current contents of the outgoing tensors."""
        for flat, host in self._staged_sends:
            host.copy_(flat)
        self.exchange.start()

    def finish(self) -> None:
        """Fill the incoming tensors."""
        self.exchange.finish()
        for flat, host in self._staged_receives:
            flat.copy_(host)


def create_messages(buffers: TensorsByRank, first_rank: int, as_tensors: bool) -> list[Message]:
    """Return a message for each peer, a rank of the world; `first_rank` is the world rank of the group's first member.

    Messages contain tensors if the transport supports them, otherwise NumPy arrays that share the tensors' memory.
    """
    messages = []
    for peer, tensor in buffers.items():
        flat = _as_real(tensor)
        if as_tensors:
            messages.append(Message(peer - first_rank, flat, (slice(0, flat.numel()),)))
            continue
        array = flat.view(_TRANSPORT_DTYPES.get(flat.dtype, flat.dtype)).numpy()
        array = array.view(np.uint8) if array.dtype == np.bool_ else array
        messages.append(Message(peer - first_rank, array, (slice(0, flat.numel()),)))
    return messages


def _as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory as real numbers, since transports need not support complex numbers."""
    return torch.view_as_real(tensor).reshape(-1) if tensor.is_complex() else tensor
