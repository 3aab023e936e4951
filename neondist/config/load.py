"""Loading of experiment files."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from os import PathLike
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..registry.fields import constructor_fields
from ..yaml_nodes import Node, node_error, parse_file
from ..yaml_nodes.convert import convert_node
from .build import ObjectBuilder, find_class
from .overrides import apply_overrides


def load_experiment(
    path: str | PathLike[str],
    overrides: Iterable[str] = (),
    text: str | None = None,
    top: str = "FitExperiment",
    modules: Collection[str] = (),
) -> Any:
    """Return the experiment that a YAML file describes.

    A tag names a registered class and its fields are that class's constructor arguments; nothing else can be
    instantiated or called, except functions of `modules`. Modules that define the classes must already be imported.

    Parameters
    ----------
    path : the file; shown in messages as given
    overrides : 'key.path=value' strings, applied to the file before anything is built
    text : the file's content, if already read
    top : name of the class of the top object, or of one of its base classes
    modules : names of imported modules whose functions the file may name as MODULE:NAME

    Raises
    ------
    ConfigError
        With the message 'FILE:LINE: field: problem and remedy'. Errors raised by constructors keep their class.
    """
    file_name = str(path)
    root = parse_file(Path(path), text)
    if root is None:
        raise ConfigError(f"{file_name}:1: the file is empty; it must contain one !{top} {{...}}")
    if root.tag is None:
        raise node_error(root, "", f"the file must contain one !{top} with its fields, got {root}; begin with !{top}")
    apply_overrides(root, overrides)
    cls = find_class(root, "")
    if top not in [base.__name__ for base in cls.__mro__]:
        raise node_error(root, "", f"the top object must be !{top}, got !{root.tag}")
    return ObjectBuilder(_read_dist_flag(root, cls), modules).build(root)


def _read_dist_flag(root: Node, cls: type) -> bool:
    """Return the experiment's dist_flag, which selects the classes and so is needed before any object is built."""
    assert isinstance(root.value, dict)
    field = constructor_fields(cls).get("dist_flag")
    if field is None or "dist_flag" not in root.value:
        return field is None or field.required or bool(field.default)
    return bool(convert_node(root.value["dist_flag"], bool, "dist_flag", ObjectBuilder(True).build))
