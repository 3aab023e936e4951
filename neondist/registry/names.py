"""Classes that files name, and what was meant where a name is unknown."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Iterator
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Named(Protocol):
    """An object that a file can tell of, since it remembers the arguments it was made with."""

    def arguments(self) -> dict[str, Any]:
        """Return them by name."""


def named(classes: Iterable[type]) -> dict[str, type]:
    """Return the concrete public ones of some classes by name, and by the names in their `_also_called`."""
    found: dict[str, type] = {}
    for cls in classes:
        if not (cls.__name__.startswith("_") or inspect.isabstract(cls)):
            found |= dict.fromkeys((cls.__name__, *vars(cls).get("_also_called", ())), cls)
    return found


def below(cls: type) -> Iterator[type]:
    """Yield all subclasses."""
    sub: type
    for sub in cls.__subclasses__():
        yield sub
        yield from below(sub)


def called_in_fields(base: type) -> dict[str, type]:
    """Return the classes below `base` by the short names that mean them where only such a class can stand."""
    return {name: cls for cls in below(base) for name in vars(cls).get("_called_in_fields", ())}


def suggest(name: str, choices: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" or, where nothing is near, the list of choices."""
    choices = sorted(choices)
    near = difflib.get_close_matches(name, choices, n=1, cutoff=0.6)
    if near:
        return f"; did you mean '{near[0]}'?"
    return f"; choose from {', '.join(choices)}" if choices else ""
