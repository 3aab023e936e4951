"""Memory for arrays whose live ranges are known: one block, in which arrays that never live together overlap."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from ..backends import Backend
from ..plan.memory import MemoryPlan, aligned, pack


class Arena:
    """The memory of the activations of a pass and their gradients.

    Parameters
    ----------
    plan : MemoryPlan
    samples : int
        Of this rank. Fewer use a part of the same block, more get another one.
    """

    def __init__(self, plan: MemoryPlan, samples: int, dtype: np.dtype, backend: Backend) -> None:
        self.plan, self.ranges = plan, [aligned(live) for live in plan.ranges]
        self.places, self.length = pack(self.ranges)
        self.samples, self.dtype, self.backend = samples, dtype, backend
        self._blocks: dict[int, Any] = {}

    def array(self, slot: int, shape: Sequence[int]) -> Any:
        """Return an array (n, ...) in the place of a range; what is in it is left from others."""
        start = self.places[slot] * shape[0]
        return self._block(shape[0])[start : start + prod(shape)].reshape(shape)

    def _block(self, samples: int) -> Any:
        samples = max(samples, self.samples)
        if samples not in self._blocks:
            self._blocks[samples] = self.backend.xp.empty((samples * self.length,), self.dtype)
        return self._blocks[samples]

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
        """Where lies, for one sample, what a backward pass reads and then overwrites."""
        turn = self.plan.turn
        places = [(place, place + live.numbers, live) for place, live in zip(self.places, self.ranges, strict=True)]
        later = [(start, stop) for start, stop, live in places if live.first >= turn]
        return [
            (start, stop)
            for start, stop, live in places
            if live.first < turn <= live.last and any(start < end and begin < stop for begin, end in later)
        ]

    def owns(self, array: Any) -> bool:
        """Tell whether an array lies in the arena: its values last no longer than a range."""
        return any(self.backend.xp.may_share_memory(array, block) for block in self._blocks.values())


class ArenaSlot:
    """A range of an arena, for the arrays of one owner."""

    def __init__(self, arena: Arena, slot: int) -> None:
        self.arena, self.slot = arena, slot

    def array(self, shape: Sequence[int]) -> Any:
        """Return an array (n, ...) there."""
        return self.arena.array(self.slot, shape)
