"""Settings of optimisers, schedulers and the like as JSON: numbers and texts in lists and mappings, nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from ...errors import ConfigError

PAIRS = "pairs"
"""The key under which a mapping is kept whose keys are not strings."""


def to_plain(name: str, value: Any) -> Any:
    """Return a value as JSON can hold it.

    Raises
    ------
    ConfigError
        It, or something in it, is not a number, text, list or mapping; `name` says of what.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [to_plain(f"{name}[{at}]", each) for at, each in enumerate(value)]
    if isinstance(value, Mapping):
        pairs = [[to_plain(name, key), to_plain(f"{name}[{key!r}]", each)] for key, each in value.items()]
        texts = all(isinstance(key, str) for key in value) and PAIRS not in value
        return dict(pairs) if texts else {PAIRS: pairs}
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return value.item()
    raise ConfigError(
        f"{name}: is a {type(value).__name__}, and checkpoints hold numbers, texts, lists and mappings; leave it out of"
        " model"
    )


def from_plain(present: Any, plain: Any) -> Any:
    """Return the value of which `to_plain` made `plain`, with tuples and mappings of the kind that `present` has."""
    if isinstance(plain, dict):
        pairs = plain.get(PAIRS)
        found = dict(pairs) if set(plain) == {PAIRS} and isinstance(pairs, list) else plain
        known = present if isinstance(present, Mapping) else {}
        values = {key: from_plain(known.get(key), each) for key, each in found.items()}
        return Counter(values) if isinstance(present, Counter) else values
    if isinstance(plain, list):
        alike = isinstance(present, (list, tuple)) and len(present) == len(plain)
        made = [from_plain(present[at] if alike else None, each) for at, each in enumerate(plain)]
        return tuple(made) if isinstance(present, tuple) else made
    return plain
