"""Memory for arrays whose lifetimes are known: one block, in which arrays that never live together overlap."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ..backends import Backend

Ints = Sequence[int]
_ALIGNED = 16  # numbers: a cache line of float32


class Span(NamedTuple):
    """So many numbers for each sample, from one moment of a step to another, both included."""

    numbers: int
    first: int
    last: int

    def meets(self, other: Span) -> bool:
        """Tell whether both live at the same moment."""
        return self.first <= other.last and other.first <= self.last


def pack(spans: Sequence[Span]) -> tuple[list[int], int]:
    """Return a place for every span, so that those that meet do not overlap, and the length of all.

    Largest first, each at the lowest free place: what they need is rarely more than the most that lives at one moment.
    """
    places: dict[int, int] = {}
    for at in sorted(range(len(spans)), key=lambda at: -spans[at].numbers):
        start = 0
        met = [other for other in places if spans[at].meets(spans[other])]
        for lo, hi in sorted((places[other], places[other] + spans[other].numbers) for other in met):
            if start + spans[at].numbers <= lo:
                break
            start = max(start, hi)
        places[at] = start
    length = max((place + spans[at].numbers for at, place in places.items()), default=0)
    return [places[at] for at in range(len(spans))], length


class Arena:
    """The memory of a model's activations and their gradients.

    Parameters
    ----------
    spans : sequence of Span
    samples : int
        Of this rank. Fewer use a part of the same block, more get another one.
    turn : int
        The moment at which the backward pass begins.
    """

    def __init__(self, spans: Sequence[Span], samples: int, dtype: np.dtype, backend: Backend, turn: int) -> None:
        rounded = [span._replace(numbers=-(-span.numbers // _ALIGNED) * _ALIGNED) for span in spans]
        self.spans, self.turn = rounded, turn
        self.places, self.length = pack(rounded)
        self.samples, self.dtype, self.backend = samples, dtype, backend
        self._blocks: dict[int, Any] = {}

    def array(self, span: int, shape: Ints) -> Any:
        """Return an array (n, ...) in the place of a span; what is in it is left from others."""
        start = self.places[span] * shape[0]
        return self._block(shape[0])[start : start + prod(shape)].reshape(shape)

    def _block(self, samples: int) -> Any:
        samples = max(samples, self.samples)
        if samples not in self._blocks:
            self._blocks[samples] = self.backend.empty((samples * self.length,), self.dtype)
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
                self.backend.copy(copy, block[place])

    @cached_property
    def _used_up(self) -> list[tuple[int, int]]:
        """Where lies, for one sample, what a backward pass reads and then overwrites."""
        places = [(place, place + span.numbers, span) for place, span in zip(self.places, self.spans, strict=True)]
        later = [(start, stop) for start, stop, span in places if span.first >= self.turn]
        return [
            (start, stop)
            for start, stop, span in places
            if span.first < self.turn <= span.last and any(start < end and begin < stop for begin, end in later)
        ]

    def owns(self, array: Any) -> bool:
        """Tell whether an array lies in the arena: its values last no longer than a span."""
        return any(np.may_share_memory(array, block) for block in self._blocks.values())


class Room:
    """A span of an arena, for the arrays of one owner."""

    def __init__(self, arena: Arena, span: int) -> None:
        self.arena, self.span = arena, span

    def array(self, shape: Ints) -> Any:
        """Return an array (n, ...) there."""
        return self.arena.array(self.span, shape)
