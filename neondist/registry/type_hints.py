"""Members, ranges and classes of type hints, and descriptions of hints for messages."""

from __future__ import annotations

import collections.abc
import functools
import types
import typing
from collections.abc import Callable
from pathlib import PurePath
from typing import Any, TypeVar

from .names import HasArguments, classes_by_name, subclasses
from .ranges import Range

_PLAIN_TYPE_NAMES: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "text",
    type(None): "null",
    list: "a list",
    tuple: "a list",
    dict: "a mapping",
}


Result = TypeVar("Result")


def cache_by_hint(function: Callable[[Any], Result]) -> Callable[[Any], Result]:
    """Cache a function of a type hint, which is called for every argument of every layer and window."""
    cached_function = functools.lru_cache(maxsize=1024)(function)

    @functools.wraps(function)
    def look_up(hint: Any) -> Result:
        try:
            return cached_function(hint)
        except TypeError:  # unhashable metadata of Annotated
            return function(hint)

    return look_up


@cache_by_hint
def union_members(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union; for any other hint, the hint itself."""
    hint = unwrap_hint(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return tuple(member for part in typing.get_args(hint) for member in union_members(part))
    return (hint,)


def unwrap_hint(hint: Any) -> Any:
    """Return a hint without enclosing Annotated and NewType."""
    while True:
        if typing.get_origin(hint) is typing.Annotated:
            hint = typing.get_args(hint)[0]
        elif hasattr(hint, "__supertype__"):
            hint = hint.__supertype__
        else:
            return type(None) if hint is None else hint


@cache_by_hint
def ranges_in_hint(hint: Any) -> tuple[Range, ...]:
    """Return the ranges of numbers in a hint."""
    if typing.get_origin(hint) is typing.Annotated:
        base, *metadata = typing.get_args(hint)
        return (*(item for item in metadata if isinstance(item, Range)), *ranges_in_hint(base))
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return tuple(limit for part in typing.get_args(hint) for limit in ranges_in_hint(part))
    return ()


def registered_classes_in_hint(hint: Any) -> list[type]:
    """Return the registered classes in a hint."""
    return [member for member in union_members(hint) if is_class(member) and issubclass(member, HasArguments)]


def is_class(hint: Any) -> bool:
    """Return whether a hint is a class; in Python 3.10, `list[int]` is an instance of type too."""
    return isinstance(hint, type) and typing.get_origin(hint) is None


def describe_hint(hint: Any, tag_prefix: str = "!") -> str:
    """Return a description, such as 'an integer, text or null'; `tag_prefix` is the prefix of class names."""
    ranges_text = "".join(f" {limit}" for limit in ranges_in_hint(hint))
    descriptions = list(
        dict.fromkeys(
            _describe_member(member, tag_prefix) + ranges_text * (member in (int, float))
            for member in union_members(hint)
        )
    )
    return " or ".join(filter(None, (", ".join(descriptions[:-1]), descriptions[-1])))


def _describe_member(hint: Any, tag_prefix: str) -> str:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return " or ".join(repr(arg) for arg in args)
    if origin is tuple and args and args[-1] is not Ellipsis:
        return f"a list [{', '.join(describe_hint(arg, tag_prefix) for arg in args)}]"
    if isinstance(origin, type) and issubclass(origin, collections.abc.Mapping):
        return "a mapping"
    if isinstance(origin, type) and issubclass(origin, collections.abc.Iterable):
        return f"a list (each {describe_hint(args[0], tag_prefix)})" if args and args[0] is not Any else "a list"
    if is_class(hint) and issubclass(hint, HasArguments):
        return f"an object ({example_class_names(hint, tag_prefix)})"
    if is_class(hint) and issubclass(hint, PurePath):
        return "text"
    if (origin or hint) is collections.abc.Callable:
        return "a function (MODULE:NAME)"
    return _PLAIN_TYPE_NAMES.get(hint, getattr(hint, "__name__", str(hint)))


def example_class_names(base: type, tag_prefix: str = "!", max_names: int = 6) -> str:
    """Return text such as '!Adam, !SGD, ...': names, valid in files, of `base` and its subclasses."""
    class_by_name = classes_by_name([base, *subclasses(base)])
    names = [tag_prefix + name for name, cls in sorted(class_by_name.items()) if name == cls.__name__]
    return ", ".join(names[:max_names] + ["..."] * (len(names) > max_names)) or base.__name__
