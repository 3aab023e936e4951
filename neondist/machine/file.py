"""Machines in YAML."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import yaml

from ..errors import ConfigError
from ..files import write_text
from .machine import Link, Machine

_REMEDY = "docs/performance.md has two examples"


def read(path: Path) -> Machine:
    """Return the machine of a YAML file; ConfigError says what is wrong with it."""
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); {_REMEDY}") from error
    values = _checked(path, "", found, [one.name for one in fields(Machine)])
    for name in "node", "network":
        link = _checked(path, f"{name}.", values.get(name), ["latency", "bandwidth"])
        values[name] = Link(*(_number(path, f"{name}.{one}", link.get(one)) for one in ("latency", "bandwidth")))
    for name in "cores_per_node", "nodes":
        if not (name == "nodes" and values.get(name) is None):
            values[name] = int(_number(path, name, values.get(name), least=1.0))
    for one in fields(Machine):
        if isinstance(one.default, float):
            least = 0.0 if one.name == "shared_latency" else None
            values[one.name] = _number(path, one.name, values.get(one.name, one.default), least)
    return Machine(**values | {"host": str(values.get("host") or "")})


def write(path: Path, machine: Machine, comment: str) -> None:
    """Write a machine as YAML."""
    text = yaml.safe_dump(asdict(machine), sort_keys=False)
    write_text(path, f"# {comment}\n# seconds, bytes per second\n{text}")


def _checked(path: Path, where: str, found: Any, known: list[str]) -> dict[str, Any]:
    if not isinstance(found, Mapping):
        raise ConfigError(f"{path}: {where.rstrip('.') or 'the file'}: needs fields {', '.join(known)}; {_REMEDY}")
    for name in found:
        if name not in known:
            raise ConfigError(f"{path}: {where}{name}: unknown field; choose from {', '.join(known)}")
    return dict(found)


def _number(path: Path, where: str, value: Any, least: float | None = None) -> float:
    """Return the value as a number above 0, or of at least `least`."""
    try:
        number = float(value)  # YAML reads 2e-6 as text
    except (TypeError, ValueError):
        number = -1.0
    if not (number > 0 if least is None else number >= least) or number == float("inf"):
        bound = "above 0" if least is None else f"of at least {least:g}"
        raise ConfigError(f"{path}: {where}: {value!r} is not a number {bound}; {_REMEDY}")
    return number
