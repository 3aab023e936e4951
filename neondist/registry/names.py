"""Classes by their names in files, and suggestions for unknown names."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Iterator
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class HasArguments(Protocol):
    """An object that can be written to a file because it stores its constructor's arguments."""

    def arguments(self) -> dict[str, Any]:
        """Return the arguments by name."""


def classes_by_name(classes: Iterable[type]) -> dict[str, type]:
    """Return the concrete public classes among `classes` by name, and by the aliases in `_aliases`."""
    class_by_name: dict[str, type] = {}
    for cls in classes:
        if not (cls.__name__.startswith("_") or inspect.isabstract(cls)):
            class_by_name |= dict.fromkeys((cls.__name__, *vars(cls).get("_aliases", ())), cls)
    return class_by_name


def subclasses(cls: type) -> Iterator[type]:
    """Yield all direct and indirect subclasses."""
    subclass: type
    for subclass in cls.__subclasses__():
        yield subclass
        yield from subclasses(subclass)


def classes_by_short_name(base: type) -> dict[str, type]:
    """Return the subclasses of `base` by their short names, valid in fields that accept only these classes."""
    return {name: cls for cls in subclasses(base) for name in vars(cls).get("_short_names", ())}


def suggest(name: str, choices: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" or, without a close match, the list of choices."""
    choices = sorted(choices)
    return suggest_nearest(name, choices) or (f"; choose from {', '.join(choices)}" if choices else "")


def suggest_nearest(name: str, choices: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" or, without a close match, ''."""
    name_by_lower = {choice.lower(): choice for choice in sorted(choices, reverse=True)}
    matches = difflib.get_close_matches(name.lower(), name_by_lower, n=1, cutoff=0.6)
    return f"; did you mean '{name_by_lower[matches[0]]}'?" if matches else ""
