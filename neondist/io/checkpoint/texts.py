"""Validation of JSON in checkpoints, which may have been crafted by hand."""

from __future__ import annotations

import json
from typing import Any, TypeVar

LARGEST = 1 << 53  # integers up to here are exact in doubles

T = TypeVar("T")


def parse_json(text: str, kind: type[T]) -> T:
    """Parse JSON; ValueError if it is invalid, nested too deeply, or not of this type."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return require_type("it", value, kind)


def require_type(name: str, value: Any, kind: type[T]) -> T:
    """Return a value of the given type (dict, list or str); ValueError for other values."""
    if type(value) is not kind:
        raise ValueError(f"{name} is not of type {kind.__name__}")
    return value


def require_integer(name: str, value: Any, least: int = 0) -> int:
    """Return an integer of at least `least`; ValueError for other values."""
    if type(value) is not int or not least <= value < LARGEST:
        raise ValueError(f"{name} is not an integer of at least {least}")
    return value
