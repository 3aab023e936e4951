"""What Python code gives to a constructor, checked against the same type hints as a YAML file's fields."""

from __future__ import annotations

import collections.abc
import difflib
import functools
import inspect
import numbers
import os
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from ..errors import ConfigError
from .fields import fields, hints_of
from .names import below, named, suggest
from .words import bases, looked_up_once, members, ranges, words

_NUMBERS: dict[Any, type] = {int: numbers.Integral, float: numbers.Real}


Function = TypeVar("Function", bound=Callable[..., Any])


def check_arguments(cls: type, given: Mapping[str, Any]) -> None:
    """Raise ConfigError if an argument is of another type than the constructor's hints say.

    Numbers and sequences of NumPy are numbers and lists; a hint that says something else than a file could is not
    looked at.
    """
    _check(cls.__name__, {name: field.hint for name, field in fields(cls).items()}, given)


def checked(function: Function) -> Function:
    """Let a function check by its type hints what it is given; what only behaves like it should will do."""

    who = function.__qualname__.removesuffix(".__init__").rpartition("<locals>.")[2]
    parameters = inspect.signature(function).parameters.values()
    names = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    hints = functools.cache(lambda: hints_of(function))  # later: a hint may name what comes after it

    @functools.wraps(function)
    def checking(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}  # what is too much, the call itself tells
        _check(who, hints(), {name: value for name, value in given.items() if _is_plain(value)})
        return function(*args, **kwargs)

    return cast(Function, checking)


def _check(who: str, hints: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if name in hints and not fits(value, hints[name]):
            path, item, hint = _deepest(name, value, hints[name])
            raise ConfigError(f"{who}: {path}: {expected(item, hint)}")


def fits(value: Any, hint: Any) -> bool:
    """Tell whether a value is what a type hint asks for."""
    return any(_fits(value, member) for member in members(hint)) and within(value, hint)


def within(value: Any, hint: Any) -> bool:
    """Tell whether a number is in the range that a type hint gives."""
    return all(limit.allows(value) for limit in ranges(hint))


@looked_up_once
def _parts(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    return typing.get_origin(hint), typing.get_args(hint)


def _fits(value: Any, hint: Any) -> bool:
    origin, args = _parts(hint)
    kind = origin or hint
    if hint is Any or hint is object or not isinstance(kind, type):
        return origin is not typing.Literal or any(value == arg and type(value) is type(arg) for arg in args)
    if kind is bool:
        return _is_bool(value)
    if kind in _NUMBERS:
        return isinstance(value, _NUMBERS[kind]) and not _is_bool(value)
    if issubclass(kind, os.PathLike):
        return isinstance(value, str | os.PathLike)
    if kind is collections.abc.Callable:
        return callable(value)
    if issubclass(kind, Mapping):
        return isinstance(value, Mapping) and all(fits(item, args[-1]) for item in value.values() if args)
    if kind is collections.abc.Iterable and not hasattr(value, "__len__"):
        return isinstance(value, collections.abc.Iterable)  # what is made while it is used
    if _of_lists(hint):
        return _is_list(value) and all(fits(item, args[0]) for item in value if args)
    try:
        return isinstance(value, kind)
    except TypeError:  # a protocol: the class itself has to judge
        return True


def _deepest(path: str, value: Any, hint: Any) -> tuple[str, Any, Any]:
    """Return the place of what does not fit, which may be an item of a list or mapping, with the item and its hint."""
    mapping = isinstance(value, Mapping)
    inside = [
        member
        for member in members(hint)
        if typing.get_args(member) and (_of_mappings if mapping else _of_lists)(member)
    ]
    if (mapping or _is_list(value)) and len(inside) == 1:
        item_hint = typing.get_args(inside[0])[-1]
        for index, item in value.items() if mapping else enumerate(value):
            if not fits(item, item_hint):
                return _deepest(f"{path}.{index}", item, item_hint)
    return path, value, hint


def _of_mappings(hint: Any) -> bool:
    kind = typing.get_origin(hint) or hint
    return isinstance(kind, type) and issubclass(kind, Mapping)


@looked_up_once
def _of_lists(hint: Any) -> bool:
    """Tell whether a type hint asks for a list whose items are alike."""
    kind = typing.get_origin(hint) or hint
    listed = isinstance(kind, type) and kind.__module__ in ("builtins", "collections.abc")
    return listed and issubclass(kind, collections.abc.Iterable) and not issubclass(kind, str | tuple | Mapping)


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool) or type(value).__name__ in ("bool_", "bool")


def _is_list(value: Any) -> bool:
    """Tell whether it is a list of some kind, of NumPy too; text, and what is used up by looking at it, is none."""
    return hasattr(value, "__len__") and hasattr(value, "__getitem__") and not isinstance(value, str | bytes | Mapping)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, str | type | numbers.Number | Mapping) or _is_list(value)


def expected(value: Any, hint: Any) -> str:
    """Return 'expected an integer, got the text 'x'' with a remedy, as for a field of a YAML file."""
    return f"expected {words(hint, tag='')}, got {_told(value)}{_remedy(value, hint)}"


def _told(value: Any) -> str:
    if isinstance(value, str):
        return f"the text '{value if len(value) < 60 else value[:57] + '...'}'"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if value is None or isinstance(value, bool | numbers.Number):
        return str(value)
    if _is_list(value):
        return "a list"
    return "a mapping" if isinstance(value, Mapping) else f"a {type(value).__name__}"


def _remedy(value: Any, hint: Any) -> str:
    choices = members(hint)
    wanted = bases(hint)
    if isinstance(value, type) and issubclass(value, tuple(wanted)):
        return f"; write {value.__name__}()"
    if wanted and isinstance(value, str):
        by_word = {name.lower(): name for base in wanted for name in named([base, *below(base)])}
        close = difflib.get_close_matches(value.lower(), by_word, n=1, cutoff=0.5)
        return f"; write {by_word[close[0]]}()" if close else ""
    literals = [arg for kind in choices if typing.get_origin(kind) is typing.Literal for arg in typing.get_args(kind)]
    if isinstance(value, str) and literals:
        near = suggest(value, map(str, literals))
        return near if near.startswith("; did") else ""
    if isinstance(value, str) and {int, float} & set(choices):
        try:
            float(value)
        except ValueError:
            return ""
        return "; remove the quotes"
    if isinstance(value, float) and int in choices and float(value).is_integer():
        return f"; write {int(value)}"
    return ""
