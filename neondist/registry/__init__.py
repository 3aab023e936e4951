"""Names for YAML: every subclass of `Registered` can be a tag, under its class name, and its arguments are checked.

The classes themselves are the table (Python keeps a list of subclasses), so that subclassing is all that a user has to
do, and nothing has to be filled in at import time.
"""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any

from ..errors import ConfigError
from .arguments import check_arguments
from .fields import fields
from .names import below, named, suggest

__all__ = ["Distributed", "Registered", "dist_class", "registered", "serial_class", "suggest"]


_signature = lru_cache(maxsize=1024)(inspect.signature)


class Registered:
    """Base of every class that a YAML file may name; it remembers the arguments it was made with."""

    _arguments: dict[str, Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:  # noqa: D102
        self = super().__new__(cls)
        self._arguments = {}
        if cls.__init__ is object.__init__:  # no arguments; its signature would be parsed from text
            return self
        bound = _signature(cls.__init__).bind_partial(self, *args, **kwargs)
        given = dict(list(bound.arguments.items())[1:])
        check_arguments(cls, given | given.pop("kwargs", {}))
        bound.apply_defaults()
        values = dict(list(bound.arguments.items())[1:])
        if "kwargs" in values:
            more = values.pop("kwargs")
            values = {name: field.default for name, field in fields(cls).items() if not field.required} | values | more
        values.pop("args", None)
        self._arguments = values
        return self

    def arguments(self) -> dict[str, Any]:
        """Return the constructor's arguments by name, defaults included (a new dict)."""
        return dict(self._arguments)


class Distributed:
    """Marker of the mixins that make a serial class distributed: `class FooDist(Dist, Foo)`."""


def registered(base: type = Registered) -> dict[str, type]:
    """Return all concrete public classes below `base` by name, and by the names in their `_also_called`."""
    return named(below(base))


def serial_class(cls: type) -> type:
    """Return the serial twin of a distributed class; a serial class is its own."""
    if not issubclass(cls, Distributed):
        return cls
    return next(base for base in cls.__mro__ if not issubclass(base, Distributed) and base is not cls)


def dist_class(cls: type) -> type:
    """Return the distributed twin of a serial class; ConfigError says how to write one where none exists."""
    if issubclass(cls, Distributed):
        return cls
    for candidate in registered().values():
        if issubclass(candidate, Distributed) and serial_class(candidate) is cls:
            return candidate
    name = cls.__name__
    raise ConfigError(
        f"{name} has no distributed class; write one next to it: class {name}Dist(nd.Dist, {name}): pass"
        " (docs/adding_a_layer.md)"
    )
