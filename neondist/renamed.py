"""Older names of public attributes: they work, with a warning, for one release."""

from __future__ import annotations

import warnings
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
