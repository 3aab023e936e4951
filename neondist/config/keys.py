"""Fields that `--set` can change, for shell completion."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..errors import UserError
from ..io.regular_file import read_bytes
from ..registry import registered_classes
from ..registry.fields import constructor_fields
from ..yaml_nodes.parse import parse_yaml
from ..yaml_nodes.read import MAX_FILE_BYTES
from ..yaml_nodes.tree import Node, join_path


def settable_keys(path: str) -> list[str]:
    """Return 'epochs=', 'model.layers.0.kernel_size=', ...: all fields of a file, set or not; [] if it is not valid."""
    try:
        root = parse_yaml(read_bytes(path, MAX_FILE_BYTES).decode(), str)
    except (OSError, UnicodeDecodeError, UserError):
        return []
    return [] if root is None else [f"{key}=" for key in _iterate_keys(root, "")]


def _iterate_keys(node: Node, path: str) -> Iterator[str]:
    children: dict[Any, Node] = {}
    if isinstance(node.value, list | dict):
        children.update(enumerate(node.value) if isinstance(node.value, list) else node.value.items())
    cls = registered_classes().get(node.tag or "")
    for name in dict.fromkeys([*(constructor_fields(cls) if cls is not None else ()), *children]):
        yield join_path(path, name)
        if name in children:
            yield from _iterate_keys(children[name], join_path(path, name))
