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
from ..registry.functions import NamedFunction
from ..yaml_nodes.scalars import is_exponent_number
from ..yaml_nodes.tree import join_path

_SCALAR_TYPES: tuple[Any, ...] = (bool, int, float, str)


def dump(obj: Registered) -> str:
    """Return YAML text that `load_experiment` turns into an equal object.

    Raises
    ------
    ConfigError
        If an argument cannot be represented in YAML, such as a lambda.
    """
    return yaml.serialize(_to_yaml_node(obj, ""), Dumper=yaml.SafeDumper, width=100, allow_unicode=True)


def _to_yaml_node(value: Any, path: str) -> yaml.Node:
    if isinstance(value, Registered):
        return _mapping_node(f"!{type(value).__name__}", value.arguments(), path)
    if isinstance(value, dict):
        return _mapping_node("tag:yaml.org,2002:map", value, path)
    if isinstance(value, list | tuple | set | frozenset):
        nodes = [_to_yaml_node(item, join_path(path, i)) for i, item in enumerate(value)]
        is_flow = all(_fits_one_line(item) and not isinstance(item, yaml.MappingNode) for item in nodes)
        return yaml.SequenceNode("tag:yaml.org,2002:seq", nodes, flow_style=is_flow)
    return _scalar_node(value, path)


def _mapping_node(tag: str, values: dict[str, Any], path: str) -> yaml.Node:
    pairs = [
        (_scalar_node(str(name), path), _to_yaml_node(value, join_path(path, name))) for name, value in values.items()
    ]
    return yaml.MappingNode(tag, pairs, flow_style=all(_fits_one_line(value) for _, value in pairs))


def _fits_one_line(node: yaml.Node) -> bool:
    return not isinstance(node, yaml.CollectionNode) or bool(node.flow_style)


def _scalar_node(value: Any, path: str) -> yaml.ScalarNode:
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, PurePath | Backend | NamedFunction):
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
    if isinstance(value, str) and is_exponent_number(value):
        node.style = "'"
    return node
