"""Type hints in words, for messages."""

from __future__ import annotations

import collections.abc
import functools
import types
import typing
from collections.abc import Callable
from pathlib import PurePath
from typing import Any, TypeVar

from .names import Named, below, named
from .ranges import Range

_PLAIN: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "text",
    type(None): "null",
    list: "a list",
    tuple: "a list",
    dict: "a mapping",
}


Found = TypeVar("Found")


def looked_up_once(function: Callable[[Any], Found]) -> Callable[[Any], Found]:
    """Keep what a function finds out of a type hint: every argument of every layer and window is checked by it."""
    known = functools.lru_cache(maxsize=1024)(function)

    @functools.wraps(function)
    def look_up(hint: Any) -> Found:
        try:
            return known(hint)
        except TypeError:  # a note of Annotated without a hash
            return function(hint)

    return look_up


@looked_up_once
def members(hint: Any) -> tuple[Any, ...]:
    """Return the alternatives of a union; any other hint is its own only one."""
    hint = bare(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return tuple(member for part in typing.get_args(hint) for member in members(part))
    return (hint,)


def bare(hint: Any) -> Any:
    """Return a hint without Annotated and NewType around it."""
    while True:
        if typing.get_origin(hint) is typing.Annotated:
            hint = typing.get_args(hint)[0]
        elif hasattr(hint, "__supertype__"):
            hint = hint.__supertype__
        else:
            return type(None) if hint is None else hint


@looked_up_once
def ranges(hint: Any) -> tuple[Range, ...]:
    """Return the ranges of the numbers that a hint asks for."""
    if typing.get_origin(hint) is typing.Annotated:
        inside, *notes = typing.get_args(hint)
        return (*(note for note in notes if isinstance(note, Range)), *ranges(inside))
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return tuple(found for part in typing.get_args(hint) for found in ranges(part))
    return ()


def bases(hint: Any) -> list[type]:
    """Return the classes of objects that a hint asks for."""
    return [member for member in members(hint) if isinstance(member, type) and issubclass(member, Named)]


def words(hint: Any, tag: str = "!") -> str:
    """Return 'an integer, text or null' for `int | str | None`; `tag` stands before the names of classes."""
    ranges_text = "".join(f" {limit}" for limit in ranges(hint))
    parts = list(dict.fromkeys(_one(member, tag) + ranges_text * (member in (int, float)) for member in members(hint)))
    return " or ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))


def _one(hint: Any, tag: str) -> str:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return " or ".join(repr(arg) for arg in args)
    if origin is tuple and args and args[-1] is not Ellipsis:
        return f"a list [{', '.join(words(arg, tag) for arg in args)}]"
    if isinstance(origin, type) and issubclass(origin, collections.abc.Mapping):
        return "a mapping"
    if isinstance(origin, type) and issubclass(origin, collections.abc.Iterable):
        return f"a list (each {words(args[0], tag)})" if args and args[0] is not Any else "a list"
    if isinstance(hint, type) and issubclass(hint, Named):
        return f"an object ({examples(hint, tag)})"
    if isinstance(hint, type) and issubclass(hint, PurePath):
        return "text"
    if (origin or hint) is collections.abc.Callable:
        return "a function (MODULE:NAME)"
    return _PLAIN.get(hint, getattr(hint, "__name__", str(hint)))


def examples(base: type, tag: str = "!", most: int = 6) -> str:
    """Return '!Adam, !SGD, ...': the classes below `base` (itself too) that a file can name."""
    known = [name for name, cls in sorted(named([base, *below(base)]).items()) if name == cls.__name__]
    names = [tag + name for name in known]
    return ", ".join(names[:most] + ["..."] * (len(names) > most)) or base.__name__
