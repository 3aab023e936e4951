"""Dry run of one of many ranks: the rank computes, and records messages instead of sending them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...comm import CompletedRequest, Exchange, Message, ProcessGrid, ReduceOp, Request, Transport
from ...geometry import GridShape


@dataclass
class DryRunMessageLog:
    """Record of messages that were counted instead of sent.

    Attributes
    ----------
    exchange_sizes : list of (messages, bytes sent)
    allreduce_sizes : list of (ranks, bytes)
    """

    exchange_sizes: list[tuple[int, int]] = field(default_factory=list)
    allreduce_sizes: list[tuple[int, int]] = field(default_factory=list)


class DryRunTransport(Transport):
    """Transport of one rank of `size` without the other ranks: it sends nothing, and receives zeros."""

    def __init__(self, rank: int, size: int, message_log: DryRunMessageLog) -> None:
        self.rank, self.size, self.message_log = rank, size, message_log

    def split(self, color: int, key: int) -> Transport:
        """Return a group of the same size; `dry_run_grid` replaces it with the correct group."""
        return DryRunTransport(key, self.size, self.message_log)

    def split_by(self, color: Callable[[int], int]) -> Transport:
        """Return this rank among those of its colour."""
        group = [rank for rank in range(self.size) if color(rank) == color(self.rank)]
        return DryRunTransport(group.index(self.rank), len(group), self.message_log)

    def create_exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Exchange:
        """Return an exchange that only records its messages."""
        return _RecordedExchange(self, sends, receives)

    def allreduce(self, array: np.ndarray, op: ReduceOp = "sum") -> None:
        """Record the reduction; the array remains this rank's contribution."""
        self.message_log.allreduce_sizes.append((self.size, array.nbytes))

    def iallreduce(self, array: np.ndarray) -> Request:
        """Record the reduction."""
        self.allreduce(array)
        return CompletedRequest()

    def allgather_array(self, array: np.ndarray) -> np.ndarray:
        """Return this rank's array in place of every rank's."""
        return np.stack([array] * self.size)

    def all_to_all(self, sends: Sequence[np.ndarray], receive_shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
        """Record the messages; return zeros in place of the received arrays."""
        others = [array.nbytes for peer, array in enumerate(sends) if peer != self.rank and array.size]
        self.message_log.exchange_sizes.append((len(others), sum(others)))
        return [np.zeros(shape, sends[0].dtype) for shape in receive_shapes]

    def allgather(self, value: Any) -> list[Any]:
        """Return this rank's value in place of every rank's."""
        return [value] * self.size

    def bcast(self, value: Any, root: int = 0) -> Any:
        """Return the value."""
        return value

    def abort(self, code: int) -> None:
        """End the process."""
        raise SystemExit(code)


class _RecordedExchange(Exchange):
    transport: DryRunTransport

    def _start(self) -> None:
        self.transport.message_log.exchange_sizes.append((len(self.sends), self.bytes_sent))

    def _finish(self) -> None:
        for message in self.receives:
            message.cells[...] = 0  # zeros are valid numbers, and writing them takes as long as MPI's writes


def dry_run_grid(rank: int, shape: GridShape, message_log: DryRunMessageLog) -> ProcessGrid:
    """Return the grid of a shape on rank `rank`."""
    factors = {"replicas": shape.replicas, "rows": shape.rows, "cols": shape.cols, "planes": shape.planes}
    grid = ProcessGrid(DryRunTransport(rank, shape.size, message_log), **factors)
    grid.tile_comm = DryRunTransport(grid.tile, grid.shape.tiles, message_log)
    grid.replica_comm = DryRunTransport(grid.replica, grid.replicas, message_log)
    return grid
