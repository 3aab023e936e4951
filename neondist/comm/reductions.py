"""Reductions and redistributions over the ranks of a grid, and a record of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..arrays.namespace import HostStagingBuffer, namespace, synchronize_stream, to_host
from ..geometry import part_range
from .grid import ProcessGrid
from .transport import CompletedRequest, ReduceOp, Request, Transport

GROUP_NAMES = ("world", "tiles", "replicas")
"""all ranks; the ranks of one replica; the ranks of the same tile in all replicas"""


def reduction_group(over_tiles: bool, over_replicas: bool) -> str | None:
    """Return the group over which partial sums of each rank's own cells are reduced; None: no reduction.

    Parameters
    ----------
    over_tiles : bool
        Whether the cells are partitioned over the tiles; otherwise they are replicated.
    over_replicas : bool
        Whether to reduce over the samples of all replicas.
    """
    if over_replicas:
        return "world" if over_tiles else "replicas"
    return "tiles" if over_tiles else None


def _synchronise_if_accepted(transport: Transport, array: Any) -> bool:
    """Wait for the kernels of an array, and return whether the transport accepts the array directly."""
    if transport.accepts_device_array(array):
        synchronize_stream(array)
    return transport.accepts_array(array)


class _StagedRequest(Request):
    """A nonblocking sum of a device array, staged on the host."""

    def __init__(self, transport: Transport, array: Any) -> None:
        self.buffer = HostStagingBuffer(array)
        self.request = transport.iallreduce(self.buffer.copy_to_host())

    def wait(self) -> None:
        """Wait until the array holds the sum."""
        self.request.wait()
        self.buffer.copy_to_device()


class Reductions:
    """Reductions and redistributions recorded together, such as those of a layer.

    Parameters
    ----------
    grid : ProcessGrid

    Attributes
    ----------
    direction : 'forward' or 'backward'
        Direction of the current pass.
    reduction_counts : Counter of (direction, group, bytes)
        Number of reductions of arrays of this size; groups of one rank are omitted.
    redistribution_counts : Counter of (direction, group, peer, bytes)
        Number of redistribution messages of this size to a rank of the group.
    """

    def __init__(self, grid: ProcessGrid) -> None:
        self.grid, self.direction = grid, "forward"
        self.reduction_counts: Counter[tuple[str, str, int]] = Counter()
        self.redistribution_counts: Counter[tuple[str, str, int, int]] = Counter()

    def allreduce(self, group: str, array: Any, op: ReduceOp = "sum") -> Any:
        """Replace the array by its sum, or maximum, over one of GROUP_NAMES; return it. Collective in this group."""
        transport = self._record(group, array)
        with self.grid.observers.observe("wait", "", self.direction, group):
            if transport.size == 1 or _synchronise_if_accepted(transport, array):
                transport.allreduce(array, op)
            else:
                buffer = HostStagingBuffer(array)
                transport.allreduce(buffer.copy_to_host(), op)
                buffer.copy_to_device()
        return array

    def iallreduce(self, group: str, array: Any) -> Request:
        """Begin to replace the array by its sum over one of GROUP_NAMES. Collective, in the same order on all ranks."""
        transport = self._record(group, array)
        if transport.size == 1:
            return CompletedRequest()
        is_accepted = _synchronise_if_accepted(transport, array)
        return transport.iallreduce(array) if is_accepted else _StagedRequest(transport, array)

    def wait(self, group: str, request: Request) -> None:
        """Wait for a nonblocking sum over one of GROUP_NAMES."""
        with self.grid.observers.observe("wait", "", self.direction, group):
            request.wait()

    def gather(self, group: str, array: Any) -> Any:
        """Return all ranks' arrays, stacked in rank order. Collective over one of GROUP_NAMES."""
        transport = self._record(group, array)
        if transport.size == 1:
            return array[None]
        with self.grid.observers.observe("wait", "", self.direction, group):
            return namespace(array).asarray(transport.allgather_array(to_host(array)))

    def sum_encoded(
        self, group: str, codes: np.ndarray, encode: Callable[[Any], np.ndarray], decode: Callable[[np.ndarray], Any]
    ) -> tuple[np.ndarray, slice, Any]:
        """Return the sum over the ranks of numbers that are sent in an encoding. Collective over one of GROUP_NAMES.

        Each rank decodes one slice of all ranks' codes, and adds the decoded numbers in rank order.

        Parameters
        ----------
        codes : ndarray, 1-D
            Codes of this rank's numbers; recorded once, as a reduced array.
        encode, decode : callable
            Functions from numbers to codes, and from codes to numbers.

        Returns
        -------
        codes, slice, array
            Codes of the whole sum; this rank's slice of the sum; the encoding error in this slice.
        """
        transport = self._record(group, codes)
        bounds = [part_range(codes.size, transport.size, rank) for rank in range(transport.size)]
        lo, hi = bounds[transport.rank]
        with self.grid.observers.observe("wait", "", self.direction, group):
            shares = transport.all_to_all([codes[start:stop] for start, stop in bounds], [(hi - lo,)] * len(bounds))
            own_sum = decode(shares[0])
            for share in shares[1:]:
                own_sum += decode(share)
            own_codes = encode(own_sum)
            parts = transport.all_to_all([own_codes] * len(bounds), [(stop - start,) for start, stop in bounds])
        return np.concatenate(parts), slice(lo, hi), own_sum - decode(own_codes)

    def all_to_all(self, group: str, sends: Sequence[Any], shapes: Sequence[tuple[int, ...]]) -> list[Any]:
        """Send an array to each rank of one of GROUP_NAMES; return the received arrays. Collective in this group."""
        transport = self.grid.group(group)
        others = [(peer, array.nbytes) for peer, array in enumerate(sends) if peer != transport.rank]
        self.redistribution_counts.update((self.direction, group, peer, nbytes) for peer, nbytes in others if nbytes)
        with self.grid.observers.observe("wait", "", self.direction, group):
            if transport.size == 1:
                return [array.copy() for array in sends]
            parts = transport.all_to_all([to_host(array) for array in sends], shapes)
            return [namespace(array).asarray(part) for array, part in zip(sends, parts, strict=True)]

    def _record(self, group: str, array: Any) -> Transport:
        """Record a reduction of an array over a group, and return the group."""
        transport = self.grid.group(group)
        if transport.size > 1 and array.nbytes:
            self.reduction_counts[self.direction, group, array.nbytes] += 1
        return transport

    @property
    def bytes_reduced(self) -> int:
        """Bytes that this rank has contributed to reductions, or sent for redistributions."""
        redistributed_bytes = sum(count * nbytes for (*_, nbytes), count in self.redistribution_counts.items())
        return redistributed_bytes + sum(count * nbytes for (_, _, nbytes), count in self.reduction_counts.items())
