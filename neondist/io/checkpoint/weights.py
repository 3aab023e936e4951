"""The weights of a file for a model that may be another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ...errors import DataError
from ...parallel import ParameterShard
from .pieces import Piece
from .read import Opened

MOST = 3
"""names of each kind that a message has at most"""


@dataclass(frozen=True)
class Taken:
    """Outcome of matching the arrays of a model with those of a file, by '<layer name>/<parameter>'.

    Attributes
    ----------
    taken : in both, with the same shape
    missing : in the model alone
    left : in the file alone
    misfits : in both, with different shapes: name, the file's, the model's
    """

    taken: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    misfits: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether the model has got all that it needs."""
        return not self.missing and not self.misfits

    def __str__(self) -> str:
        told = self.differences()
        return f"{len(self.taken)} arrays loaded{'; ' * bool(told)}{told}"

    def differences(self, most: int | None = None) -> str:
        """Return the names that differ, of each kind so many at most."""
        shapes = [f"{name} ({list(there)} there, {list(here)} here)" for name, there, here in self.misfits]
        kinds = {"not in the file": self.missing, "left over in the file": self.left, "of another shape": shapes}
        return "; ".join(f"{what}: {', '.join(_first(names, most))}" for what, names in kinds.items() if names)


def _first(names: list[str], most: int | None) -> list[str]:
    return names if most is None or len(names) <= most else [*names[:most], f"{len(names) - most} more"]


def take(file: Opened, arrays: Sequence[tuple[ParameterShard, Any]], strict: bool = False) -> Taken:
    """Fill a model's arrays from a file, by name, and return what became of them; collective.

    Parameters
    ----------
    file : a checkpoint of this model or of another
    arrays : `kept_arrays()["model"]` of a model
    strict : every array of the model has to be there

    Raises
    ------
    DataError
        On every rank: the file holds none of the arrays, or not all of them if `strict`.
    """
    there = file.facts.group("model")
    found = Taken()
    for shard, _ in arrays:
        name, shape = shard.full_name, tuple(shard.parameter.shape)
        if name not in there:
            found.missing.append(name)
        elif there[name] != shape:
            found.misfits.append((name, there[name], shape))
        else:
            found.taken.append(name)
    found.left.extend(sorted(there.keys() - {shard.full_name for shard, _ in arrays}))
    if (arrays and not found.taken) or (strict and not found.complete):
        what = f"does not fit the model: {found.differences(MOST)}"
        raise DataError(f"{file.facts.path}: {what}; name a checkpoint of this experiment")
    file.fill([Piece.of(shard, array, "model") for shard, array in arrays if shard.full_name in found.taken])
    return found
