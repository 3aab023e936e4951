"""Ranges of numbers in type hints, `Annotated[int, at_least(1)]`, checked for files and Python calls."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias


@dataclass(frozen=True)
class Range:
    """Finite numbers of at least (or above) `low`, and below (or at most) `high`."""

    low: float = -math.inf
    high: float = math.inf
    exclude_low: bool = False
    exclude_high: bool = True

    def allows(self, value: Any) -> bool:
        """Return whether a number is in the range; True for other values, which other members of a union may accept."""
        if not isinstance(value, numbers.Real) or isinstance(value, bool):
            return True
        number: Any = value
        is_above_low = self.low < number if self.exclude_low or self.low == -math.inf else self.low <= number
        return bool(is_above_low and (number < self.high if self.exclude_high else number <= self.high))

    def __str__(self) -> str:
        if not (self.exclude_low or self.exclude_high):
            return f"from {self.low:.15g} to {self.high:.15g}"
        low = f"{'above' if self.exclude_low else 'of at least'} {self.low:.15g}" if self.low > -math.inf else ""
        high = f"below {self.high:.15g}" if self.high < math.inf else ""
        return " and ".join(filter(None, (low, high))) or "that is finite"


def at_least(low: float, below: float = math.inf) -> Range:
    """Return the range [low, below)."""
    return Range(low, below)


def above(low: float, below: float = math.inf) -> Range:
    """Return the range (low, below)."""
    return Range(low, below, exclude_low=True)


def between(low: float, high: float) -> Range:
    """Return the range [low, high]."""
    return Range(low, high, exclude_high=False)


Finite: TypeAlias = Annotated[float, Range()]
Count: TypeAlias = Annotated[int, at_least(1)]
Index: TypeAlias = Annotated[int, at_least(0)]
Positive: TypeAlias = Annotated[float, above(0)]
NotNegative: TypeAlias = Annotated[float, at_least(0)]
UnitInterval: TypeAlias = Annotated[float, at_least(0, below=1)]
