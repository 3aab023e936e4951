"""Validation of JSON in checkpoints, which may have been crafted by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

MAX_EXACT_INTEGER = 1 << 53  # integers up to this limit are exact in float64

T = TypeVar("T")


@contextmanager
def suggest_another_checkpoint() -> Iterator[None]:
    """Append a remedy to the message of a ValueError."""
    try:
        yield
    except ValueError as problem:
        raise ValueError(f"{problem}; specify another checkpoint") from None


def parse_json(text: str, expected_type: type[T]) -> T:
    """Parse JSON; ValueError if it is invalid, nested too deeply, or not of this type."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return require_json_type("it", value, expected_type)


def require_json_type(name: str, value: Any, expected_type: type[T]) -> T:
    """Return a value of the given type (dict, list or str); ValueError for other values."""
    if type(value) is not expected_type:
        raise ValueError(f"{name} is not of type {expected_type.__name__}")
    return value


def require_json_integer(name: str, value: Any, minimum: int = 0) -> int:
    """Return an integer of at least `minimum`; ValueError for other values."""
    if type(value) is not int or not minimum <= value < MAX_EXACT_INTEGER:
        raise ValueError(f"{name} is not an integer of at least {minimum}")
    return value
