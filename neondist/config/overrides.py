"""Application of `--set key.path=value` to the tree before objects are built."""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import ConfigError
from ..registry import registered_classes, suggest
from ..registry.fields import constructor_fields
from ..yaml_nodes.parse import parse_yaml
from ..yaml_nodes.tree import Node, join_path, node_error, shorten_to_line
from .build import describe_unknown_field


def apply_overrides(root: Node, settings: Iterable[str]) -> None:
    """Apply 'key.path=value' strings in order; values are YAML, and list items are addressed by index.

    Raises
    ------
    ConfigError
        With the message '--set KEY=VALUE: path: problem', and a suggestion for an unknown name.
    """
    for setting in settings:
        key, separator, text = setting.partition("=")
        location = f"--set {shorten_to_line(setting)}"
        key = key.strip()
        if not separator or not all(key.split(".")):
            raise ConfigError(f"{location}: write --set key.path=value")
        new_node = parse_yaml(text, lambda line, location=location: location, key) or Node(None, location)  # type: ignore[misc]
        _set_value(root, key.split("."), new_node)


def _set_value(node: Node, names: list[str], new_node: Node) -> None:
    path = ""
    error_origin = Node(None, new_node.place)
    for depth, name in enumerate(names):
        is_last = depth == len(names) - 1
        if node.value is None:
            node.value = {}
        if isinstance(node.value, list):
            index = _parse_index(node.value, name, path, error_origin)
            if is_last:
                node.value[index] = new_node
            else:
                node = node.value[index]
        elif isinstance(node.value, dict):
            _check_field_name(node, name, path, error_origin)
            if is_last:
                node.value[name] = new_node
            else:
                node = node.value.setdefault(name, Node({}, new_node.place))
        else:
            raise node_error(
                error_origin, path, f"is a scalar ({node}) and has no '{'.'.join(names)}'; write --set {path}=value"
            )
        path = join_path(path, name)


def _parse_index(items: list[Node], name: str, path: str, error_origin: Node) -> int:
    if not name.removeprefix("-").isdecimal() or not -len(items) <= int(name) < len(items):
        index_range = f"items 0 to {len(items) - 1}" if items else "no items"
        raise node_error(
            error_origin, join_path(path, name), f"{path} is a list with {index_range}; give the number of an item"
        )
    return int(name)


def _check_field_name(node: Node, name: str, path: str, error_origin: Node) -> None:
    """Raise ConfigError for a name that is neither in the file nor a field of the class; ignore unknown classes."""
    assert isinstance(node.value, dict)
    if name in node.value:
        return
    if node.tag is None:
        # a plain mapping allows any name, except a likely misspelling of an existing name
        suggestion = suggest(name, node.value)
        if suggestion.startswith("; did"):
            raise node_error(error_origin, join_path(path, name), f"there is no '{name}'{suggestion}")
        return
    cls = registered_classes().get(node.tag)
    class_fields = {} if cls is None else constructor_fields(cls)
    if cls is not None and name not in class_fields:
        nested_path = _find_nested_field(node, name, path)
        raise node_error(
            error_origin,
            join_path(path, name),
            f"{cls.__name__} has no field '{name}'; did you mean '{nested_path}'?"
            if nested_path
            else describe_unknown_field(cls, name, class_fields),
        )


def _find_nested_field(node: Node, name: str, path: str) -> str:
    """Return the path of the nearest field called `name` in the objects below a node; '' if there is none."""
    assert isinstance(node.value, dict)
    objects = [(join_path(path, key), child) for key, child in node.value.items() if isinstance(child.value, dict)]
    for child_path, child in objects:
        cls = registered_classes().get(child.tag or "")
        if name in child.value or (cls is not None and name in constructor_fields(cls)):  # type: ignore[operator]
            return join_path(child_path, name)
    return next(filter(None, (_find_nested_field(child, name, child_path) for child_path, child in objects)), "")
