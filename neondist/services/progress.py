"""Progress of workers and applied updates: staleness bound and applied minibatches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from .message import MessageError

MAX_MINIBATCHES = 1 << 20
"""Maximum number of minibatches of a task."""


class MinibatchId(NamedTuple):
    """Minibatch of a gradient: its epoch, its task, and its index within the task."""

    epoch: int
    task: int
    index_in_task: int

    @classmethod
    def parse(cls, value: object) -> MinibatchId:
        """Return the minibatch given by a list of three integers; MessageError if it is invalid."""
        if not isinstance(value, list) or len(value) != 3 or not all(type(n) is int and n >= 0 for n in value):
            raise MessageError("field 'credit': expected [epoch, task, minibatch]")
        if value[2] >= MAX_MINIBATCHES:
            raise MessageError(f"field 'credit': minibatch {value[2]} is not below {MAX_MINIBATCHES}")
        return cls(*value)


class AppliedMinibatches:
    """Minibatches whose gradients have been applied.

    All minibatches of epochs before `first_tracked_epoch` have been applied, and are not listed.
    """

    def __init__(self) -> None:
        self.first_tracked_epoch = 0
        self._masks: dict[tuple[int, int], int] = {}

    def __contains__(self, minibatch: MinibatchId) -> bool:
        mask = self._masks.get(minibatch[:2], 0)
        return minibatch.epoch < self.first_tracked_epoch or bool(mask >> minibatch.index_in_task & 1)

    def add(self, minibatch: MinibatchId) -> None:
        """Record that a gradient has been applied."""
        if minibatch.epoch >= self.first_tracked_epoch:
            self._masks[minibatch[:2]] = self._masks.get(minibatch[:2], 0) | 1 << minibatch.index_in_task

    def drop_through_epoch(self, epoch: int) -> None:
        """Drop the entries of all epochs up to `epoch`, whose minibatches then count as applied."""
        self.first_tracked_epoch = max(self.first_tracked_epoch, epoch + 1)
        self._masks = {key: mask for key, mask in self._masks.items() if key[0] >= self.first_tracked_epoch}

    def to_list(self) -> list[MinibatchId]:
        """Return the listed minibatches, in order."""
        return [
            MinibatchId(epoch, task, index)
            for (epoch, task), mask in sorted(self._masks.items())
            for index in range(mask.bit_length())
            if mask >> index & 1
        ]

    def to_json(self) -> dict[str, Any]:
        """Return a canonical JSON value that `parse` accepts."""
        masks = [[epoch, task, f"{mask:x}"] for (epoch, task), mask in sorted(self._masks.items())]
        return {"first_tracked_epoch": self.first_tracked_epoch, "applied": masks}

    @classmethod
    def parse(cls, fields: Any) -> AppliedMinibatches:
        """Return the minibatches in a JSON value; MessageError if it is invalid."""
        minibatches = cls()
        try:
            minibatches.first_tracked_epoch = int(fields["first_tracked_epoch"])
            for epoch, task, mask in fields["applied"]:
                minibatches._masks[int(epoch), int(task)] = int(mask, 16)
        except (TypeError, KeyError, ValueError):
            raise MessageError("invalid credits") from None
        return minibatches

    def union(self, other: AppliedMinibatches) -> AppliedMinibatches:
        """Return the minibatches in either of two sets."""
        combined = AppliedMinibatches()
        combined.first_tracked_epoch = max(self.first_tracked_epoch, other.first_tracked_epoch)
        for key in self._masks.keys() | other._masks.keys():
            if key[0] >= combined.first_tracked_epoch:
                combined._masks[key] = self._masks.get(key, 0) | other._masks.get(key, 0)
        return combined

    @staticmethod
    def intersection(sets: Sequence[AppliedMinibatches]) -> AppliedMinibatches:
        """Return the minibatches in all of several sets."""
        common = AppliedMinibatches()
        earliest = min(sets, key=lambda minibatches: minibatches.first_tracked_epoch)
        common.first_tracked_epoch = earliest.first_tracked_epoch
        for minibatch in earliest.to_list():  # lists all minibatches of these epochs
            if all(minibatch in minibatches for minibatches in sets):
                common.add(minibatch)
        return common


class StalenessBound:
    """Bound on the lead of workers over the slowest one, in steps (stale synchronous parallel, Ho et al. 2013).

    A worker that has finished step i may continue once all other workers have finished step i - staleness.

    Parameters
    ----------
    staleness : int or None
        None: unbounded.
    """

    def __init__(self, staleness: int | None) -> None:
        self.staleness = staleness
        self.steps_by_worker: dict[str, int] = {}

    def add_worker(self, worker: str) -> None:
        """Add a worker at the step of the slowest worker, unless it is already present."""
        self.steps_by_worker.setdefault(worker, min(self.steps_by_worker.values(), default=0))

    def remove_worker(self, worker: str) -> None:
        """Remove a worker; the others no longer wait for it."""
        self.steps_by_worker.pop(worker, None)

    def finish_step(self, worker: str) -> None:
        """Record that a worker has finished a step."""
        self.add_worker(worker)
        self.steps_by_worker[worker] += 1

    def may_continue(self, worker: str) -> bool:
        """Whether a worker that has finished a step may continue."""
        if self.staleness is None or worker not in self.steps_by_worker:
            return True
        return self.steps_by_worker[worker] - min(self.steps_by_worker.values()) <= self.staleness


def learning_rate_factor(staleness: int, modulate: bool) -> float:
    """Return the multiplier of the learning rate for a gradient of values that are `staleness` updates old."""
    return 1.0 / max(1, staleness) if modulate else 1.0


def weights_by_sample_count(sample_counts: Iterable[float]) -> list[float]:
    """Return the weight of each gradient in the mean over all samples."""
    counts = list(sample_counts)
    total = sum(counts)
    return [count / total for count in counts]
