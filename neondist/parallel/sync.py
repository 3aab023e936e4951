"""Timing and messages of the reduction of gradients over ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..arrays.namespace import namespace
from ..comm import ProcessGrid, Reductions, Request
from .flags import FLAG_HEADER_LENGTH, ControlFlag, ControlFlags

FlatRange = tuple[int, int]
"""Start and stop of a parameter in the flat gradients."""

_FINITE_CHECK_ELEMENTS = 1 << 20
"""Entries checked at a time along the first axis: a mask of all entries would take a quarter of the array's memory."""


def are_all_finite(array: Any) -> Any:
    """Return whether all elements of an array are finite, as a scalar of its namespace.

    On a device, converting the scalar to bool waits for the result.
    """
    xp = namespace(array)
    all_finite = xp.isfinite(array[:_FINITE_CHECK_ELEMENTS]).all()
    for start in range(_FINITE_CHECK_ELEMENTS, len(array), _FINITE_CHECK_ELEMENTS):
        all_finite &= xp.isfinite(array[start : start + _FINITE_CHECK_ELEMENTS]).all()
    return all_finite


class GradientSync(ABC):
    """Base class of synchronisers, which replace this rank's contributions to the gradients by sums over all ranks.

    Parameters
    ----------
    buffer : flat array
        Memory for the control flags, followed by the gradients.
    spans : sequence of FlatRange
        Ranges of all parameters, in order; contiguous.
    num_world_gradients : int
        Number of leading gradients that are summed over all ranks; the others, which belong to one tile, are summed
        over the replicas.
    num_uncompressed_gradients : int
        Number of leading gradients summed here; the rest of `num_world_gradients` is sent compressed.

    Attributes
    ----------
    flags : ControlFlags
        Flags sent in front of the gradients.
    """

    def __init__(
        self,
        grid: ProcessGrid,
        buffer: Any,
        spans: Sequence[FlatRange],
        num_world_gradients: int,
        num_uncompressed_gradients: int,
    ) -> None:
        self.flags, self.reductions = ControlFlags(), Reductions(grid)
        self.reductions.direction = "backward"
        self.flag_header, self.grads = buffer[:FLAG_HEADER_LENGTH], buffer[FLAG_HEADER_LENGTH:]
        self.num_world_gradients, self.num_uncompressed_gradients = num_world_gradients, num_uncompressed_gradients
        #: the flags, and the uncompressed gradients that are summed over all ranks
        self.world_message = buffer[: FLAG_HEADER_LENGTH + num_uncompressed_gradients]
        self.own_gradients_finite: Any = True

    def begin_step(self) -> None:
        """Begin a step, in which the gradients will be overwritten."""
        self.own_gradients_finite = True

    def record_finiteness(self, are_finite: Any) -> None:
        """Record whether a part of this rank's gradients is finite; all ranks learn of non-finite gradients."""
        self.own_gradients_finite = self.own_gradients_finite & are_finite

    @abstractmethod
    def mark_ready(self, span: FlatRange) -> None:
        """Mark this rank's gradient of a parameter as complete. Must be called in the same order on all ranks."""

    @abstractmethod
    def finish_sums(self) -> None:
        """Complete the sums of all uncompressed gradients and of the flags in front of them. Collective."""

    def publish_flags(self) -> None:
        """Sum only the flags, if gradients need no sum or were summed without the flags. Collective."""
        self._put_flags_before_gradients()
        self.reductions.allreduce("world", self.flag_header)

    def _put_flags_before_gradients(self) -> None:
        """Put this rank's flags in front of the gradients."""
        xp = namespace(self.flag_header)
        self.flag_header[...] = xp.asarray(self.flags.own_flags)
        self.flag_header[ControlFlag.NON_FINITE] += xp.logical_not(self.own_gradients_finite)

    def _record_tile_gradient_finiteness(self) -> None:
        """Record whether the gradients of this tile's own parameters, which other tiles do not have, are finite."""
        if self.num_world_gradients < len(self.grads):
            self.record_finiteness(are_all_finite(self.grads[self.num_world_gradients :]))


class AllReduce(GradientSync):
    """Reduce all gradients in a single allreduce after the backward pass."""

    def mark_ready(self, span: FlatRange) -> None:
        """Do nothing: the reduction starts in `finish_sums`."""

    def finish_sums(self) -> None:
        """Sum the gradients of a tile over the replicas, then the rest, with the flags, over all ranks."""
        if self.num_world_gradients < len(self.grads):
            self.reductions.allreduce("replicas", self.grads[self.num_world_gradients :])
        self._record_tile_gradient_finiteness()
        self._put_flags_before_gradients()
        self.reductions.allreduce("world", self.world_message)


@dataclass
class Bucket:
    """Neighbouring gradients that are summed together.

    Attributes
    ----------
    start, stop : int
        Range among all gradients.
    num_incomplete_gradients : int
        Number of gradients that are not complete yet.
    request : Request or None
        None: not sent yet.
    """

    array: Any
    group: str
    start: int
    stop: int
    num_incomplete_gradients: int = 0
    request: Request | None = None


class Bucketed(GradientSync):
    """Start the allreduce of each bucket as soon as its gradients are complete, during the backward pass.

    The first gradients, which are complete last, are sent with the flags.
    """

    #: Bytes of a full bucket
    full_bucket_bytes = 1 << 20

    def __init__(self, grid: ProcessGrid, buffer: Any, spans: Sequence[FlatRange], *counts: int) -> None:
        super().__init__(grid, buffer, spans, *counts)
        own = self._create_buckets([span for span in spans if span[0] >= self.num_world_gradients], "replicas")
        common = self._create_buckets([span for span in spans if span[0] < self.num_uncompressed_gradients], "world")
        first = common.pop() if common else Bucket(self.world_message, "world", 0, 0)
        self.last_bucket = Bucket(buffer[: FLAG_HEADER_LENGTH + first.stop], "world", first.start, first.stop)
        self.early_buckets = [*own, *common]
        self.begin_step()

    def begin_step(self) -> None:
        """Empty all buckets."""
        super().begin_step()
        self.sent_buckets: list[Bucket] = []
        for bucket in (*self.early_buckets, self.last_bucket):
            bucket.num_incomplete_gradients, bucket.request = bucket.stop - bucket.start, None

    def mark_ready(self, span: FlatRange) -> None:
        """Start the sum of the parameter's bucket if all of its gradients are complete now."""
        for bucket in self.early_buckets:
            if bucket.start <= span[0] < bucket.stop:
                bucket.num_incomplete_gradients -= span[1] - span[0]
                if not bucket.num_incomplete_gradients:
                    self._start_sum(bucket)

    def finish_sums(self) -> None:
        """Start the sums of the remaining buckets, the flags last, and wait for all sums."""
        for bucket in self.early_buckets:
            self._start_sum(bucket)
        self._wait_for_sums("replicas")
        self._record_tile_gradient_finiteness()
        self._put_flags_before_gradients()
        self._start_sum(self.last_bucket)
        self._wait_for_sums("world")
        self.begin_step()

    def _start_sum(self, bucket: Bucket) -> None:
        """Start the sum of a bucket, unless the sum has started."""
        if bucket.request is None:
            bucket.request = self.reductions.iallreduce(bucket.group, bucket.array)
            self.sent_buckets.append(bucket)

    def _wait_for_sums(self, group: str) -> None:
        """Wait for a group's sums, in the order of their start."""
        for bucket in self.sent_buckets:
            if bucket.group == group and bucket.request is not None:
                self.reductions.wait(group, bucket.request)

    def _create_buckets(self, spans: Sequence[FlatRange], group: str) -> list[Bucket]:
        """Return buckets of parameters in reverse order."""
        buckets: list[Bucket] = []
        end: int | None = None
        for start, stop in reversed(spans):
            end = stop if end is None else end
            if (end - start) * self.grads.itemsize >= self.full_bucket_bytes or start == spans[0][0]:
                buckets.append(Bucket(self.grads[start:end], group, start, end))
                end = None
        return buckets


SYNC_CLASSES_BY_NAME: dict[str, type[GradientSync]] = {"allreduce": AllReduce, "bucketed": Bucketed}
"""Gradient synchronisation classes, keyed by the value of `sync`."""
