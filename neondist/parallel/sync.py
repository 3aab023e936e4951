"""Timing and messages of the reduction of gradients over ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..arrays.namespace import namespace
from ..comm import ProcessGrid, Reductions, Request
from .flags import HEADER_SIZE, ControlFlags, Flag

FlatRange = tuple[int, int]
"""Start and stop of a parameter among the gradients."""

_CHECK_LENGTH = 1 << 20  # cells along the first axis at a time: a mask of all gradients would be a quarter of them


def is_finite(array: Any) -> Any:
    """Return whether all numbers of an array are finite, as a scalar of its namespace.

    On a device, converting it to bool waits for the result.
    """
    xp = namespace(array)
    result = xp.isfinite(array[:_CHECK_LENGTH]).all()
    for start in range(_CHECK_LENGTH, len(array), _CHECK_LENGTH):
        result &= xp.isfinite(array[start : start + _CHECK_LENGTH]).all()
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
    shared_size : int
        Number of leading gradients that are summed over all ranks; the others, which belong to a tile, are summed over
        the replicas.
    uncompressed_size : int, optional
        Number of leading gradients summed here; the rest of `shared_size` is sent compressed. Default: all.

    Attributes
    ----------
    flags : ControlFlags
        Sent in front of the gradients.
    reductions : Reductions
    """

    def __init__(
        self,
        grid: ProcessGrid,
        buffer: Any,
        spans: Sequence[FlatRange],
        shared_size: int,
        uncompressed_size: int | None = None,
    ) -> None:
        self.flags, self.reductions = ControlFlags(), Reductions(grid)
        self.reductions.direction = "backward"
        self.header, self.grads, self.shared_size = buffer[:HEADER_SIZE], buffer[HEADER_SIZE:], shared_size
        self.uncompressed_size = shared_size if uncompressed_size is None else uncompressed_size
        #: the flags and the shared gradients
        self.world_message = buffer[: HEADER_SIZE + self.uncompressed_size]
        self.all_finite: Any = True

    def begin_step(self) -> None:
        """Begin a step, which overwrites the gradients."""
        self.all_finite = True

    def record_finiteness(self, are_finite: Any) -> None:
        """Record whether some gradients of this rank are finite; all ranks learn if they are not."""
        self.all_finite = self.all_finite & are_finite

    @abstractmethod
    def mark_ready(self, span: FlatRange) -> None:
        """Mark this rank's share of a parameter's gradient as complete; in the same order on all ranks."""

    @abstractmethod
    def finish_sums(self) -> None:
        """Return when all gradients are summed, and the flags in front of them; collective."""

    def publish_flags(self) -> None:
        """Sum the flags alone, if no gradients are summed over all ranks; collective."""
        self._write_flags()
        self.reductions.allreduce("world", self.header)

    def _write_flags(self) -> None:
        """Put this rank's flags in front of the gradients."""
        xp = namespace(self.header)
        self.header[...] = xp.asarray(self.flags.own_flags)
        self.header[Flag.NON_FINITE] += xp.logical_not(self.all_finite)

    def _check_tile_gradients(self) -> None:
        """Check the gradients of this tile's own parameters, which other ranks do not have."""
        if self.shared_size < len(self.grads):
            self.record_finiteness(is_finite(self.grads[self.shared_size :]))


class AllReduce(GradientSync):
    """One sum over all ranks, when all gradients are complete."""

    def mark_ready(self, span: FlatRange) -> None:
        """Wait for the others."""

    def finish_sums(self) -> None:
        """Sum the gradients of a tile over the replicas, then the rest, with the flags, over all ranks."""
        if self.shared_size < len(self.grads):
            self.reductions.allreduce("replicas", self.grads[self.shared_size :])
        self._check_tile_gradients()
        self._write_flags()
        self.reductions.allreduce("world", self.world_message)


@dataclass
class Bucket:
    """Neighbouring gradients that are summed together.

    Attributes
    ----------
    array : flat array
    group : str
    start, stop : int
        Range among all gradients.
    missing_numbers : int
        Number of gradients that are not complete yet.
    request : Request or None
        None: not sent.
    """

    array: Any
    group: str
    start: int
    stop: int
    missing_numbers: int = 0
    request: Request | None = None


class Bucketed(GradientSync):
    """One sum per bucket, started as soon as its gradients are complete, while others are computed.

    The first gradients, which are complete last, are sent with the flags.
    """

    #: Bytes of a full bucket
    full_bytes = 1 << 20

    def __init__(
        self,
        grid: ProcessGrid,
        buffer: Any,
        spans: Sequence[FlatRange],
        shared_size: int,
        uncompressed_size: int | None = None,
    ) -> None:
        super().__init__(grid, buffer, spans, shared_size, uncompressed_size)
        own = self._create_buckets([span for span in spans if span[0] >= shared_size], "replicas")
        common = self._create_buckets([span for span in spans if span[1] <= self.uncompressed_size], "world")
        first = common.pop() if common else Bucket(self.world_message, "world", 0, 0)
        self.last_bucket = Bucket(buffer[: HEADER_SIZE + first.stop], "world", first.start, first.stop)
        self.early_buckets = [*own, *common]
        self.begin_step()

    def begin_step(self) -> None:
        """Empty all buckets."""
        super().begin_step()
        self.sent_buckets: list[Bucket] = []
        for bucket in (*self.early_buckets, self.last_bucket):
            bucket.missing_numbers, bucket.request = bucket.stop - bucket.start, None

    def mark_ready(self, span: FlatRange) -> None:
        """Send the bucket whose gradients are all complete now."""
        for bucket in self.early_buckets:
            if bucket.start <= span[0] < bucket.stop:
                bucket.missing_numbers -= span[1] - span[0]
                if not bucket.missing_numbers:
                    self._start_sum(bucket)

    def finish_sums(self) -> None:
        """Send the remaining buckets, the flags last; wait for all."""
        for bucket in self.early_buckets:
            self._start_sum(bucket)
        self._wait_for_sums("replicas")
        self._check_tile_gradients()
        self._write_flags()
        self._start_sum(self.last_bucket)
        self._wait_for_sums("world")
        self.begin_step()

    def _start_sum(self, bucket: Bucket) -> None:
        """Start the sum of a bucket, unless it has started."""
        if bucket.request is None:
            bucket.request = self.reductions.iallreduce(bucket.group, bucket.array)
            self.sent_buckets.append(bucket)

    def _wait_for_sums(self, group: str) -> None:
        """Wait for a group's sums, in the order of their start."""
        for bucket in self.sent_buckets:
            if bucket.group == group and bucket.request is not None:
                self.reductions.wait(group, bucket.request)

    def _create_buckets(self, spans: Sequence[FlatRange], group: str) -> list[Bucket]:
        """Return buckets of parameters, the last ones first."""
        buckets: list[Bucket] = []
        end: int | None = None
        for start, stop in reversed(spans):
            end = stop if end is None else end
            if (end - start) * self.grads.itemsize >= self.full_bytes or start == spans[0][0]:
                buckets.append(Bucket(self.grads[start:end], group, start, end))
                end = None
        return buckets


SYNC_CLASSES: dict[str, type[GradientSync]] = {"allreduce": AllReduce, "bucketed": Bucketed}
"""By the values of `sync`."""
