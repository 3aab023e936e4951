"""Factors of the process grid, from the fields `grid` and `dist_mode` of an experiment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError
from ..registry import suggest

GRID_KEYS = ("replicas", "rows", "cols", "planes")


def parse_grid_factors(grid: Mapping[str, int | None] | None) -> dict[str, int]:
    """Return the given factors of the grid; raise ConfigError if a name is unknown."""
    for key in grid or {}:
        if key not in GRID_KEYS:
            raise ConfigError(f"grid: unknown key '{key}'{suggest(str(key), GRID_KEYS)}")
    return {key: int(value) for key, value in (grid or {}).items() if value is not None}


def apply_dist_mode(dist_mode: str | None, grid: Mapping[str, int]) -> dict[str, Any]:
    """Return the factors of the grid under a `dist_mode`; raise ConfigError if the given factors contradict it."""
    factors_by_mode: dict[str, dict[str, int | None]] = {
        "halopar": {"replicas": 1},
        "vecpar": {"replicas": 1},
        "datapar": {"replicas": None, "planes": 1, "rows": 1, "cols": 1},
        "halodatapar": {"replicas": None},  # as many as the ranks allow
    }
    mode_factors = factors_by_mode[dist_mode] if dist_mode is not None else {}
    for key, value in mode_factors.items():
        if value is not None and grid.get(key, value) != value:
            raise ConfigError(
                f"dist_mode: {dist_mode} means {key}: {value}, but grid has {key}: {grid[key]}; leave out {key}, or"
                " use halodatapar"
            )
    if dist_mode == "halodatapar" and not grid:
        raise ConfigError(
            "dist_mode: halodatapar needs a grid with a number of replicas or the tiles of each, such as {replicas: 2}"
            " or {rows: 2, cols: 2}"
        )
    return {**mode_factors, **grid}
