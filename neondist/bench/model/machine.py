"""What the model knows of a machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from math import ceil, log2
from pathlib import Path
from typing import Any

import yaml

from ...errors import ConfigError

_REMEDY = "docs/performance.md has two examples"


@dataclass(frozen=True)
class Link:
    """A way between two ranks: a message of b bytes takes latency + b / bandwidth.

    Attributes
    ----------
    latency : seconds
    bandwidth : bytes per second
    """

    latency: float
    bandwidth: float

    def seconds(self, messages: float, count: float) -> float:
        """Return the time of messages of so many bytes together."""
        return messages * self.latency + count / self.bandwidth


@dataclass(frozen=True)
class Machine:
    """Nodes of equal cores, and the links inside and between them.

    Attributes
    ----------
    cores_per_node : int
        Cores (or GPUs): a rank each.
    nodes : int or None
        None: as many as it takes. Ranks beyond the cores share them.
    compute_factor : float
        Seconds of computing there, over those on the machine that predicts: 0.05 for a GPU twenty times as fast.
    slowdown : float
        Seconds of computing while all cores of a node work, over those of a core that works alone.
    node, network : Link
        Between ranks of one node, and of two.
    """

    cores_per_node: int
    node: Link
    network: Link
    nodes: int | None = None
    compute_factor: float = 1.0
    slowdown: float = 1.0

    def compute(self, alone: float, ranks: int) -> float:
        """Return the seconds of computing that took `alone` on one core here."""
        sharing = max(1.0, ranks / (self.cores_per_node * self.nodes)) if self.nodes else 1.0
        # between one busy core and all of them, memory is shared a part at a time
        busy = min(ranks, self.cores_per_node) - 1
        slowdown = 1 + (self.slowdown - 1) * busy / max(1, self.cores_per_node - 1)
        return alone * self.compute_factor * slowdown * sharing

    def link(self, ranks: int) -> Link:
        """Return the slowest link that so many ranks use."""
        return self.node if ranks <= self.cores_per_node or self.nodes == 1 else self.network

    def allreduce(self, ranks: int, count: float) -> float:
        """Return the seconds to sum so many bytes over ranks: a reduce-scatter and an allgather."""
        if ranks == 1:
            return 0.0
        return self.link(ranks).seconds(2 * ceil(log2(ranks)), 2 * count * (ranks - 1) / ranks)


def read(path: Path) -> Machine:
    """Return the machine of a YAML file; ConfigError says what is wrong with it."""
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); {_REMEDY}") from error
    values = _checked(path, "", found, [field.name for field in fields(Machine)])
    for name in "node", "network":
        link = _checked(path, f"{name}.", values.get(name), ["latency", "bandwidth"])
        values[name] = Link(
            *(_positive(path, f"{name}.{field}", link.get(field)) for field in ("latency", "bandwidth"))
        )
    for name in "cores_per_node", "nodes":
        if not (name == "nodes" and values.get(name) is None):
            values[name] = int(_positive(path, name, values.get(name)))
    for name in "compute_factor", "slowdown":
        values[name] = _positive(path, name, values.get(name, 1.0))
    return Machine(**values)


def write(path: Path, machine: Machine, comment: str) -> None:
    """Write a machine as YAML."""
    text = yaml.safe_dump(asdict(machine), sort_keys=False)
    path.write_text(f"# {comment}\n# seconds, bytes per second\n{text}", encoding="utf-8")


def _checked(path: Path, where: str, found: Any, known: list[str]) -> dict[str, Any]:
    if not isinstance(found, Mapping):
        raise ConfigError(f"{path}: {where.rstrip('.') or 'the file'}: needs fields {', '.join(known)}; {_REMEDY}")
    for name in found:
        if name not in known:
            raise ConfigError(f"{path}: {where}{name}: unknown field; choose from {', '.join(known)}")
    return dict(found)


def _positive(path: Path, where: str, value: Any) -> float:
    try:
        number = float(value)  # YAML reads 2e-6 as text
    except (TypeError, ValueError):
        number = 0.0
    if not number > 0 or number == float("inf"):
        raise ConfigError(f"{path}: {where}: {value!r} is not a number above 0; {_REMEDY}")
    return number
