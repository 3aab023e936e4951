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
"""From where to where a parameter lies among the gradients."""


_BLOCK = 1 << 20  # cells along the first axis at a time: a mask of all gradients would be a quarter of them


def finite(array: Any) -> Any:
    """Return whether all numbers of an array are finite: a truth value of its namespace, which on a device is awaited.

    Whoever asks for it as a bool waits.
    """
    xp = namespace(array)
    found = xp.isfinite(array[:_BLOCK]).all()
    for start in range(_BLOCK, len(array), _BLOCK):
        found &= xp.isfinite(array[start : start + _BLOCK]).all()
    return found


class GradientSync(ABC):
    """Makes this rank's shares of the gradients what they come to on all ranks.

    Parameters
    ----------
    grid : ProcessGrid
    buffer : flat array
        Room for the control flags, and the gradients.
    spans : sequence of FlatRange
        Of all parameters, in their order. They lie side by side.
    shared : int
        So many numbers from the start are gradients that all ranks add up; the others, which belong to a tile, are
        added up by the replicas.
    exact : int, optional
        So many of the first are added up here; the rest of `shared` travels compressed. Default: all.

    Attributes
    ----------
    flags : ControlFlags
        They travel in front of the gradients.
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
        self.good: Any = True

    def begin(self) -> None:
        """Record that a step overwrites the gradients."""
        self.good = True

    def note(self, good: Any) -> None:
        """Take note of whether something on this rank is finite; all ranks hear if it is not."""
        self.good = self.good & good

    @abstractmethod
    def ready(self, span: FlatRange) -> None:
        """Take note that this rank's share in a parameter's gradient is complete; on all ranks in the same order."""

    @abstractmethod
    def finish(self) -> None:
        """Return when all gradients are summed, and the flags in front of them; collective."""

    def publish_flags(self) -> None:
        """Add up the flags alone, where no gradients are that all ranks add up; collective."""
        self._raise_flags()
        self.reductions.allreduce("world", self.header)

    def _raise_flags(self) -> None:
        """Put this rank's flags in front of the gradients."""
        xp = namespace(self.header)
        self.header[...] = xp.asarray(self.flags.mine)
        self.header[Flag.NON_FINITE] += xp.logical_not(self.good)

    def _check_own(self) -> None:
        """Record the gradients of this tile's own parameters, which no other rank has."""
        if self.shared < len(self.grads):
            self.note(finite(self.grads[self.shared :]))


class AllReduce(GradientSync):
    """One sum over all ranks, when all gradients are complete."""

    def ready(self, span: FlatRange) -> None:
        """Wait for the others."""

    def finish(self) -> None:
        """Sum over the replicas what belongs to a tile, and then the rest, with the flags, over all ranks."""
        if self.shared < len(self.grads):
            self.reductions.allreduce("replicas", self.grads[self.shared :])
        self._check_own()
        self._raise_flags()
        self.reductions.allreduce("world", self.message)


@dataclass
class Bucket:
    """Neighbouring gradients that travel together.

    Attributes
    ----------
    array : flat array
    group : str
    start, stop : int
        Where the gradients lie among all.
    missing : int
        How many of its numbers are not complete yet.
    request : Request or None
        None: it is not on its way.
    """

    array: Any
    group: str
    start: int
    stop: int
    missing: int = 0
    request: Request | None = None


class Bucketed(GradientSync):
    """A sum for each bucket, which travels as soon as its gradients are complete, while others are computed.

    The first gradients of all, which are the last to be complete, travel with the flags.
    """

    #: bytes from which on a bucket is full
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
        """Begin to fill all buckets."""
        super().begin()
        self.sent: list[Bucket] = []
        for bucket in (*self.early, self.last):
            bucket.missing, bucket.request = bucket.stop - bucket.start, None

    def ready(self, span: FlatRange) -> None:
        """Send the bucket that is full of complete gradients now."""
        for bucket in self.early:
            if bucket.start <= span[0] < bucket.stop:
                bucket.missing -= span[1] - span[0]
                if not bucket.missing:
                    self._send(bucket)

    def finish(self) -> None:
        """Send what has not been sent, and the flags at last; wait for all."""
        for bucket in self.early:
            self._send(bucket)
        self._wait("replicas")
        self._check_own()
        self._raise_flags()
        self._send(self.last)
        self._wait("world")
        self.begin()

    def _send(self, bucket: Bucket) -> None:
        """Let a bucket travel, if it does not yet."""
        if bucket.request is None:
            bucket.request = self.reductions.iallreduce(bucket.group, bucket.array)
            self.sent.append(bucket)

    def _wait(self, group: str) -> None:
        """Wait for a group's sums, in the order in which they began."""
        for bucket in self.sent:
            if bucket.group == group and bucket.request is not None:
                self.reductions.wait(group, bucket.request)

    def _cut(self, spans: Sequence[FlatRange], group: str) -> list[Bucket]:
        """Return buckets of parameters, from the last to the first."""
        found: list[Bucket] = []
        end: int | None = None
        for start, stop in reversed(spans):
            end = stop if end is None else end
            if (end - start) * self.grads.itemsize >= self.full or start == spans[0][0]:
                found.append(Bucket(self.grads[start:end], group, start, end))
                end = None
        return found


SYNCS: dict[str, type[GradientSync]] = {"allreduce": AllReduce, "bucketed": Bucketed}
"""By the names that `sync` takes."""
