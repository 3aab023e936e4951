"""Memory for arrays whose live ranges are known: one block, in which arrays that never live together overlap."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from ..backends import Backend
from ..plan.memory import MemoryPlan


class Blocks:
    """One block of memory for each workspace that is in use at the same time, whatever section uses it.

    Parameters
    ----------
    samples : int
        Of this rank. Fewer use a part of the same block, more get another one.
    most : int, optional
        Bytes beyond which this process gives back what it has freed.
    planned : callable, optional
        Returns the bytes that a pass takes, for the message where there is no memory; default: those of a block.

    Attributes
    ----------
    length : int
        Numbers of a sample that any section needs.
    made : int
        How many there are.
    free : list of int
        The numbers of the unused ones.
    """

    def __init__(
        self,
        samples: int,
        dtype: np.dtype,
        backend: Backend,
        most: int | None = None,
        planned: Callable[[], int] | None = None,
    ) -> None:
        self.samples, self.dtype, self.backend, self.most = samples, dtype, backend, most
        self.length = self.made = 0
        self.planned = planned or (lambda: samples * self.length * dtype.itemsize)
        self.free: list[int] = []
        self._blocks: dict[tuple[int, int], Any] = {}

    def provide(self, length: int) -> None:
        """Take note, before the first pass, that a section needs so many numbers of a sample."""
        self.length = max(self.length, length)

    def take(self) -> int:
        """Return the lowest unused number: most passes use the same memory."""
        if self.most is not None:
            self.backend.kernels.give_back_freed(self.most)
        if self.free:
            self.free.sort(reverse=True)
            return self.free.pop()
        self.made += 1
        return self.made - 1

    def give_back(self, number: int) -> None:
        """Mark it as unused."""
        self.free.append(number)

    def block(self, number: int, samples: int, length: int) -> Any:
        """Return the block of a number for so many samples, each of `length` numbers at least."""
        samples = max(samples, self.samples)
        if (number, samples) not in self._blocks:
            size = samples * max(length, self.length)
            self._blocks[number, samples] = self.backend.xp.empty((size,), self.dtype)
        return self._blocks[number, samples]

    def owns(self, array: Any) -> bool:
        """Return whether an array lies here: its values last no longer than a live range."""
        return any(self.backend.xp.may_share_memory(array, block) for block in self._blocks.values())


class Arena:
    """The memory of the activations of a pass and their gradients.

    Parameters
    ----------
    plan : MemoryPlan
    blocks : Blocks
    number : int
        Of the block in which it lies.
    """

    def __init__(self, plan: MemoryPlan, blocks: Blocks, number: int) -> None:
        self.plan, (self.ranges, self.places, self.length) = plan, plan.packed
        self.blocks, self.number, self.dtype, self.backend = blocks, number, blocks.dtype, blocks.backend

    def array(self, slot: int, shape: Sequence[int]) -> Any:
        """Return an array (n, ...) in the place of a range; what is in it is left from others."""
        start = self.places[slot] * shape[0]
        return self._block(shape[0])[start : start + prod(shape)].reshape(shape)

    def _block(self, samples: int) -> Any:
        return self.blocks.block(self.number, samples, self.length)

    @contextmanager
    def kept(self, samples: int) -> Iterator[None]:
        """Let what the forward pass left for the backward pass be as before, after one in the block.

        Arrays share memory with others that come later, so that one backward pass destroys what it has used.
        """
        block = self._block(samples)
        ranges = [slice(start * samples, stop * samples) for start, stop in self._used_up]
        copies = [block[place].copy() for place in ranges]
        try:
            yield
        finally:
            for place, copy in zip(ranges, copies, strict=True):
                self.backend.kernels.copy(copy, block[place])

    @cached_property
    def _used_up(self) -> list[tuple[int, int]]:
        """Arena range, for one sample, that a backward pass reads and then overwrites."""
        turn = self.plan.turn
        places = [(place, place + live.numbers, live) for place, live in zip(self.places, self.ranges, strict=True)]
        later = [(start, stop) for start, stop, live in places if live.first >= turn]
        written = {places[at][:2] for at in self.plan.gradients.values()}
        return [
            (start, stop)
            for start, stop, live in places
            if live.first < turn <= live.last
            and ((start, stop) in written or any(start < end and begin < stop for begin, end in later))
        ]


class ArenaSlot:
    """A range of an arena, for the arrays of one owner."""

    def __init__(self, arena: Arena, slot: int) -> None:
        self.arena, self.slot = arena, slot

    def array(self, shape: Sequence[int]) -> Any:
        """Return an array (n, ...) there."""
        return self.arena.array(self.slot, shape)
