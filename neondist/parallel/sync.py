"""Timing and messages of the reduction of gradients over ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..arrays.namespace import namespace
from ..comm import ProcessGrid, Reductions, Request
from .flags import HEADER, ControlFlags, Flag

FlatRange = tuple[int, int]
"""Start and stop of a parameter among the gradients."""

_BLOCK = 1 << 20  # cells along the first axis at a time: a mask of all gradients would be a quarter of them


def finite(array: Any) -> Any:
    """Return whether all numbers of an array are finite, as a scalar of its namespace.

    On a device, converting it to bool waits for the result.
    """
    xp = namespace(array)
    result = xp.isfinite(array[:_BLOCK]).all()
    for start in range(_BLOCK, len(array), _BLOCK):
        result &= xp.isfinite(array[start : start + _BLOCK]).all()
    return result


class GradientSync(ABC):
    """Base of classes that replace this rank's shares of the gradients by their sums over all ranks.

    Parameters
    ----------
    grid : ProcessGrid
    buffer : flat array
        Room for the control flags, and the gradients.
    spans : sequence of FlatRange
        Of all parameters, in order; contiguous.
    shared : int
        Number of leading gradients that are summed over all ranks; the others, which belong to a tile, are summed over
        the replicas.
    exact : int, optional
        Number of leading gradients summed here; the rest of `shared` is sent compressed. Default: all.

    Attributes
    ----------
    flags : ControlFlags
        Sent in front of the gradients.
    reductions : Reductions
    """

    def __init__(
        self, grid: ProcessGrid, buffer: Any, spans: Sequence[FlatRange], shared: int, exact: int | None = None
    ) -> None:
        self.flags, self.reductions = ControlFlags(), Reductions(grid)
        self.reductions.direction = "backward"
        self.header, self.grads, self.shared = buffer[:HEADER], buffer[HEADER:], shared
        self.exact = shared if exact is None else exact
        #: the flags and the shared gradients
        self.message = buffer[: HEADER + self.exact]
        self.all_finite: Any = True

    def begin(self) -> None:
        """Begin a step, which overwrites the gradients."""
        self.all_finite = True

    def note(self, is_finite: Any) -> None:
        """Record whether some gradients of this rank are finite; all ranks learn if they are not."""
        self.all_finite = self.all_finite & is_finite

    @abstractmethod
    def ready(self, span: FlatRange) -> None:
        """Mark this rank's share of a parameter's gradient as complete; in the same order on all ranks."""

    @abstractmethod
    def finish(self) -> None:
        """Return when all gradients are summed, and the flags in front of them; collective."""

    def publish_flags(self) -> None:
        """Sum the flags alone, if no gradients are summed over all ranks; collective."""
        self._write_flags()
        self.reductions.allreduce("world", self.header)

    def _write_flags(self) -> None:
        """Put this rank's flags in front of the gradients."""
        xp = namespace(self.header)
        self.header[...] = xp.asarray(self.flags.mine)
        self.header[Flag.NON_FINITE] += xp.logical_not(self.all_finite)

    def _check_own(self) -> None:
        """Check the gradients of this tile's own parameters, which other ranks do not have."""
        if self.shared < len(self.grads):
            self.note(finite(self.grads[self.shared :]))


class AllReduce(GradientSync):
    """One sum over all ranks, when all gradients are complete."""

    def ready(self, span: FlatRange) -> None:
        """Wait for the others."""

    def finish(self) -> None:
        """Sum the gradients of a tile over the replicas, then the rest, with the flags, over all ranks."""
        if self.shared < len(self.grads):
            self.reductions.allreduce("replicas", self.grads[self.shared :])
        self._check_own()
        self._write_flags()
        self.reductions.allreduce("world", self.message)


@dataclass
class Bucket:
    """Neighbouring gradients that are summed together.

    Attributes
    ----------
    array : flat array
    group : str
    start, stop : int
        Range among all gradients.
    missing : int
        Number of gradients that are not complete yet.
    request : Request or None
        None: not sent.
    """

    array: Any
    group: str
    start: int
    stop: int
    missing: int = 0
    request: Request | None = None


class Bucketed(GradientSync):
    """One sum per bucket, started as soon as its gradients are complete, while others are computed.

    The first gradients, which are complete last, are sent with the flags.
    """

    #: Bytes of a full bucket
    full = 1 << 20

    def __init__(
        self, grid: ProcessGrid, buffer: Any, spans: Sequence[FlatRange], shared: int, exact: int | None = None
    ) -> None:
        super().__init__(grid, buffer, spans, shared, exact)
        own = self._cut([span for span in spans if span[0] >= shared], "replicas")
        common = self._cut([span for span in spans if span[1] <= self.exact], "world")
        first = common.pop() if common else Bucket(self.message, "world", 0, 0)
        self.last = Bucket(buffer[: HEADER + first.stop], "world", first.start, first.stop)
        self.early = [*own, *common]
        self.begin()

    def begin(self) -> None:
        """Empty all buckets."""
        super().begin()
        self.sent: list[Bucket] = []
        for bucket in (*self.early, self.last):
            bucket.missing, bucket.request = bucket.stop - bucket.start, None

    def ready(self, span: FlatRange) -> None:
        """Send the bucket whose gradients are all complete now."""
        for bucket in self.early:
            if bucket.start <= span[0] < bucket.stop:
                bucket.missing -= span[1] - span[0]
                if not bucket.missing:
                    self._send(bucket)

    def finish(self) -> None:
        """Send the remaining buckets, the flags last; wait for all."""
        for bucket in self.early:
            self._send(bucket)
        self._wait("replicas")
        self._check_own()
        self._write_flags()
        self._send(self.last)
        self._wait("world")
        self.begin()

    def _send(self, bucket: Bucket) -> None:
        """Start the sum of a bucket, unless it has started."""
        if bucket.request is None:
            bucket.request = self.reductions.iallreduce(bucket.group, bucket.array)
            self.sent.append(bucket)

    def _wait(self, group: str) -> None:
        """Wait for a group's sums, in the order of their start."""
        for bucket in self.sent:
            if bucket.group == group and bucket.request is not None:
                self.reductions.wait(group, bucket.request)

    def _cut(self, spans: Sequence[FlatRange], group: str) -> list[Bucket]:
        """Return buckets of parameters, the last ones first."""
        buckets: list[Bucket] = []
        end: int | None = None
        for start, stop in reversed(spans):
            end = stop if end is None else end
            if (end - start) * self.grads.itemsize >= self.full or start == spans[0][0]:
                buckets.append(Bucket(self.grads[start:end], group, start, end))
                end = None
        return buckets


SYNCS: dict[str, type[GradientSync]] = {"allreduce": AllReduce, "bucketed": Bucketed}
"""By the values of `sync`."""
