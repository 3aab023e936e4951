"""Validation of constructor arguments in Python calls, by the type hints that also apply to YAML files."""

from __future__ import annotations

import collections.abc
import dataclasses
import difflib
import functools
import inspect
import numbers
import os
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from ..errors import ConfigError
from .fields import constructor_fields, resolve_type_hints
from .names import classes_by_name, subclasses, suggest
from .type_hints import cache_by_hint, describe_hint, ranges_in_hint, registered_classes_in_hint, union_members

Predicate = Callable[[Any], bool]
_NUMBER_TYPES: dict[Any, type] = {int: numbers.Integral, float: numbers.Real}
_TYPES_WITHOUT_FURTHER_CHECK = frozenset((float, bool, str, type(None)))
"""types whose values match a hint of the same type without a further check"""
_INTEGER_RANGE = range(-(2**63), 2**63)

Function = TypeVar("Function", bound=Callable[..., Any])


def check_arguments(cls: type, arguments: Mapping[str, Any]) -> None:
    """Raise ConfigError if the type or range of an argument does not match the constructor's hints.

    NumPy's numbers and sequences count as numbers and lists; hints that are not classes accept any value.
    """
    class_fields = constructor_fields(cls)
    for name, value in arguments.items():
        if name in class_fields and not matches_hint(value, class_fields[name].hint):
            raise _type_error(cls.__name__, name, value, class_fields[name].hint)


def check_fields(value: Any) -> None:
    """Raise ConfigError if a field of a dataclass does not match its hint."""
    fields = dataclasses.fields(value)
    check_arguments(type(value), {field.name: getattr(value, field.name) for field in fields})


def check_value(field: str, value: Any, hint: Any) -> None:
    """Raise ConfigError for `field` if a value does not match a type hint."""
    if not matches_hint(value, hint):
        raise ConfigError(f"{field}: {describe_mismatch(value, hint)}")


def type_checked(function: Function) -> Function:
    """Decorate a function so that arguments are checked against its type hints; duck-typed objects are accepted."""

    function_name = function.__qualname__.removesuffix(".__init__").rpartition("<locals>.")[2]
    parameters = inspect.signature(function).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]

    @functools.cache  # deferred: hints may be forward references
    def get_checks() -> dict[str, tuple[Predicate, Any]]:
        return {name: (predicate_for_hint(hint), hint) for name, hint in resolve_type_hints(function).items()}

    @functools.wraps(function)
    def call_checked(*args: Any, **kwargs: Any) -> Any:
        checks = get_checks()
        for pairs in zip(names, args, strict=False), kwargs.items():  # the call itself reports surplus arguments
            for name, value in pairs:
                if name in checks and not checks[name][0](value) and _is_plain(value):
                    raise _type_error(function_name, name, value, checks[name][1])
        return function(*args, **kwargs)

    return cast(Function, call_checked)


def _type_error(owner: str, name: str, value: Any, hint: Any) -> ConfigError:
    path, item, hint = _locate_mismatch(name, value, hint)
    return ConfigError(f"{owner}: {path}: {describe_mismatch(item, hint)}")


def matches_hint(value: Any, hint: Any) -> bool:
    """Return whether a value matches a type hint."""
    return predicate_for_hint(hint)(value)


def in_range_of_hint(value: Any, hint: Any) -> bool:
    """Return whether a number is in the range of a type hint."""
    if type(value) is int and value not in _INTEGER_RANGE:
        return False
    return all(limit.allows(value) for limit in ranges_in_hint(hint))


@cache_by_hint
def predicate_for_hint(hint: Any) -> Predicate:
    """Return the predicate for values that match a type hint, computed once per hint."""
    members, ranges = union_members(hint), ranges_in_hint(hint)
    checks = [_predicate_for_member(member) for member in members]
    exact_types = frozenset() if ranges else _TYPES_WITHOUT_FURTHER_CHECK.intersection(members)

    def check(value: Any) -> bool:
        if type(value) in exact_types:
            return True
        return any(check_member(value) for check_member in checks) and all(limit.allows(value) for limit in ranges)

    return check


def _predicate_for_member(hint: Any) -> Predicate:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    base_type = origin or hint
    if origin is typing.Literal:
        return lambda value: any(value == arg and type(value) is type(arg) for arg in args)
    if hint is Any or hint is object or not isinstance(base_type, type):
        return lambda value: True
    if base_type is bool:
        return _is_bool
    if base_type in _NUMBER_TYPES:
        number_type = _NUMBER_TYPES[base_type]
        if base_type is int:
            return lambda value: (
                isinstance(value, numbers.Integral) and not _is_bool(value) and int(value) in _INTEGER_RANGE
            )
        return lambda value: isinstance(value, number_type) and not _is_bool(value)
    if issubclass(base_type, os.PathLike):
        return lambda value: isinstance(value, str | os.PathLike)
    if base_type is collections.abc.Callable:
        return callable
    item = predicate_for_hint(args[-1]) if args and (issubclass(base_type, Mapping) or _is_list_hint(hint)) else None
    if issubclass(base_type, Mapping):
        return lambda value: isinstance(value, Mapping) and (item is None or all(map(item, value.values())))
    if _is_list_hint(hint):
        accepts_iterators = base_type is collections.abc.Iterable  # includes generators

        def check_list(value: Any) -> bool:
            if accepts_iterators and not hasattr(value, "__len__"):
                return isinstance(value, collections.abc.Iterable)
            return _is_sequence(value) and (item is None or all(map(item, value)))

        return check_list

    def check_instance(value: Any) -> bool:
        try:
            return isinstance(value, base_type)
        except TypeError:  # a protocol without runtime check: the class itself checks the value
            return True

    return check_instance


def _locate_mismatch(path: str, value: Any, hint: Any) -> tuple[str, Any, Any]:
    """Return the path, value and hint of a mismatch, which may be an item of a list or mapping."""
    is_mapping = isinstance(value, Mapping)
    container_hints = [
        member
        for member in union_members(hint)
        if typing.get_args(member) and (_is_mapping_hint if is_mapping else _is_list_hint)(member)
    ]
    if (is_mapping or _is_sequence(value)) and len(container_hints) == 1:
        item_hint = typing.get_args(container_hints[0])[-1]
        for index, item in value.items() if is_mapping else enumerate(value):
            if not matches_hint(item, item_hint):
                return _locate_mismatch(f"{path}.{index}", item, item_hint)
    return path, value, hint


def _is_mapping_hint(hint: Any) -> bool:
    kind = typing.get_origin(hint) or hint
    return isinstance(kind, type) and issubclass(kind, Mapping)


@cache_by_hint
def _is_list_hint(hint: Any) -> bool:
    """Return whether a type hint is a list of items of one type."""
    kind = typing.get_origin(hint) or hint
    is_collection = isinstance(kind, type) and kind.__module__ in ("builtins", "collections.abc")
    return is_collection and issubclass(kind, collections.abc.Iterable) and not issubclass(kind, str | tuple | Mapping)


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool) or type(value).__name__ in ("bool_", "bool")


def _is_sequence(value: Any) -> bool:
    """Return whether a value is a sequence or array; text and iterators are not."""
    return hasattr(value, "__len__") and hasattr(value, "__getitem__") and not isinstance(value, str | bytes | Mapping)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, str | bytes | type | numbers.Number | Mapping) or _is_sequence(value)


def describe_mismatch(value: Any, hint: Any) -> str:
    """Return a message such as "expected an integer, got the text 'x'", with a remedy, as for YAML files."""
    return f"expected {describe_hint(hint, tag_prefix='')}, got {_describe_value(value)}{_remedy(value, hint)}"


def _describe_value(value: Any) -> str:
    if isinstance(value, str):
        return f"the text '{value if len(value) < 60 else value[:57] + '...'}'"
    if name := _numpy_dtype_name(value):
        return f"the dtype {name}"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if value is None or isinstance(value, bool | numbers.Number):
        return str(value)
    if _is_sequence(value):
        return "a list"
    return "a mapping" if isinstance(value, Mapping) else f"a {type(value).__name__}"


def _numpy_dtype_name(value: Any) -> str:
    """Return the name of a dtype or scalar type of NumPy, or ''."""
    is_type = isinstance(value, type)
    module = (value if is_type else type(value)).__module__
    return getattr(value, "__name__" if is_type else "name", "") if module.partition(".")[0] == "numpy" else ""


def _remedy(value: Any, hint: Any) -> str:
    classes = registered_classes_in_hint(hint)
    if isinstance(value, type) and issubclass(value, tuple(classes)):
        return f"; write {value.__name__}()"
    if str in union_members(hint) and (name := _numpy_dtype_name(value)):
        return f"; write '{name}'"
    if classes and isinstance(value, str):
        name_by_lower = {name.lower(): name for base in classes for name in classes_by_name([base, *subclasses(base)])}
        matches = difflib.get_close_matches(value.lower(), name_by_lower, n=1, cutoff=0.5)
        return f"; write {name_by_lower[matches[0]]}()" if matches else ""
    return plain_value_remedy(value, hint)


def plain_value_remedy(value: Any, hint: Any) -> str:
    """Return the remedy for a text or number that almost matches a hint, or ''."""
    choices = union_members(hint)
    if type(value) is int and value not in _INTEGER_RANGE:
        return "; integers have at most 64 bits"
    literals = [arg for kind in choices if typing.get_origin(kind) is typing.Literal for arg in typing.get_args(kind)]
    if isinstance(value, str) and literals:
        suggestion = suggest(value, map(str, literals))
        return suggestion if suggestion.startswith("; did") else ""
    if isinstance(value, str) and {int, float} & set(choices):
        try:
            float(value)
        except ValueError:
            return ""
        return "; remove the quotes"
    if isinstance(value, float) and int in choices and value.is_integer() and int(value) in _INTEGER_RANGE:
        return f"; write {int(value)}"
    return ""
