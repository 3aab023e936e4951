"""Older names of public attributes: they work, with a warning, for one release."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any


class Renamed:
    """An attribute under the name that it had: `old = Renamed("new")` in the body of a class."""

    def __init__(self, new: str) -> None:
        self.new = new

    def __set_name__(self, owner: type, name: str) -> None:
        self.told = f"{owner.__name__}.{name} is called {owner.__name__}.{self.new} now"

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        warnings.warn(self.told, DeprecationWarning, stacklevel=2)
        return getattr(instance, self.new)


def moved(old: str, new: str, names: Mapping[str, str] = MappingProxyType({})) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package that is in another place now, and whose names are others in part."""

    def get(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = getattr(import_module(new), names.get(name, name))
        warnings.warn(f"{old}.{name} is {new}.{names.get(name, name)} now", DeprecationWarning, stacklevel=2)
        return found

    return get
