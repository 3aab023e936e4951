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


class BlockPool:
    """Pool of memory blocks, one for each workspace in use at the same time, shared by sections.

    Parameters
    ----------
    samples : int
        Samples of this rank. A pass with fewer samples uses part of a block; a pass with more uses a larger block.
    max_held_bytes : int, optional
        Bytes of this process beyond which it returns freed memory to the system.
    planned_bytes : callable, optional
        Returns the bytes of a pass, for out-of-memory messages; default: the bytes of a block.

    Attributes
    ----------
    elements_per_sample : int
        Elements per sample of the largest section.
    """

    def __init__(
        self,
        samples: int,
        dtype: np.dtype,
        backend: Backend,
        max_held_bytes: int | None = None,
        planned_bytes: Callable[[], int] | None = None,
    ) -> None:
        self.samples, self.dtype, self.backend, self.max_held_bytes = samples, dtype, backend, max_held_bytes
        self.elements_per_sample = self.block_count = 0
        self.planned_bytes = planned_bytes or (lambda: samples * self.elements_per_sample * dtype.itemsize)
        self.free_blocks: list[int] = []
        self._blocks: dict[tuple[int, int], Any] = {}

    def reserve(self, elements_per_sample: int) -> None:
        """Reserve the elements per sample of a section; called before the first pass."""
        self.elements_per_sample = max(self.elements_per_sample, elements_per_sample)

    def acquire_block(self) -> int:
        """Return the lowest number of an unused block, so that most passes use the same memory."""
        if self.max_held_bytes is not None:
            self.backend.kernels.release_cached_memory(self.max_held_bytes)
        if self.free_blocks:
            self.free_blocks.sort(reverse=True)
            return self.free_blocks.pop()
        self.block_count += 1
        return self.block_count - 1

    def release(self, block_number: int) -> None:
        """Mark a block as unused."""
        self.free_blocks.append(block_number)

    def block(self, block_number: int, samples: int, elements_per_sample: int) -> Any:
        """Return a block for this number of samples, of at least `elements_per_sample` elements each."""
        samples = max(samples, self.samples)
        if (block_number, samples) not in self._blocks:
            size = samples * max(elements_per_sample, self.elements_per_sample)
            self._blocks[block_number, samples] = self.backend.xp.empty((size,), self.dtype)
        return self._blocks[block_number, samples]

    def owns(self, array: Any) -> bool:
        """Return whether an array is in a block, in which case its values last only for its live range."""
        return any(self.backend.xp.may_share_memory(array, block) for block in self._blocks.values())


class Arena:
    """Memory of the activations of a pass and their gradients."""

    def __init__(self, plan: MemoryPlan, blocks: BlockPool, block_number: int) -> None:
        self.plan, (self.live_ranges, self.offsets, self.num_elements) = plan, plan.packed
        self.blocks, self.block_number, self.dtype, self.backend = blocks, block_number, blocks.dtype, blocks.backend

    def array(self, slot: int, shape: Sequence[int]) -> Any:
        """Return an uninitialised array (n, ...) in the memory of a slot."""
        start = self.offsets[slot] * shape[0]
        return self._block(shape[0])[start : start + prod(shape)].reshape(shape)

    def _block(self, samples: int) -> Any:
        return self.blocks.block(self.block_number, samples, self.num_elements)

    @contextmanager
    def preserve_saved_arrays(self, samples: int) -> Iterator[None]:
        """On exit, restore the arrays of the forward pass that a backward pass inside the block has overwritten.

        A backward pass overwrites arrays that it no longer needs, because they share memory with later arrays.
        """
        block = self._block(samples)
        slices = [slice(start * samples, stop * samples) for start, stop in self._overwritten_ranges]
        copies = [block[place].copy() for place in slices]
        try:
            yield
        finally:
            for place, copy in zip(slices, copies, strict=True):
                self.backend.kernels.copy(copy, block[place])

    @cached_property
    def _overwritten_ranges(self) -> list[tuple[int, int]]:
        """Ranges, for one sample, that a backward pass reads and then overwrites."""
        backward_start = self.plan.backward_start
        bounds_and_ranges = [
            (place, place + live.elements_per_sample, live)
            for place, live in zip(self.offsets, self.live_ranges, strict=True)
        ]
        backward = [(start, stop) for start, stop, live in bounds_and_ranges if live.first_time >= backward_start]
        gradient_bounds = {bounds_and_ranges[at][:2] for at in self.plan.gradient_ranges.values()}
        return [
            (start, stop)
            for start, stop, live in bounds_and_ranges
            if live.first_time < backward_start <= live.last_time
            and ((start, stop) in gradient_bounds or any(start < end and begin < stop for begin, end in backward))
        ]
