"""Source positions of objects in a file, for later error messages."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ..yaml_nodes.tree import format_message, join_path

ErrorType = TypeVar("ErrorType", bound=Exception)


@dataclass(frozen=True)
class SourcePosition:
    """An object's place in the file.

    Attributes
    ----------
    place : 'FILE:LINE' or '--set key=value'
    path : the dotted path of the object
    fields : the place of each field of the class; the object's own place for fields that are not set
    """

    place: str
    path: str = ""
    fields: Mapping[str, str] = field(default_factory=dict)

    def message(self, text: str) -> str:
        """Return 'FILE:LINE: path: text', with the field's place and path if `text` begins with a field name.

        The name may follow a subject, as in "layer 0 'conv1': kernel_size 9 is too large".
        """
        for name in re.findall(r"^(?:[^:]*: )?(\w+)", text) + re.findall(r"^\w+", text):
            if name in self.fields:
                return format_message(self.fields[name], join_path(self.path, name), text.removeprefix(f"{name}: "))
        return format_message(self.place, self.path, text)


def set_source(obj: Any, source: SourcePosition) -> None:
    """Store the source position of `obj`."""
    with contextlib.suppress(AttributeError):  # a class with __slots__: its errors have no line
        object.__setattr__(obj, "_source", source)


def describe_yaml_location(obj: Any) -> str:
    """Return 'FILE:LINE: path' of an object built from a file, otherwise ''."""
    source = getattr(obj, "_source", None)
    return format_message(source.place, source.path, "") if isinstance(source, SourcePosition) else ""


def add_location(error: ErrorType) -> ErrorType:
    """Prefix an error's message with the place of its `subject`, an object built from a file; return the error."""
    source = getattr(getattr(error, "subject", None), "_source", None)
    if isinstance(source, SourcePosition):
        error.args = (source.message(str(error)),)
        error.subject = None  # type: ignore[attr-defined]
    return error
