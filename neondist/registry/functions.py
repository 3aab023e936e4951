"""Functions that files name, as MODULE:NAME."""

from __future__ import annotations

import collections.abc
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .words import members


@dataclass(frozen=True)
class Function:
    """A function, or a class, of a module that the user has imported; a file remembers it by its name.

    Attributes
    ----------
    name : 'MODULE:NAME'
    call : callable
    """

    name: str
    call: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        return self.call(*args, **kwargs)

    def __str__(self) -> str:
        return self.name


def takes_functions(hint: Any) -> bool:
    """Return whether a type hint asks for a function."""
    return any((typing.get_origin(one) or one) is collections.abc.Callable for one in members(hint))
