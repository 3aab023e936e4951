"""Where parameters lie in a flat array, and their norms over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ..namespace import namespace

BLOCK = 1 << 15  # cells per block: parameters, gradients, slots and scratch of one block stay in the cache


@dataclass(frozen=True)
class FlatLayout:
    """The parameters in a flat array that an optimiser changes.

    Attributes
    ----------
    spans : tuple of (start, stop)
        Of each parameter, in their order.
    decays : tuple of bool
        Which of them are neither biases nor of norms.
    whole : int
        Number of parameters, from the first, that every rank holds whole; of the others this rank has a part.
    total : callable, optional
        Sums over the ranks that have the other parts, and returns it; collective. None: there are no others.
    """

    spans: tuple[tuple[int, int], ...]
    decays: tuple[bool, ...]
    whole: int
    total: Callable[[Any], Any] | None = None

    @classmethod
    def of_one(cls, size: int) -> FlatLayout:
        """Return that of one parameter of so many numbers, on one rank."""
        return cls(((0, size),), (True,), 1)

    def blocks(self, alike: bool) -> Iterator[tuple[slice, bool]]:
        """Yield where the parameters are, a block at a time, and whether weight decay applies; `alike`: to all."""
        runs: list[list[Any]] = []
        for (start, stop), decays in zip(self.spans, self.decays, strict=True):
            if runs and runs[-1][1:] == [start, alike or decays]:
                runs[-1][1] = stop
            else:
                runs.append([start, stop, alike or decays])
        for start, stop, decays in runs:
            for at in range(start, stop, BLOCK):
                yield slice(at, min(at + BLOCK, stop)), decays

    def square_norms(self, array: Any) -> Any:
        """Return the sum of the squares of each parameter, over all its parts, in float64; collective."""
        xp = namespace(array)
        sums = xp.stack([_squares(array[start:stop]) for start, stop in self.spans]) if self.spans else xp.zeros(0)
        if self.whole < len(self.spans) and self.total is not None:
            sums[self.whole :] = self.total(sums[self.whole :].copy())
        return sums


def _squares(array: Any) -> Any:
    xp = namespace(array)
    found = xp.zeros((), "f8")
    for at in range(0, array.size, BLOCK):
        block = array[at : at + BLOCK]
        found = found + (block * block).sum(dtype="f8")
    return found
