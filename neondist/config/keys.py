"""Fields that `--set` can change, for shell completion."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..errors import UserError
from ..io.regular_file import read_bytes
from ..registry import registered
from ..registry.fields import fields
from ..yaml_nodes.parse import parse
from ..yaml_nodes.read import MAX_BYTES
from ..yaml_nodes.tree import Node, join


def keys_of(path: str) -> list[str]:
    """Return 'epochs=', 'model.layers.0.kernel_size=', ...: all fields of a file, given or not; [] of a wrong one."""
    try:
        root = parse(read_bytes(path, MAX_BYTES).decode(), str)
    except (OSError, UnicodeDecodeError, UserError):
        return []
    return [] if root is None else [f"{key}=" for key in _below(root, "")]


def _below(node: Node, path: str) -> Iterator[str]:
    inside: dict[Any, Node] = {}
    if isinstance(node.value, list | dict):
        inside.update(enumerate(node.value) if isinstance(node.value, list) else node.value.items())
    cls = registered().get(node.tag or "")
    for name in dict.fromkeys([*(fields(cls) if cls is not None else ()), *inside]):
        yield join(path, name)
        if name in inside:
            yield from _below(inside[name], join(path, name))
