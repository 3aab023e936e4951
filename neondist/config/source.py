"""Source positions of objects in a file, for errors that are found later."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ..yaml_nodes.tree import join, message

E = TypeVar("E", bound=Exception)


@dataclass(frozen=True)
class Source:
    """An object's place in the file.

    Attributes
    ----------
    place : 'FILE:LINE' or '--set key=value'
    path : the dotted path of the object
    fields : the place of each field that the class has; the object's own for one that is not given
    """

    place: str
    path: str = ""
    fields: Mapping[str, str] = field(default_factory=dict)

    def message(self, what: str) -> str:
        """Return 'FILE:LINE: path: what', that of the field if `what` begins with the name of one.

        Or 'who it is: ' and then the name, such as "layer 0 'conv1': kernel_size 9 is too large".
        """
        for name in re.findall(r"^(?:[^:]*: )?(\w+)", what) + re.findall(r"^\w+", what):
            if name in self.fields:
                return message(self.fields[name], join(self.path, name), what.removeprefix(f"{name}: "))
        return message(self.place, self.path, what)


def mark(obj: Any, source: Source) -> None:
    """Remember where `obj` was written."""
    with contextlib.suppress(AttributeError):  # a class with __slots__: its errors come without a line
        object.__setattr__(obj, "_source", source)


def locate(obj: Any) -> str:
    """Return 'FILE:LINE: path' of an object built from a file, '' of any other."""
    source = getattr(obj, "_source", None)
    return message(source.place, source.path, "") if isinstance(source, Source) else ""


def place(error: E) -> E:
    """Put the place of the object that an error is about (`error.subject`) before its message; return the error."""
    source = getattr(getattr(error, "subject", None), "_source", None)
    if isinstance(source, Source):
        error.args = (source.message(str(error)),)
        error.subject = None  # type: ignore[attr-defined]
    return error
