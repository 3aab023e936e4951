"""The experiment file as a tree of values that know where they were written."""

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
    place : where it was written, 'FILE:LINE' or '--set key=value'
    tag : the class named by a YAML tag, without its '!'; such a node's value is a mapping
    """

    value: Plain | list[Node] | dict[str, Node]
    place: str
    tag: str | None = None

    def __str__(self) -> str:
        """Describe the value as messages quote it."""
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
    """Return the tree of a plain value, list or mapping of Python, all of which was written at one place."""
    if isinstance(value, Mapping):
        return Node({str(name): node_of(child, place) for name, child in value.items()}, place)
    if isinstance(value, list | tuple):
        return Node([node_of(child, place) for child in value], place)
    if value is None or isinstance(value, bool | int | float | str):
        return Node(value, place)
    return Node(None, place, type(value).__name__)


def shorten(text: str, most: int = 60) -> str:
    """Return text that fits into a one-line message."""
    line = " ".join(text.splitlines())
    return line if len(line) <= most else line[: most - 3] + "..."


def join(path: str, name: object) -> str:
    """Return the dotted path of a field inside `path`."""
    return f"{path}.{name}" if path else str(name)


def message(place: str, path: str, what: str) -> str:
    """Return 'FILE:LINE: field: what'; the top object has no field."""
    return ": ".join(part for part in (place, path, what) if part)


def value_of(node: Node, path: str, kind: type, words: str) -> Any:
    """Return the value of a node without a tag; ConfigError, with the words for what was expected, if it is another."""
    if node.tag is not None or not isinstance(node.value, kind):
        raise fault(node, path, f"expected {words}, got {node}")
    return node.value


def fault(node: Node, path: str, what: str) -> ConfigError:
    """Return the error that says what is wrong with one value of the file."""
    return ConfigError(message(node.place, path, what))
