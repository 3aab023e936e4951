"""Functions named in files as MODULE:NAME."""

from __future__ import annotations

import collections.abc
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .type_hints import union_members


@dataclass(frozen=True)
class NamedFunction:
    """A function or class of a module imported by the user, stored in files by its name.

    Attributes
    ----------
    name : 'MODULE:NAME'
    call : callable
    """

    name: str
    call: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self.call(*args, **kwargs)

    def __str__(self) -> str:
        return self.name


def accepts_functions(hint: Any) -> bool:
    """Return whether a type hint accepts a function."""
    return any((typing.get_origin(member) or member) is collections.abc.Callable for member in union_members(hint))
