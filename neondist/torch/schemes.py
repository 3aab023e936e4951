"""Border schemes of our layers, for what windows of a torch module see of other tiles."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch

from ..backends import Backend, get_backend
from ..comm import Exchange, ProcessGrid
from ..errors import ConfigError, HaloError
from ..geometry import Box, HaloPlan, Lattice, Piece, Window, shift_range
from ..halo import ExchangePolicy, Fusion, Halo, as_scheme, scheme_text
from ..halo.buffer import HaloBuffer
from ..observer import During
from ..registry import suggest
from ..runtime.debug import mark_buffer, unfilled
from .graph import Step
from .mesh_comm import MeshComm
from .transfer import Piece as Indices
from .transfer import Range

Schemes: TypeAlias = ExchangePolicy | str | Mapping[str, ExchangePolicy | str]
"""A scheme, or those of some modules by their path; '' is the whole."""


@dataclass
class _Owner:
    """Interface of an array, channels last, for its buffer."""

    grid: ProcessGrid
    policy: ExchangePolicy
    plan: HaloPlan
    channels: int
    dtype: np.dtype
    backend: Backend = field(default_factory=lambda: get_backend("numpy"))
    memory: dict[tuple[int, str], dict[str, Any]] = field(default_factory=dict)
    recorded: list[tuple[str, Exchange]] = field(default_factory=list)
    reverse: bool = False
    #: how many runs of each exchange the ledger has
    counted: list[int] = field(default_factory=list)


class SchemeChannel:
    """Counterpart of `Channel` for border schemes: cells and gradients are exchanged as the scheme prescribes."""

    def __init__(self, wires: MeshComm, step: Step) -> None:
        assert step.transfer is not None
        assert step.scheme is not None
        self.wires, self.grid, self.name, self.transfer = wires, wires.grid, step.name, step.transfer
        self.policy = step.scheme
        self._buffers: dict[Any, tuple[_Owner, HaloBuffer]] = {}

    def view(self, tensor: torch.Tensor, pads: Sequence[tuple[int, int, int]] = (), fill: float = 0.0) -> torch.Tensor:
        """Return what this rank sees, given its part; `pads` are (dimension, before, after)."""
        owner, buffer = self._buffer(tensor, fill)
        if self.wires.guarded:
            mark_buffer(buffer)
        seen = buffer.forward(_channels_last(tensor), self.wires.phase)
        if self.wires.guarded and (missing := unfilled(seen, owner.plan)).any():
            raise HaloError(
                f"rank {self.grid.rank}: step '{self.name}', forward: {missing.sum()} values of its view were never"
                f" filled; scheme {type(self.policy).__name__} must fill every cell of other tiles"
            )
        self._record(owner)
        found = torch.from_numpy(seen).movedim(-1, 1)  # of the host: schemes cross it
        shape, inside = list(found.shape), [slice(None)] * tensor.dim()
        for dim, before, after in pads:
            inside[dim] = slice(before, before + shape[dim])
            shape[dim] += before + after
        padded = tensor.new_full(shape, fill)
        padded[tuple(inside)] = found
        return padded

    def adjoint(
        self,
        gradient: torch.Tensor,
        shape: Sequence[int],
        pads: Sequence[tuple[int, int, int]] = (),
        in_place: bool = False,
    ) -> torch.Tensor:
        """Return the gradient of this rank's part, given that of what it saw; in other memory, `in_place` or not."""
        for dim, before, after in pads:
            gradient = gradient.narrow(dim, before, gradient.shape[dim] - before - after)
        owner, buffer = self._buffers[shape[0], shape[1], gradient.dtype]
        found = buffer.backward(_channels_last(gradient), self.wires.phase)
        self._record(owner)
        return torch.from_numpy(found).movedim(-1, 1).to(gradient.device, gradient.dtype, copy=True)

    def during(self, direction: str) -> During:
        """Return a block that observers are told of."""
        return self.grid.observers.during("halo", self.name, direction)

    def _buffer(self, tensor: torch.Tensor, fill: float) -> tuple[_Owner, HaloBuffer]:
        key = tensor.shape[0], tensor.shape[1], tensor.dtype
        if key not in self._buffers:
            self._buffers = {of: kept for of, kept in self._buffers.items() if of[:2] == key[:2]}  # no other batch
            plan, dtype = self._halo_plan(tuple(tensor.shape[2:]), fill), _channels_last(tensor[:0]).dtype
            owner = _Owner(self.grid, self.policy, plan, tensor.shape[1], dtype)
            self._buffers[key] = owner, HaloBuffer(owner, len(tensor))
        return self._buffers[key]

    def _halo_plan(self, extent: tuple[int, ...], fill: float) -> HaloPlan:
        """Return the same transfer as our layers have it: in cells of the image, along all of its axes."""
        grid, transfer = self.grid, self.transfer
        first, place = grid.rank - grid.tile, transfer.mesh.place(grid.rank)
        wants = {want.dim - 2: want for want in transfer.wants}
        own, need, whole = ([(0, n) for n in extent] for _ in range(3))
        for axis, want in wants.items():
            own[axis], whole[axis] = want.source.range(place), (0, want.source.extent)
            (need[axis],) = want.of(place)

        def piece(indices: Indices, owner: int) -> Piece:
            there = transfer.mesh.place(owner)
            cells = [range(lo, hi) for lo, hi in own]
            for (axis, want), part in zip(wants.items(), indices.source, strict=True):
                start, _ = want.source.range(there)
                cells[axis] = shift_range(part, start)
            return Piece(indices.peer - first, *[Lattice(tuple(cells))] * 2)

        every = transfer.receives(grid.rank)
        receives = [piece(p, p.peer) for p in every if p.peer != grid.rank]
        sends = [piece(p, grid.rank) for p in transfer.sends(grid.rank)]
        local = [piece(p, grid.rank) for p in every if p.peer == grid.rank]
        return HaloPlan(
            own=_box(own),
            need=_box(need),
            pieces=lambda: (receives, sends, local),
            buffer=_box(own) if _box(need).empty else _box(need).hull(_box(own)),
            extent=tuple(n for _, n in whole),
            window=Window(1, padding=0, fill=fill, ndim=len(extent)),
            used=tuple(
                wants[axis].used_at(place) if axis in wants else (range(lo, hi),) for axis, (lo, hi) in enumerate(need)
            ),
        )

    def _record(self, owner: _Owner) -> None:
        """Take note of the messages since the last time."""
        recorded, counted = owner.recorded, owner.counted
        counted += [0] * (len(recorded) - len(counted))
        for at, (way, exchange) in enumerate(recorded):
            for _ in range(counted[at], exchange.runs):
                for message in exchange.sends:
                    peer = self.grid.rank - self.grid.tile + message.peer
                    self.wires.record("halo", self.name, way, peer, message.nbytes)
            counted[at] = exchange.runs


def chosen(schemes: Schemes, names: Collection[str], recompute: bool) -> dict[str, ExchangePolicy]:
    """Return schemes by the path of the modules that have them; '' is the whole module.

    Raises
    ------
    ConfigError
        If there is no such scheme or module, or windows of a torch module cannot have it.
    """
    found = {}
    for path, scheme in schemes.items() if isinstance(schemes, Mapping) else [("", schemes)]:
        policy = as_scheme(scheme)
        if path not in names:
            raise ConfigError(f"scheme: the module has no part {path!r}{suggest(path, names)}")
        if policy.gradients != "scatter":
            raise ConfigError(
                f"scheme: '{scheme_text(policy)}' applies to neondist layers: gradients of a module's windows are"
                " scattered; leave 'backward' out"
            )
        if recompute and policy.has_memory:
            raise ConfigError(
                f"recompute: '{scheme_text(policy)}' keeps state between steps, so a step cannot be recomputed"
            )
        found[path] = policy
    return found


def put_into(steps: Iterable[Step], schemes: Mapping[str, ExchangePolicy]) -> None:
    """Give windows the scheme of the innermost module that has one."""
    for step in steps:
        if step.window:
            module, _, _ = step.name.rpartition(":")
            policy = policy_of(module, schemes)
            step.scheme = None if isinstance(policy, Fusion) else policy


def policy_of(module: str, schemes: Mapping[str, ExchangePolicy]) -> ExchangePolicy | None:
    """Return the scheme of the innermost module that has one; None: exactly."""
    paths = [path for path in schemes if not path or f"{module}.".startswith(f"{path}.")]
    policy = schemes[max(paths, key=len)] if paths else None
    return None if type(policy) is Halo else policy


def _box(ranges: Sequence[Range]) -> Box:
    return Box(tuple(lo for lo, _ in ranges), tuple(hi for _, hi in ranges))


def _channels_last(tensor: torch.Tensor) -> np.ndarray:
    """Return an array (n, *cells, C) on the tensor's memory; what NumPy has no type for is copied."""
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).movedim(1, -1).numpy()
