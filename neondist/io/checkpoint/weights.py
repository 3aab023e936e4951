"""Loading of weights by name, possibly into a different model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ...errors import DataError
from ...parallel import ParameterShard
from ...terminal.console import counted
from .pieces import ArrayPart
from .read import CheckpointReader

MAX_LISTED_NAMES = 3  # maximum number of names of each kind in a message


@dataclass(frozen=True)
class WeightMatch:
    """Names '<layer name>/<parameter>' of the arrays of a model and of a file, by the outcome of matching.

    Attributes
    ----------
    loaded : names in both, with the same shape
    missing : names only in the model
    unused : names only in the file
    mismatched : (name, shape in file, shape in model) of arrays in both, with different shapes
    """

    loaded: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    mismatched: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)

    @property
    def is_fully_loaded(self) -> bool:
        """Whether all arrays of the model were loaded."""
        return not self.missing and not self.mismatched

    def __str__(self) -> str:
        differences = self.describe_differences()
        return f"{counted(len(self.loaded), 'array')} loaded{'; ' * bool(differences)}{differences}"

    def describe_differences(self, max_names: int | None = None) -> str:
        """Describe the differences, with at most `max_names` names of each kind."""
        mismatches = [f"{name} (file {list(saved)}, model {list(own)})" for name, saved, own in self.mismatched]
        names_by_kind = {"not in the file": self.missing, "not in the model": self.unused, "shape mismatch": mismatches}
        return "; ".join(
            f"{kind}: {', '.join(_shorten_list(names, max_names))}" for kind, names in names_by_kind.items() if names
        )


def _shorten_list(names: list[str], max_names: int | None) -> list[str]:
    if max_names is None or len(names) <= max_names:
        return names
    return [*names[:max_names], f"{len(names) - max_names} more"]


def load_weights(
    file: CheckpointReader, arrays: Sequence[tuple[ParameterShard, Any]], strict: bool = False
) -> WeightMatch:
    """Load a model's arrays from a file by name. Collective.

    Parameters
    ----------
    file : a checkpoint of this model or of another
    arrays : `checkpoint_arrays()["model"]` of a model
    strict : whether all arrays of the model are required

    Raises
    ------
    DataError
        On every rank, if no array matches in name and shape, or if `strict` and not all arrays of the model do.
    """
    saved_shapes = file.contents.group("model")
    match = WeightMatch()
    for shard, _ in arrays:
        name, shape = shard.full_name, tuple(shard.parameter.shape)
        if name not in saved_shapes:
            match.missing.append(name)
        elif saved_shapes[name] != shape:
            match.mismatched.append((name, saved_shapes[name], shape))
        else:
            match.loaded.append(name)
    match.unused.extend(sorted(saved_shapes.keys() - {shard.full_name for shard, _ in arrays}))
    if (arrays and not match.loaded) or (strict and not match.is_fully_loaded):
        problem = f"does not fit the model: {match.describe_differences(MAX_LISTED_NAMES)}"
        raise DataError(f"{file.contents.path}: {problem}; specify a checkpoint of this experiment")
    file.fill_parts([ArrayPart.of(shard, array, "model") for shard, array in arrays if shard.full_name in match.loaded])
    return match
