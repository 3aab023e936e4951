"""Conversion of YAML nodes to annotated field types."""

from __future__ import annotations

import sys
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import PurePath
from typing import Any, TypeAlias

from ..errors import ConfigError
from ..registry import registered_classes, suggest
from ..registry.arguments import in_range_of_hint, matches_hint, plain_value_remedy
from ..registry.functions import accepts_functions
from ..registry.type_hints import describe_hint, is_class, registered_classes_in_hint, union_members
from .tree import Node, join_path, node_error, typed_value

BuildObject: TypeAlias = Callable[[Node, str, Any], Any]


class TypeMismatch(ConfigError):
    """Error for a value that does not match a type; another member of a union may still match."""

    path: str = ""


def convert_fields(node: Node, path: str, hints: Mapping[str, Any], required: Iterable[str] = ()) -> dict[str, Any]:
    """Return the fields of a mapping, converted to `hints` and in the order of `hints`; objects are rejected.

    Raises
    ------
    ConfigError
        If the node is not a mapping, or a field is unknown, does not match, or is `required` but missing.
    """
    nodes = typed_value(node, path, dict, f"a mapping with {', '.join(hints)}")
    for name, child in nodes.items():
        if name not in hints:
            raise node_error(child, join_path(path, name), f"unknown field{suggest(name, hints)}")
    for name in required:
        if name not in nodes:
            raise node_error(node, join_path(path, name), f"missing; add '{name}: ...'")
    return {name: convert_node(nodes[name], hints[name], join_path(path, name)) for name in hints if name in nodes}


def _reject_object(node: Node, path: str, hint: Any) -> Any:
    raise _mismatch_error(node, hint, path)


def convert_node(node: Node, hint: Any, path: str, build: BuildObject = _reject_object) -> Any:
    """Return the node's value converted to `hint`: int to float, lists to tuples, objects by `build(node, path, hint)`.

    For the hint `Node`, the node itself is returned.

    Raises
    ------
    ConfigError
        If the value does not match; the message states place, path, the expected type and the value.
    """
    if hint is Node:
        return node
    value = (
        _convert_object(node, hint, path, build) if node.tag is not None else _convert_untagged(node, hint, path, build)
    )
    if not in_range_of_hint(value, hint):
        raise _mismatch_error(node, hint, path)
    return value


def _convert_untagged(node: Node, hint: Any, path: str, build: BuildObject) -> Any:
    if isinstance(node.value, str) and ":" in node.value and accepts_functions(hint):
        return build(node, path, hint)
    choices = union_members(hint)
    if not isinstance(node.value, list | dict) and type(node.value) in choices:
        return node.value  # first, so that `float | int` keeps an int
    inner_errors: list[TypeMismatch] = []
    for choice in choices:
        try:
            return _convert_to_union_member(node, choice, path, build)
        except TypeMismatch as error:
            if error.path != path:
                inner_errors.append(error)
    if len(inner_errors) == 1:  # from the only list or mapping type of the union: report the item that does not match
        raise inner_errors[0]
    raise _mismatch_error(node, hint, path)


def _convert_object(node: Node, hint: Any, path: str, build: BuildObject) -> Any:
    value = build(node, path, hint)
    if not matches_hint(value, hint):
        raise _mismatch_error(node, hint, path)
    return value


def _convert_to_union_member(node: Node, hint: Any, path: str, build: BuildObject) -> Any:
    value, origin, args = node.value, typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or hint is object or isinstance(hint, typing.TypeVar):
        return _convert_untyped(node, path, build)
    if isinstance(value, list):
        return _convert_list(node, value, origin or hint, args, path, build)
    elif isinstance(value, dict):
        if _accepts_type(origin or hint, dict):
            item_hint = args[1] if len(args) == 2 else Any
            return {name: convert_node(child, item_hint, join_path(path, name), build) for name, child in value.items()}
    elif isinstance(value, str) and is_class(hint) and issubclass(hint, PurePath):
        return hint(value)
    elif hint is float and type(value) is int and abs(value) <= sys.float_info.max:
        return float(value)
    elif matches_hint(value, hint):
        return value
    raise _mismatch_error(node, hint, path)


def _convert_list(
    node: Node, items: list[Node], list_type: Any, args: tuple[Any, ...], path: str, build: BuildObject
) -> Any:
    if not _accepts_type(list_type, tuple if list_type is tuple else list):
        raise _mismatch_error(node, list_type, path)
    has_fixed_length = list_type is tuple and args and args[-1] is not Ellipsis
    if has_fixed_length and len(items) != len(args):
        raise _mismatch_error(node, tuple[args], path)  # type: ignore[valid-type]
    hints = args if has_fixed_length else [args[0] if args else Any] * len(items)
    values = [
        convert_node(item, hint, join_path(path, i), build)
        for i, (item, hint) in enumerate(zip(items, hints, strict=True))
    ]
    return tuple(values) if list_type is tuple else set(values) if list_type is set else values


def _convert_untyped(node: Node, path: str, build: BuildObject) -> Any:
    """Return the value as written, for fields without a type."""
    if isinstance(node.value, list):
        return [convert_node(item, Any, join_path(path, i), build) for i, item in enumerate(node.value)]
    if isinstance(node.value, dict):
        return {name: convert_node(item, Any, join_path(path, name), build) for name, item in node.value.items()}
    return node.value


def _accepts_type(accepted_type: Any, value_type: type) -> bool:
    """Return whether `accepted_type`, a class or an abstract collection, accepts values of type `value_type`."""
    if accepted_type in (list, tuple, set, dict):
        return accepted_type is value_type or (accepted_type is set and value_type is list)
    return isinstance(accepted_type, type) and accepted_type is not str and issubclass(value_type, accepted_type)


def _mismatch_error(node: Node, hint: Any, path: str) -> TypeMismatch:
    error = TypeMismatch(
        str(node_error(node, path, f"expected {describe_hint(hint)}, got {node}{_mismatch_remedy(node, hint)}"))
    )
    error.path = path
    return error


def _mismatch_remedy(node: Node, hint: Any) -> str:
    value = node.value
    if node.tag is None and registered_classes_in_hint(hint):
        if isinstance(value, str) and value in registered_classes():
            return f"; write !{value} {{}}"
        if isinstance(value, dict):
            return "; put the class before it: !NAME {field: value}"
    if remedy := plain_value_remedy(value, hint):
        return remedy
    if type(value) in (int, float, bool) and str in union_members(hint):
        return f"; quote it: '{str(value).lower()}'"
    return ""
