"""An experiment file to the experiment object."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from os import PathLike
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..io.regular_file import open_regular
from ..registry import suggest
from ..registry.fields import fields
from .build import Builder, find_class
from .fit import fit
from .overrides import override
from .parse import parse
from .tree import Node, fault

MAX_BYTES = 1 << 20


def load_experiment(
    path: str | PathLike[str],
    overrides: Iterable[str] = (),
    text: str | None = None,
    top: str = "FitExperiment",
    modules: Collection[str] = (),
) -> Any:
    """Return the experiment that a YAML file describes.

    A tag names a registered class and its fields are that class's constructor arguments; nothing else can be made, nor
    called, but functions of `modules` that it names. Modules that define the classes must have been imported before.

    Parameters
    ----------
    path : the file, named in messages as it is given here
    overrides : 'key.path=value' strings, applied to the file before anything is built
    text : the file's content, if it is already known; the file is then not read
    top : the class that the top object must be of
    modules : names of imported modules, whose functions the file may name as MODULE:NAME

    Raises
    ------
    ConfigError
        'FILE:LINE: field: what, and the remedy'. Errors of the classes' own constructors keep their class.
    """
    name = str(path)
    root = parse(_read(Path(path)) if text is None else text, lambda line: f"{name}:{line + 1}")
    if root is None:
        raise ConfigError(f"{name}:1: the file is empty; it must hold one !{top} {{...}}")
    if root.tag is None:
        raise fault(root, "", f"the file must hold one !{top} with its fields, got {root}; begin it with !{top}")
    override(root, overrides)
    cls = find_class(root, "")
    if top not in [base.__name__ for base in cls.__mro__]:
        raise fault(root, "", f"the top object must be !{top}, got !{root.tag}")
    return Builder(_dist(root, cls), modules).build(root)


def _dist(root: Node, cls: type) -> bool:
    """Return the experiment's dist_flag, which decides the classes and so must be known before any is built."""
    assert isinstance(root.value, dict)
    field = fields(cls).get("dist_flag")
    if field is None or "dist_flag" not in root.value:
        return field is None or field.required or bool(field.default)
    return bool(fit(root.value["dist_flag"], bool, "dist_flag", Builder(True).build))


def _read(path: Path) -> str:
    try:
        with open_regular(path) as file:
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        near = suggest(path.name, [other.name for other in path.parent.glob("*.y*ml")] if path.parent.is_dir() else [])
        raise ConfigError(f"{path}: no such file{near or '; check the path'}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a directory; name the YAML file inside it") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); check the path and its permissions") from None
    if len(content) > MAX_BYTES:
        raise ConfigError(f"{path}: larger than {MAX_BYTES >> 20} MiB; this is not an experiment file")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: not UTF-8 text; save the file as UTF-8") from None
