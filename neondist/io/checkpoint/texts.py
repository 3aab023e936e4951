"""JSON in checkpoints, which may have been crafted by hand."""

from __future__ import annotations

import json
from typing import Any, TypeVar

LARGEST = 1 << 53  # whole numbers up to here are the same in every program

T = TypeVar("T")


def plain_json(text: str, kind: type[T]) -> T:
    """Return the value of a text; ValueError if it is no JSON, nested too deep, or not of this kind."""
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return of_kind("it", found, kind)


def of_kind(name: str, value: Any, kind: type[T]) -> T:
    """Return a value that has to be a dict, a list or a str; ValueError if it is not."""
    if type(value) is not kind:
        raise ValueError(f"{name} is not of type {kind.__name__}")
    return value


def whole(name: str, value: Any, least: int = 0) -> int:
    """Return a value that has to be a whole number from `least`; ValueError if it is none."""
    if type(value) is not int or not least <= value < LARGEST:
        raise ValueError(f"{name} is not an integer of at least {least}")
    return value
