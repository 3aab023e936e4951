"""Arena: one block of memory in which arrays with disjoint lifetimes overlap."""

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
    """Pool of memory blocks, one for each workspace in use at the same time, shared by all sections.

    Parameters
    ----------
    samples : int
        Samples of this rank. Fewer use a part of the same block, more get another block.
    most : int, optional
        Bytes beyond which this process returns freed memory to the system.
    planned : callable, optional
        Returns the bytes of a pass, for out-of-memory messages; default: those of a block.

    Attributes
    ----------
    length : int
        Elements per sample of the largest section.
    count : int
        Number of blocks.
    free : list of int
        Numbers of the unused blocks.
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
        self.length = self.count = 0
        self.planned = planned or (lambda: samples * self.length * dtype.itemsize)
        self.free: list[int] = []
        self._blocks: dict[tuple[int, int], Any] = {}

    def provide(self, length: int) -> None:
        """Reserve, before the first pass, the elements per sample of a section."""
        self.length = max(self.length, length)

    def take(self) -> int:
        """Return the lowest unused block number, so that most passes use the same memory."""
        if self.most is not None:
            self.backend.kernels.give_back_freed(self.most)
        if self.free:
            self.free.sort(reverse=True)
            return self.free.pop()
        self.count += 1
        return self.count - 1

    def give_back(self, number: int) -> None:
        """Mark a block as unused."""
        self.free.append(number)

    def block(self, number: int, samples: int, length: int) -> Any:
        """Return a block for this number of samples, of at least `length` elements each."""
        samples = max(samples, self.samples)
        if (number, samples) not in self._blocks:
            size = samples * max(length, self.length)
            self._blocks[number, samples] = self.backend.xp.empty((size,), self.dtype)
        return self._blocks[number, samples]

    def owns(self, array: Any) -> bool:
        """Return whether an array is in a block, so its values last only for its live range."""
        return any(self.backend.xp.may_share_memory(array, block) for block in self._blocks.values())


class Arena:
    """Memory of the activations of a pass and their gradients.

    Parameters
    ----------
    plan : MemoryPlan
    blocks : Blocks
    number : int
        Number of its block.
    """

    def __init__(self, plan: MemoryPlan, blocks: Blocks, number: int) -> None:
        self.plan, (self.ranges, self.places, self.length) = plan, plan.packed
        self.blocks, self.number, self.dtype, self.backend = blocks, number, blocks.dtype, blocks.backend

    def array(self, slot: int, shape: Sequence[int]) -> Any:
        """Return an uninitialised array (n, ...) in the memory of a range."""
        start = self.places[slot] * shape[0]
        return self._block(shape[0])[start : start + prod(shape)].reshape(shape)

    def _block(self, samples: int) -> Any:
        return self.blocks.block(self.number, samples, self.length)

    @contextmanager
    def preserve(self, samples: int) -> Iterator[None]:
        """Restore the saved arrays of the forward pass after a backward pass inside the block.

        Arrays share memory with later ones, so a backward pass overwrites the arrays that it has used.
        """
        block = self._block(samples)
        ranges = [slice(start * samples, stop * samples) for start, stop in self._overwritten]
        copies = [block[place].copy() for place in ranges]
        try:
            yield
        finally:
            for place, copy in zip(ranges, copies, strict=True):
                self.backend.kernels.copy(copy, block[place])

    @cached_property
    def _overwritten(self) -> list[tuple[int, int]]:
        """Ranges, for one sample, that a backward pass reads and then overwrites."""
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
        """Return an array (n, ...) in this range."""
        return self.arena.array(self.slot, shape)
