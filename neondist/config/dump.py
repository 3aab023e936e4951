"""Serialisation of objects to YAML text, including all defaults."""

from __future__ import annotations

from enum import Enum
from pathlib import PurePath
from typing import Any

from yaml.representer import SafeRepresenter

import yaml

from ..backends import Backend
from ..errors import ConfigError
from ..registry import Registered
from ..registry.functions import Function
from ..yaml_nodes.scalars import needs_quotes
from ..yaml_nodes.tree import join

_SCALAR_TYPES: tuple[Any, ...] = (bool, int, float, str)


def dump(obj: Registered) -> str:
    """Return YAML text that `load_experiment` turns into an equal object.

    Raises
    ------
    ConfigError
        If an argument cannot be represented in YAML, such as a lambda.
    """
    return yaml.serialize(_node(obj, ""), Dumper=yaml.SafeDumper, width=100, allow_unicode=True)


def _node(value: Any, path: str) -> yaml.Node:
    if isinstance(value, Registered):
        return _mapping(f"!{type(value).__name__}", value.arguments(), path)
    if isinstance(value, dict):
        return _mapping("tag:yaml.org,2002:map", value, path)
    if isinstance(value, list | tuple | set | frozenset):
        items = [_node(item, join(path, i)) for i, item in enumerate(value)]
        flow = all(_is_short(item) and not isinstance(item, yaml.MappingNode) for item in items)
        return yaml.SequenceNode("tag:yaml.org,2002:seq", items, flow_style=flow)
    return _scalar(value, path)


def _mapping(tag: str, values: dict[str, Any], path: str) -> yaml.Node:
    pairs = [(_scalar(str(name), path), _node(value, join(path, name))) for name, value in values.items()]
    return yaml.MappingNode(tag, pairs, flow_style=all(_is_short(value) for _, value in pairs))


def _is_short(node: yaml.Node) -> bool:
    return not isinstance(node, yaml.CollectionNode) or bool(node.flow_style)


def _scalar(value: Any, path: str) -> yaml.ScalarNode:
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, PurePath | Backend | Function):
        value = str(value)
    if hasattr(value, "item") and getattr(value, "shape", None) == ():  # a NumPy scalar
        value = value.item()
    if hasattr(value, "itemsize") and isinstance(getattr(value, "name", None), str):  # a NumPy dtype
        value = value.name
    for kind in _SCALAR_TYPES:  # a subclass of float is written as a float
        if isinstance(value, kind):
            value = kind(value)
            break
    if value is not None and type(value) not in _SCALAR_TYPES:
        raise ConfigError(f"{path}: {value!r} cannot be written to a YAML file; use a subclass of nd.Registered")
    node = SafeRepresenter().represent_data(value)
    assert isinstance(node, yaml.ScalarNode)
    if isinstance(value, str) and needs_quotes(value):
        node.style = "'"
    return node
