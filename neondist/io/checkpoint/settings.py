"""Conversion of settings of optimisers and schedulers to JSON: numbers and strings in lists and mappings only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from ...errors import ConfigError

PAIRS_KEY = "pairs"  # key for the items of a mapping whose keys are not strings


def to_json_value(name: str, value: Any, remedy: str) -> Any:
    """Convert a value to types that JSON supports.

    Raises
    ------
    ConfigError
        If the value `name`, or a part of it, is not a number, string, list or mapping.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [to_json_value(f"{name}[{at}]", item, remedy) for at, item in enumerate(value)]
    if isinstance(value, Mapping):
        pairs = [
            [to_json_value(name, k, remedy), to_json_value(f"{name}[{k!r}]", item, remedy)] for k, item in value.items()
        ]
        has_json_keys = all(isinstance(key, str) for key in value) and PAIRS_KEY not in value
        return dict(pairs) if has_json_keys else {PAIRS_KEY: pairs}
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return value.item()
    raise ConfigError(
        f"{name}: is a {type(value).__name__}, but checkpoints hold only numbers, strings, lists and mappings; {remedy}"
    )


def from_json_value(current_value: Any, plain_value: Any) -> Any:
    """Invert `to_json_value`; lists and mappings get the types that they have in `current_value`."""
    if isinstance(plain_value, dict):
        pairs = plain_value.get(PAIRS_KEY)
        items = dict(pairs) if set(plain_value) == {PAIRS_KEY} and isinstance(pairs, list) else plain_value
        current_items = current_value if isinstance(current_value, Mapping) else {}
        values = {key: from_json_value(current_items.get(key), item) for key, item in items.items()}
        return Counter(values) if isinstance(current_value, Counter) else values
    if isinstance(plain_value, list):
        has_same_length = isinstance(current_value, (list, tuple)) and len(current_value) == len(plain_value)
        restored = [
            from_json_value(current_value[at] if has_same_length else None, item) for at, item in enumerate(plain_value)
        ]
        return tuple(restored) if isinstance(current_value, tuple) else restored
    return plain_value
