"""Border schemes of neondist layers for the windows of torch modules."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from ...errors import ConfigError, HaloError
from ...geometry import AxisCells, Box, HaloPlan, Lattice, Piece, Window, shift_range
from ...halo import ExchangePolicy, FusionScheme, GlobalArray, Halo, as_scheme, scheme_text
from ...observer import EventScope
from ...registry import suggest
from ...runtime.debug import mark_unowned_cells, mask_of_unfilled
from ..ir.graph import Step
from .channel import without_padding
from .mesh_comm import MeshComm

Schemes: TypeAlias = ExchangePolicy | str | Mapping[str, ExchangePolicy | str]
"""A scheme, or schemes by module path; '' is the whole module."""


class SchemeChannel:
    """Counterpart of `TransferChannel` for border schemes: it exchanges cells and gradients as a scheme prescribes."""

    def __init__(self, comm: MeshComm, step: Step) -> None:
        assert step.transfer is not None
        assert step.scheme is not None
        self.comm, self.grid, self.name, self.transfer = comm, comm.grid, step.name, step.transfer
        self.policy = step.scheme
        #: by batch size: channels-last array and, for each of its exchanges, the number of runs already in the ledger
        self._arrays: dict[Any, tuple[GlobalArray, list[int]]] = {}

    def view(self, tensor: torch.Tensor, pads: Sequence[tuple[int, int, int]] = (), fill: float = 0.0) -> torch.Tensor:
        """Return this rank's view from its part; `pads` are (dimension, before, after)."""
        array, recorded_run_counts = self._array_for(tensor, fill)
        buffer = array.buffer(len(tensor))
        if self.comm.has_debug_checks:
            mark_unowned_cells(buffer)
        view_array = buffer.forward(_as_channels_last(tensor), self.comm.phase)
        if self.comm.has_debug_checks and (missing := mask_of_unfilled(view_array, array.plan)).any():
            raise HaloError(
                f"rank {self.grid.rank}: step '{self.name}', forward: {missing.sum()} values of the view were never"
                f" filled; scheme {type(self.policy).__name__} must fill every cell of other tiles"
            )
        self._record_messages(array, recorded_run_counts)
        view = torch.from_numpy(view_array).movedim(-1, 1)  # on the host, where schemes exchange cells
        shape = list(view.shape)
        unpadded_slices = [slice(None)] * tensor.dim()
        for dim, before, after in pads:
            unpadded_slices[dim] = slice(before, before + shape[dim])
            shape[dim] += before + after
        padded = tensor.new_full(shape, fill)
        padded[tuple(unpadded_slices)] = view
        return padded

    def own_part_of(self, view: torch.Tensor, pads: Sequence[tuple[int, int, int]]) -> None:
        """Return None: a scheme need not copy the cells of this rank's part."""

    def adjoint(
        self,
        gradient: torch.Tensor,
        shape: Sequence[int],
        pads: Sequence[tuple[int, int, int]] = (),
        in_place: bool = False,
    ) -> torch.Tensor:
        """Return the gradient of this rank's part from the gradient of its view, always in new memory."""
        gradient = without_padding(gradient, pads)
        array, recorded_run_counts = self._arrays[shape[0], shape[1], gradient.dtype]
        part = array.buffer(shape[0]).backward(_as_channels_last(gradient), self.comm.phase)
        self._record_messages(array, recorded_run_counts)
        return torch.from_numpy(part).movedim(-1, 1).to(gradient.device, gradient.dtype, copy=True)

    def observe(self, direction: str) -> EventScope:
        """Return the context manager that reports this exchange to observers."""
        return self.grid.observers.observe("halo", self.name, direction)

    def _array_for(self, tensor: torch.Tensor, fill: float) -> tuple[GlobalArray, list[int]]:
        key = tensor.shape[0], tensor.shape[1], tensor.dtype
        if key not in self._arrays:
            self._arrays = {k: kept for k, kept in self._arrays.items() if k[:2] == key[:2]}  # keep one size only
            plan = self._halo_plan(tuple(tensor.shape[2:]), fill)
            dtype = _as_channels_last(tensor[:0]).dtype
            array = GlobalArray(self.grid, (len(tensor), *plan.extent, tensor.shape[1]), dtype=str(dtype), reuse=True)
            array.set_halo_plan(plan)
            array.policy = self.policy
            self._arrays[key] = array, []
        return self._arrays[key]

    def _halo_plan(self, extent: tuple[int, ...], fill: float) -> HaloPlan:
        """Return the transfer as a HaloPlan of neondist layers: in cells of the image, along all of its axes."""
        grid, transfer = self.grid, self.transfer
        first_rank, place = grid.rank - grid.tile, self.comm.place
        requests = {request.dim - 2: request for request in transfer.requests}
        own_ranges, needed_ranges, image_ranges = ([(0, n) for n in extent] for _ in range(3))
        used_cells: dict[int, AxisCells] = {}
        for axis, request in requests.items():
            part = request.part(place)
            own_ranges[axis], image_ranges[axis] = request.source.range(place), (0, request.source.extent)
            (needed_ranges[axis],) = request.ranges[part]
            if request.used is not None:
                used_cells[axis] = tuple(shift_range(cells, needed_ranges[axis][0]) for cells in request.used[part])

        def to_image_coordinates(piece: Piece) -> Piece:
            """Return the piece with both ends in cells of the image; each view is one range."""
            cells_by_axis = {axis: range(lo, hi) for axis, (lo, hi) in enumerate(own_ranges)}
            cells_by_axis |= zip(requests, piece.source.ranges, strict=True)
            return Piece(piece.peer - first_rank, *[Lattice(tuple(cells_by_axis.values()))] * 2)

        tile = Box.from_ranges(own_ranges)
        view = Box.from_ranges(needed_ranges)
        received_pieces = [*map(to_image_coordinates, transfer.receives(grid.rank))]
        sent_pieces = [*map(to_image_coordinates, transfer.sends(grid.rank))]
        remote_pieces = [piece for piece in received_pieces if piece.peer != grid.tile]
        local_pieces = [piece for piece in received_pieces if piece.peer == grid.tile]
        return HaloPlan(
            own=tile,
            need=view,
            pieces=lambda: (remote_pieces, sent_pieces, local_pieces),
            buffer=tile if view.empty else view.hull(tile),
            extent=tuple(n for _, n in image_ranges),
            window=Window(1, padding=0, fill=fill, ndim=len(extent)),
            used=tuple(used_cells.get(axis, (range(lo, hi),)) for axis, (lo, hi) in enumerate(needed_ranges)),
        )

    def _record_messages(self, array: GlobalArray, recorded_run_counts: list[int]) -> None:
        """Record the messages since the last call."""
        exchanges = array.recorded_exchanges
        recorded_run_counts += [0] * (len(exchanges) - len(recorded_run_counts))
        for at, (direction, exchange) in enumerate(exchanges):
            for _ in range(recorded_run_counts[at], exchange.run_count):
                for message in exchange.sends:
                    peer = self.grid.rank - self.grid.tile + message.peer
                    self.comm.record_traffic("halo", self.name, direction, peer, message.nbytes)
            recorded_run_counts[at] = exchange.run_count


def parse_schemes(schemes: Schemes, module_paths: Collection[str]) -> dict[str, ExchangePolicy]:
    """Return the schemes by module path; '' is the whole module.

    Raises
    ------
    ConfigError
        If a scheme or module does not exist, or the scheme does not support windows of torch modules.
    """
    policies = {}
    for path, scheme in schemes.items() if isinstance(schemes, Mapping) else [("", schemes)]:
        policy = as_scheme(scheme)
        if path not in module_paths:
            raise ConfigError(f"scheme: the module has no submodule named {path!r}{suggest(path, module_paths)}")
        if policy.gradients != "scatter":
            raise ConfigError(
                f"scheme: '{scheme_text(policy)}' applies to neondist layers only: gradients of a module's windows are"
                " always scattered; leave 'backward' out"
            )
        policies[path] = policy
    return policies


def assign_schemes(steps: Iterable[Step], schemes: Mapping[str, ExchangePolicy]) -> None:
    """Set the scheme of each window to that of the innermost module that has one; None for a fusing scheme."""
    for step in steps:
        if step.is_window_view:
            module, _, _ = step.name.rpartition(":")
            policy = policy_of_module(module, schemes)
            step.scheme = None if isinstance(policy, FusionScheme) else policy


def policy_of_module(module: str, schemes: Mapping[str, ExchangePolicy]) -> ExchangePolicy | None:
    """Return the scheme of the innermost module that has one, or None for exact exchange."""
    paths = [path for path in schemes if not path or f"{module}.".startswith(f"{path}.")]
    policy = schemes[max(paths, key=len)] if paths else None
    return None if type(policy) is Halo else policy


def _as_channels_last(tensor: torch.Tensor) -> np.ndarray:
    """Return an array (n, *cells, C) sharing the tensor's memory; bfloat16, which NumPy lacks, is copied to float32."""
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).movedim(1, -1).numpy()
