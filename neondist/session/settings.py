"""The fields of an experiment: checked when it is made, so that a YAML file's error has the field's line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import ConfigError
from ..metrics import Metric, Misclassification
from ..models import Model
from ..registry import suggest
from ..registry.ranges import integer

GRID_KEYS = ("replicas", "rows", "cols", "planes")


def require(field: str, value: Any, kind: type, example: str) -> None:
    """Raise ConfigError if `value` is not of the class `kind`."""
    if not isinstance(value, kind):
        raise ConfigError(f"{field}: {value!r} cannot be used; give {example}")


def grid_factors(grid: Mapping[str, int | None] | None) -> dict[str, int]:
    """Return the factors of the grid that are given; ConfigError if a name or a number is wrong."""
    if not isinstance(grid, Mapping | None):
        raise ConfigError(f"grid: {grid!r} cannot be used; give a mapping such as {{replicas: 1, rows: 2, cols: 2}}")
    for key in grid or {}:
        if key not in GRID_KEYS:
            raise ConfigError(f"grid: unknown key '{key}'{suggest(str(key), GRID_KEYS)}")
    return {key: integer(f"grid: {key}", value, 1) for key, value in (grid or {}).items() if value is not None}


def all_metrics(metrics: Sequence[Metric] | None) -> list[Metric]:
    """Return the misclassification and the metrics that are asked for beside it."""
    if not isinstance(metrics, Sequence | None):
        raise ConfigError(f"metrics: {metrics!r} cannot be used; give a list such as [!TopK {{k: 5}}]")
    for metric in metrics or ():
        require("metrics", metric, Metric, "a list of metrics such as [!TopK {k: 5}]")
    return list({metric.name: metric for metric in (Misclassification(), *(metrics or ()))}.values())


def settle(model: Model, backend: str | None, dtype: str | None, seed: int | None) -> None:
    """Give the model what the experiment says in its place; ConfigError if that is no dtype or seed."""
    if backend is not None:
        model.backend = backend
    if dtype is not None:
        if str(dtype) not in ("float32", "float64"):
            raise ConfigError(f"dtype: {dtype!r} cannot be used; give float32 or float64")
        model.dtype = np.dtype(dtype)
    if seed is not None:
        model.seed = integer("seed", seed, 0)
