"""Transport of a single process, without MPI."""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from .transport import CompletedRequest, Exchange, Message, ReduceOp, Request, Transport


class _EmptyExchange(Exchange):
    def _start(self) -> None:
        pass

    def _finish(self) -> None:
        pass


class SingleTransport(Transport):
    """Transport of one process."""

    rank = 0
    size = 1

    def split(self, color: int, key: int) -> Transport:
        """Return a group of this process alone."""
        return SingleTransport()

    def create_exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Exchange:
        """Return an exchange that does nothing."""
        return _EmptyExchange(self, sends, receives)

    def allreduce(self, array: np.ndarray, op: ReduceOp = "sum") -> None:
        """Do nothing: the array is its own sum."""

    def iallreduce(self, array: np.ndarray) -> Request:
        """Do nothing: the array is its own sum."""
        return CompletedRequest()

    def allgather_array(self, array: np.ndarray) -> np.ndarray:
        """Return a copy of the array with a leading axis of length 1."""
        return array[None].copy()

    def all_to_all(self, sends: Sequence[np.ndarray], receive_shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
        """Return a list with a copy of the array."""
        return [array.copy() for array in sends]

    def allgather(self, value: Any) -> list[Any]:
        """Return a list with a copy of the value."""
        return [copy.deepcopy(value)]

    def bcast(self, value: Any, root: int = 0) -> Any:
        """Return a copy of the value."""
        return copy.deepcopy(value)

    def abort(self, code: int) -> None:
        """End the process."""
        sys.exit(code)
