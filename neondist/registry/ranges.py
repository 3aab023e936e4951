"""Numbers that a user gives: checked once, with a message that names field, value and remedy."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

from ..errors import ConfigError


def real(field: str, value: Any, low: float, below: float = math.inf, open_low: bool = False) -> float:
    """Return `value` as a float in [low, below), or in (low, below) if `open_low`; otherwise raise ConfigError."""
    fits: bool = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if fits:
        fits = (low < value if open_low else low <= value) and value < below
    if fits:
        return float(value)
    limits = f"{'above' if open_low else 'of at least'} {low:g}" + (f" and below {below:g}" if below < math.inf else "")
    hint = f" (YAML reads '{value}' as text; write it with a dot, like 1.0e-3)" if _looks_real(value) else ""
    raise ConfigError(f"{field}: {value!r} cannot be used; give a number {limits}{hint}")


def integer(field: str, value: Any, low: int) -> int:
    """Return `value` as an int of at least `low`; otherwise raise ConfigError."""
    if isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= low:
        return int(value)
    raise ConfigError(f"{field}: {value!r} cannot be used; give a whole number of at least {low}")


def shape_of(field: str, value: Any) -> tuple[int, ...]:
    """Return `value` as a tuple of extents, each a whole number of at least 1; otherwise raise ConfigError."""
    extents = tuple(value) if hasattr(value, "__len__") and not isinstance(value, str) else ()
    if extents and all(isinstance(n, numbers.Integral) and not isinstance(n, bool) and int(n) > 0 for n in extents):
        return tuple(map(int, extents))
    raise ConfigError(f"{field}: {value!r} cannot be used; give whole numbers of at least 1, such as (28, 28, 1)")


def flag(field: str, value: Any) -> bool:
    """Return `value` if it is true or false; otherwise raise ConfigError."""
    if isinstance(value, bool) or type(value).__name__ in ("bool", "bool_"):  # NumPy's
        return bool(value)
    raise ConfigError(f"{field}: {value!r} cannot be used; give true or false")


def choice(field: str, value: Any, choices: Sequence[str]) -> str:
    """Return `value` if it is one of the choices; otherwise raise ConfigError."""
    if isinstance(value, str) and value in choices:
        return value
    raise ConfigError(f"{field}: {value!r} cannot be used; choose from {', '.join(choices)}")


def _looks_real(value: Any) -> bool:
    if not isinstance(value, str):
        return False
    try:
        float(value)
    except ValueError:
        return False
    return True
