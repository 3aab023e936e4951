"""What may stand for cells of other tiles."""

from __future__ import annotations

from typing import Literal, TypeAlias

from ..errors import ConfigError
from ..registry import suggest

Fill: TypeAlias = Literal["zeros", "reflect", "replicate"]
FILLS = ("zeros", "reflect", "replicate")


def check_fill(field: str, value: str, others: tuple[str, ...] = ()) -> str:
    """Return the value; ConfigError if it is none."""
    if value not in (*FILLS, *others):
        raise ConfigError(f"{field} {value!r} is unknown{suggest(str(value), (*FILLS, *others))}")
    return value
