"""Tree of the values of a YAML file, each with its source position."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from ..errors import ConfigError

Plain: TypeAlias = "bool | int | float | str | None"


@dataclass
class Node:
    """One value: plain, a list or a mapping.

    Attributes
    ----------
    value : the plain value, the list of nodes, or the nodes by field name
    place : source position, 'FILE:LINE' or '--set key=value'
    tag : the class named by a YAML tag, without its '!'; such a node's value is a mapping
    """

    value: Plain | list[Node] | dict[str, Node]
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
            return f"the text '{shorten(value)}'"
        return "nothing" if value is None else str(value).lower()


def node_of(value: object, place: str) -> Node:
    """Return the tree of a plain Python value, list or mapping, all at one source position."""
    if isinstance(value, Mapping):
        return Node({str(name): node_of(child, place) for name, child in value.items()}, place)
    if isinstance(value, list | tuple):
        return Node([node_of(child, place) for child in value], place)
    if value is None or isinstance(value, bool | int | float | str):
        return Node(value, place)
    return Node(None, place, type(value).__name__)


def shorten(text: str, most: int = 60) -> str:
    """Return the text on one line, truncated to `most` characters."""
    line = " ".join(text.splitlines())
    return line if len(line) <= most else line[: most - 3] + "..."


def join(path: str, name: object) -> str:
    """Return the dotted path of a field inside `path`."""
    return f"{path}.{name}" if path else str(name)


def message(place: str, path: str, text: str) -> str:
    """Return 'FILE:LINE: field: text'; the top object has no field."""
    return ": ".join(part for part in (place, path, text) if part)


def value_of(node: Node, path: str, kind: type, words: str) -> Any:
    """Return the value of an untagged node; ConfigError, which states the expected `words`, if it has another type."""
    if node.tag is not None or not isinstance(node.value, kind):
        raise fault(node, path, f"expected {words}, got {node}")
    return node.value


def fault(node: Node, path: str, text: str) -> ConfigError:
    """Return the error for one value of the file."""
    return ConfigError(message(node.place, path, text))
