"""Progress of workers and applied updates: staleness bound, rounds of gradients, credits. Pure bookkeeping."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from .message import MessageError

MOST_MINIBATCHES = 1 << 20
"""Of a task."""


class Credit(NamedTuple):
    """The minibatch of which a gradient is: its epoch, its task, and its number within the task."""

    epoch: int
    task: int
    minibatch: int

    @classmethod
    def parse(cls, value: Any) -> Credit:
        """Return the credit of a list of three integers; MessageError otherwise."""
        if not isinstance(value, list) or len(value) != 3 or not all(type(n) is int and n >= 0 for n in value):
            raise MessageError("field 'credit': expected [epoch, task, minibatch]")
        if value[2] >= MOST_MINIBATCHES:
            raise MessageError(f"field 'credit': minibatch {value[2]} is not below {MOST_MINIBATCHES}")
        return cls(*value)


class Credits:
    """The minibatches whose gradients have been applied.

    All those of an epoch before `first_epoch` have been, and are no longer listed.
    """

    def __init__(self) -> None:
        self.first_epoch = 0
        self._masks: dict[tuple[int, int], int] = {}

    def __contains__(self, credit: Credit) -> bool:
        mask = self._masks.get(credit[:2], 0)
        return credit.epoch < self.first_epoch or bool(mask >> credit.minibatch & 1)

    def add(self, credit: Credit) -> None:
        """Note that a gradient has been applied."""
        if credit.epoch >= self.first_epoch:
            self._masks[credit[:2]] = self._masks.get(credit[:2], 0) | 1 << credit.minibatch

    def finish(self, epoch: int) -> None:
        """Forget the entries of an epoch and those before, all of whose minibatches have been applied."""
        self.first_epoch = max(self.first_epoch, epoch + 1)
        self._masks = {key: mask for key, mask in self._masks.items() if key[0] >= self.first_epoch}

    def listed(self) -> list[Credit]:
        """Return those that are listed, in order."""
        return [
            Credit(epoch, task, at)
            for (epoch, task), mask in sorted(self._masks.items())
            for at in range(mask.bit_length())
            if mask >> at & 1
        ]

    def described(self) -> dict[str, Any]:
        """Return them as JSON, which `parse` reads; equal where they are equal."""
        masks = [[epoch, task, f"{mask:x}"] for (epoch, task), mask in sorted(self._masks.items())]
        return {"first_epoch": self.first_epoch, "applied": masks}

    @classmethod
    def parse(cls, described: Any) -> Credits:
        """Return the credits that JSON describes; MessageError if it is invalid."""
        found = cls()
        try:
            found.first_epoch = int(described["first_epoch"])
            for epoch, task, mask in described["applied"]:
                found._masks[int(epoch), int(task)] = int(mask, 16)
        except (TypeError, KeyError, ValueError):
            raise MessageError("invalid credits") from None
        return found

    def union(self, other: Credits) -> Credits:
        """Return those of both."""
        found = Credits()
        found.first_epoch = max(self.first_epoch, other.first_epoch)
        for key in self._masks.keys() | other._masks.keys():
            if key[0] >= found.first_epoch:
                found._masks[key] = self._masks.get(key, 0) | other._masks.get(key, 0)
        return found

    @staticmethod
    def common(sets: Sequence[Credits]) -> Credits:
        """Return those that are in all of some sets."""
        found = Credits()
        found.first_epoch = min(one.first_epoch for one in sets)
        for credit in sets[0].listed():
            if all(credit in one for one in sets):
                found.add(credit)
        return found


class StalenessBound:
    """Bound on how many steps a worker may be ahead of the slowest one (stale synchronous parallel, Ho et al. 2013).

    A worker that has arrived at the end of its step i may go on once all others have arrived at the end of step
    i - staleness.

    Parameters
    ----------
    staleness : int or None
        None: no bound.
    """

    def __init__(self, staleness: int | None) -> None:
        self.staleness = staleness
        self.steps: dict[str, int] = {}

    def join(self, worker: str) -> None:
        """Count a worker, from the step of the slowest one on; one that is there already stays as it is."""
        self.steps.setdefault(worker, min(self.steps.values(), default=0))

    def leave(self, worker: str) -> None:
        """Wait for a worker no longer."""
        self.steps.pop(worker, None)

    def arrive(self, worker: str) -> None:
        """Note that a worker has ended a step."""
        self.join(worker)
        self.steps[worker] += 1

    def may_go_on(self, worker: str) -> bool:
        """Whether the step at whose end a worker has arrived is complete."""
        if self.staleness is None or worker not in self.steps:
            return True
        return self.steps[worker] - min(self.steps.values()) <= self.staleness


def rate_factor(staleness: int, modulate: bool) -> float:
    """Return the factor on the learning rate for a gradient of values that are so many updates old."""
    return 1.0 / max(1, staleness) if modulate else 1.0


def mean_weights(samples: Iterable[float]) -> list[float]:
    """Return the weight of each gradient in the mean over all samples."""
    given = list(samples)
    total = sum(given)
    return [one / total for one in given]
