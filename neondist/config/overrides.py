"""`--set key.path=value` changes the tree before anything is built from it."""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import ConfigError
from ..registry import registered, suggest
from ..registry.fields import fields
from ..yaml_nodes.parse import parse
from ..yaml_nodes.tree import Node, fault, join, shorten
from .build import unknown_field


def override(root: Node, settings: Iterable[str]) -> None:
    """Apply 'key.path=value' strings in order; values are YAML, list items are named by their number.

    Raises
    ------
    ConfigError
        '--set KEY=VALUE: path: what', with a suggestion for a name that is not there.
    """
    for setting in settings:
        key, equals, text = setting.partition("=")
        place = f"--set {shorten(setting)}"
        key = key.strip()
        if not equals or not all(key.split(".")):
            raise ConfigError(f"{place}: write --set key.path=value")
        new = parse(text, lambda line, place=place: place, key) or Node(None, place)  # type: ignore[misc]
        _put(root, key.split("."), new)


def _put(node: Node, names: list[str], new: Node) -> None:
    path = ""
    at = Node(None, new.place)
    for depth, name in enumerate(names):
        last = depth == len(names) - 1
        if node.value is None:
            node.value = {}
        if isinstance(node.value, list):
            index = _index(node.value, name, path, at)
            if last:
                node.value[index] = new
            else:
                node = node.value[index]
        elif isinstance(node.value, dict):
            _check(node, name, path, at)
            if last:
                node.value[name] = new
            else:
                node = node.value.setdefault(name, Node({}, new.place))
        else:
            raise fault(at, path, f"is a scalar ({node}) and has no '{'.'.join(names)}'")
        path = join(path, name)


def _index(items: list[Node], name: str, path: str, at: Node) -> int:
    if not name.removeprefix("-").isdecimal() or not -len(items) <= int(name) < len(items):
        held = f"items 0 to {len(items) - 1}" if items else "no items"
        raise fault(at, join(path, name), f"{path} is a list with {held}; give the number of an item")
    return int(name)


def _check(node: Node, name: str, path: str, at: Node) -> None:
    """Refuse a name that is neither in the file nor a field of the class; an unknown class is reported when built."""
    assert isinstance(node.value, dict)
    if name in node.value:
        return
    if node.tag is None:
        # a plain mapping's names are not known here: a near miss of one that is there is refused, others are new
        near = suggest(name, node.value)
        if near.startswith("; did"):
            raise fault(at, join(path, name), f"there is no '{name}'{near}")
        return
    cls = registered().get(node.tag)
    known = {} if cls is None else fields(cls)
    if cls is not None and name not in known:
        inner = _below(node, name, path)
        raise fault(
            at,
            join(path, name),
            f"{cls.__name__} has no field '{name}'; did you mean '{inner}'?"
            if inner
            else unknown_field(cls, name, known),
        )


def _below(node: Node, name: str, path: str) -> str:
    """Return where a field of that name is in the objects of a node, the nearest to it; '' if there is none."""
    assert isinstance(node.value, dict)
    objects = [(join(path, key), one) for key, one in node.value.items() if isinstance(one.value, dict)]
    for place, one in objects:
        cls = registered().get(one.tag or "")
        if name in one.value or (cls is not None and name in fields(cls)):  # type: ignore[operator]
            return join(place, name)
    return next(filter(None, (_below(one, name, place) for place, one in objects)), "")
