"""Tree of the values of a YAML file, each with its source position."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from ..errors import ConfigError

PlainValue: TypeAlias = "bool | int | float | str | None"


@dataclass
class Node:
    """One value: plain, a list or a mapping.

    Attributes
    ----------
    value : the plain value, the list of nodes, or the nodes by field name
    place : source position, 'FILE:LINE' or '--set key=value'
    tag : the class named by a YAML tag, without its '!'; such a node's value is a mapping
    """

    value: PlainValue | list[Node] | dict[str, Node]
    place: str
    tag: str | None = None

    def __str__(self) -> str:
        """Describe the value for messages."""
        value = self.value
        if self.tag is not None:
            return f"!{self.tag}"
        if isinstance(value, list):
            return "a list"
        if isinstance(value, dict):
            return "a mapping"
        if isinstance(value, str):
            return f"the text '{shorten_to_line(value)}'"
        return "nothing" if value is None else str(value).lower()


def to_node(value: object, location: str) -> Node:
    """Return the tree of a plain Python value, list or mapping, all at one source position."""
    if isinstance(value, Mapping):
        return Node({str(name): to_node(child, location) for name, child in value.items()}, location)
    if isinstance(value, list | tuple):
        return Node([to_node(child, location) for child in value], location)
    if value is None or isinstance(value, bool | int | float | str):
        return Node(value, location)
    return Node(None, location, type(value).__name__)


def shorten_to_line(text: str, max_length: int = 60) -> str:
    """Return the text on one line, truncated to `max_length` characters."""
    line = " ".join(text.splitlines())
    return line if len(line) <= max_length else line[: max_length - 3] + "..."


def join_path(path: str, name: object) -> str:
    """Return the dotted path of a field inside `path`."""
    return f"{path}.{name}" if path else str(name)


def format_message(location: str, path: str, text: str) -> str:
    """Return 'FILE:LINE: field: text'; the field is left out for the top-level object."""
    return ": ".join(part for part in (location, path, text) if part)


def typed_value(node: Node, path: str, expected_type: type, expected: str) -> Any:
    """Return the value of an untagged node; ConfigError with `expected` if the value has another type."""
    if node.tag is not None or not isinstance(node.value, expected_type):
        raise node_error(node, path, f"expected {expected}, got {node}")
    return node.value


def field_error(node: Node, path: str, name: str, text: str) -> ConfigError:
    """Return the error for a field of a mapping, located at the mapping if the field is missing."""
    fields = node.value if isinstance(node.value, dict) else {}
    return node_error(fields.get(name, node), join_path(path, name), text)


def node_error(node: Node, path: str, text: str) -> ConfigError:
    """Return the error for one value of the file."""
    return ConfigError(format_message(node.place, path, text))
