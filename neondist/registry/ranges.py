"""Ranges of numbers in type hints of constructors, `Annotated[int, at_least(1)]`, checked for files and Python calls.

The functions below check values without hints of their own, such as arrays.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

from ..errors import ConfigError


@dataclass(frozen=True)
class Range:
    """Finite numbers of at least `low`, or above it, and below `high`, or at most `high`."""

    low: float = -math.inf
    high: float = math.inf
    exclude_low: bool = False
    exclude_high: bool = True

    def allows(self, value: Any) -> bool:
        """Return whether a number is in the range; True for other values, left to other members of a union."""
        if not isinstance(value, numbers.Real) or isinstance(value, bool):
            return True
        number: Any = value
        over = self.low < number if self.exclude_low or self.low == -math.inf else self.low <= number
        return bool(over and (number < self.high if self.exclude_high else number <= self.high))

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


def require_real(field: str, value: Any, low: float, exclude_low: bool = False) -> float:
    """Return `value` as a finite float of at least `low`, or above it if `exclude_low`; otherwise raise ConfigError."""
    limit = Range(low, exclude_low=exclude_low)
    if isinstance(value, numbers.Real) and not isinstance(value, bool) and limit.allows(value):
        return float(value)
    raise ConfigError(f"{field}: {value!r} is invalid; expected a number {limit}")


def require_integer(field: str, value: Any, low: int) -> int:
    """Return `value` as an int of at least `low`; otherwise raise ConfigError."""
    if isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= low:
        return int(value)
    raise ConfigError(f"{field}: {value!r} is invalid; expected a whole number of at least {low}")


def require_shape(field: str, value: Any) -> tuple[int, ...]:
    """Return `value` as a tuple of extents, each a whole number of at least 1; otherwise raise ConfigError."""
    extents = tuple(value) if hasattr(value, "__len__") and not isinstance(value, str) else ()
    if extents and all(isinstance(n, numbers.Integral) and not isinstance(n, bool) and int(n) > 0 for n in extents):
        return tuple(map(int, extents))
    raise ConfigError(f"{field}: {value!r} is invalid; expected whole numbers of at least 1, such as (28, 28, 1)")


def require_choice(field: str, value: Any, choices: Sequence[str]) -> str:
    """Return `value` if it is one of the choices; otherwise raise ConfigError."""
    if isinstance(value, str) and value in choices:
        return value
    raise ConfigError(f"{field}: {value!r} is invalid; choose from {', '.join(choices)}")
