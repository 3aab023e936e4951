"""Layout of parameters in a flat array, and their norms over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..arrays.namespace import namespace

HOST_BLOCK_ELEMENTS = 1 << 15  # a block's parameters, gradients, slots and scratch stay in the cache
DEVICE_BLOCK_ELEMENTS = 1 << 24  # large, to amortise kernel launches on a device


@dataclass(frozen=True)
class FlatLayout:
    """Layout of parameters in the flat array that an optimiser updates.

    Attributes
    ----------
    spans : tuple of (start, stop)
        Span of each parameter, in order.
    decays : tuple of bool
        Whether weight decay applies without `decay_all`: False for biases and normalisation parameters.
    num_replicated_parameters : int
        Number of leading parameters that every rank holds whole; this rank has a part of each of the others.
    sum_over_parts : callable, optional
        Function that sums values over the ranks with the other parts. Collective. None: no other rank has parts.
    """

    spans: tuple[tuple[int, int], ...]
    decays: tuple[bool, ...]
    num_replicated_parameters: int
    sum_over_parts: Callable[[Any], Any] | None = None

    @classmethod
    def single_parameter(cls, size: int) -> FlatLayout:
        """Return the layout of a single parameter of `size` elements on one rank."""
        return cls(((0, size),), (True,), 1)

    def blocks_with_decay_flags(self, array: Any, decay_all: bool) -> Iterator[tuple[slice, bool]]:
        """Yield blocks of the parameters in an array, and whether weight decay applies.

        Parameters
        ----------
        decay_all : bool
            Whether weight decay applies to all parameters, whatever their `decays`.
        """
        merged_spans: list[list[Any]] = []
        for (start, stop), decays in zip(self.spans, self.decays, strict=True):
            if merged_spans and merged_spans[-1][1:] == [start, decay_all or decays]:
                merged_spans[-1][1] = stop
            else:
                merged_spans.append([start, stop, decay_all or decays])
        for start, stop, decays in merged_spans:
            for block in block_slices(array, start, stop):
                yield block, decays

    def global_square_norms(self, array: Any) -> Any:
        """Return the squared norm of each parameter, summed over all its parts, in float64. Collective."""
        xp = namespace(array)
        local_sums = [_sum_of_squares(array[start:stop]) for start, stop in self.spans]
        sums = xp.stack(local_sums) if local_sums else xp.zeros(0)
        if self.num_replicated_parameters < len(self.spans) and self.sum_over_parts is not None:
            sums[self.num_replicated_parameters :] = self.sum_over_parts(sums[self.num_replicated_parameters :].copy())
        return sums


def _sum_of_squares(array: Any) -> Any:
    xp = namespace(array)
    total = xp.zeros((), "f8")
    for block_slice in block_slices(array, 0, array.size):
        block = array[block_slice]
        total = total + (block * block).sum(dtype="f8")
    return total


def block_slices(array: Any, start: int, stop: int) -> Iterator[slice]:
    """Yield the blocks of an array from start to stop."""
    size = elements_per_block(array)
    for at in range(start, stop, size):
        yield slice(at, min(at + size, stop))


def elements_per_block(array: Any) -> int:
    """Return the number of elements per block of an array."""
    return HOST_BLOCK_ELEMENTS if isinstance(array, np.ndarray) else DEVICE_BLOCK_ELEMENTS
