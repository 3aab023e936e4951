"""Validation of constructor arguments from Python against the same type hints as a YAML file's fields."""

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

Check = Callable[[Any], bool]
_NUMBERS: dict[Any, type] = {int: numbers.Integral, float: numbers.Real}
_OF_ITSELF = frozenset((int, float, bool, str, type(None)))
"""types of which most arguments are; what is of exactly such a type needs no further look"""

Function = TypeVar("Function", bound=Callable[..., Any])


def check_arguments(cls: type, given: Mapping[str, Any]) -> None:
    """Raise ConfigError if an argument is of another type than the constructor's hints say.

    Numbers and sequences of NumPy are numbers and lists; a hint that says something else than a file could is not
    looked at.
    """
    known = fields(cls)
    for name, value in given.items():
        if name in known and not fits(value, known[name].hint):
            raise _misfit(cls.__name__, name, value, known[name].hint)


def checked(function: Function) -> Function:
    """Let a function check by its type hints what it is given; what only behaves like it should will do."""

    who = function.__qualname__.removesuffix(".__init__").rpartition("<locals>.")[2]
    parameters = inspect.signature(function).parameters.values()
    names = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]

    @functools.cache  # later: a hint may name what comes after it
    def checks() -> dict[str, tuple[Check, Any]]:
        return {name: (check_of(hint), hint) for name, hint in hints_of(function).items()}

    @functools.wraps(function)
    def checking(*args: Any, **kwargs: Any) -> Any:
        known = checks()
        for given in zip(names, args, strict=False), kwargs.items():  # what is too much, the call itself tells
            for name, value in given:
                if name in known and not known[name][0](value) and _is_plain(value):
                    raise _misfit(who, name, value, known[name][1])
        return function(*args, **kwargs)

    return cast(Function, checking)


def _misfit(who: str, name: str, value: Any, hint: Any) -> ConfigError:
    path, item, hint = _deepest(name, value, hint)
    return ConfigError(f"{who}: {path}: {expected(item, hint)}")


def fits(value: Any, hint: Any) -> bool:
    """Return whether a value is what a type hint asks for."""
    return check_of(hint)(value)


def within(value: Any, hint: Any) -> bool:
    """Return whether a number is in the range that a type hint gives."""
    return all(limit.allows(value) for limit in ranges(hint))


@looked_up_once
def check_of(hint: Any) -> Check:
    """Return what tells whether a value is what a type hint asks for: it is worked out once, not for each value."""
    kinds, allowed = members(hint), ranges(hint)
    checks = [_check_of(kind) for kind in kinds]
    plain = frozenset() if allowed else _OF_ITSELF.intersection(kinds)

    def check(value: Any) -> bool:
        if type(value) in plain:
            return True
        return any(one(value) for one in checks) and all(limit.allows(value) for limit in allowed)

    return check


def _check_of(hint: Any) -> Check:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    kind = origin or hint
    if origin is typing.Literal:
        return lambda value: any(value == arg and type(value) is type(arg) for arg in args)
    if hint is Any or hint is object or not isinstance(kind, type):
        return lambda value: True
    if kind is bool:
        return _is_bool
    if kind in _NUMBERS:
        number = _NUMBERS[kind]
        return lambda value: isinstance(value, number) and not _is_bool(value)
    if issubclass(kind, os.PathLike):
        return lambda value: isinstance(value, str | os.PathLike)
    if kind is collections.abc.Callable:
        return callable
    item = check_of(args[-1]) if args and (issubclass(kind, Mapping) or _of_lists(hint)) else None
    if issubclass(kind, Mapping):
        return lambda value: isinstance(value, Mapping) and (item is None or all(map(item, value.values())))
    if _of_lists(hint):
        endless = kind is collections.abc.Iterable  # also what is made while it is used

        def check_list(value: Any) -> bool:
            if endless and not hasattr(value, "__len__"):
                return isinstance(value, collections.abc.Iterable)
            return _is_list(value) and (item is None or all(map(item, value)))

        return check_list

    def check_instance(value: Any) -> bool:
        try:
            return isinstance(value, kind)
        except TypeError:  # a protocol: the class itself has to judge
            return True

    return check_instance


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
    """Return whether a type hint asks for a list whose items are alike."""
    kind = typing.get_origin(hint) or hint
    listed = isinstance(kind, type) and kind.__module__ in ("builtins", "collections.abc")
    return listed and issubclass(kind, collections.abc.Iterable) and not issubclass(kind, str | tuple | Mapping)


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool) or type(value).__name__ in ("bool_", "bool")


def _is_list(value: Any) -> bool:
    """Return whether it is a list of some kind, of NumPy too; text, and what is used up by looking at it, is none."""
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
