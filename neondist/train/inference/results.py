"""Conversion of a network's outputs for writing: raw, as probabilities, or as classes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...costs.cross_entropy import softmax
from ...errors import ConfigError

KINDS = ("raw", "probabilities", "classes")


def kinds_of(raw: bool, probabilities: bool, classes: bool) -> list[str]:
    """Return the kinds that are asked for; the raw outputs if none is."""
    asked = zip(KINDS, (raw, probabilities, classes), strict=True)
    return [kind for kind, wanted in asked if wanted] or ["raw"]


def check_kinds(kinds: Sequence[str], channels: int, path: Path) -> None:
    """Raise ConfigError for what a network with so many outputs for a cell has not, or such a file cannot keep."""
    if "classes" in kinds and path.suffix.lower() in (".jpg", ".jpeg"):
        raise ConfigError(f"{path}: JPEG is lossy and would change classes; choose .png")
    for kind in kinds:
        if kind != "raw" and channels < 2:
            raise ConfigError(f"{kind}: the network has a single output channel, hence no classes; write raw outputs")


def channels_of(kind: str, channels: int) -> int:
    """Return how many numbers a cell has."""
    return 1 if kind == "classes" else channels


def dtype_of(kind: str, channels: int, dtype: Any) -> np.dtype:
    """Return what they are."""
    return np.min_scalar_type(channels - 1) if kind == "classes" else np.dtype(dtype)


def options_of(kind: str, channels: int, path: Path) -> dict[str, Any]:
    """Return how a file of one kind is written, beside what its format has by default."""
    if kind != "classes":
        return {}
    suffix = path.suffix.lower()
    if suffix in (".npy", ".h5", ".hdf5"):
        return {"channels": False}  # as NumPy's users have class maps; formats of images know no single channel anyway
    if path.name.lower().endswith(".ome.zarr"):
        return {"classes": channels}
    return {"palette": True} if suffix == ".png" and channels <= 256 else {}


def result(kind: str, y: np.ndarray) -> np.ndarray:
    """Return one kind of the outputs (n, *cells, C)."""
    if kind == "raw":
        return y
    if kind == "classes":
        return y.argmax(axis=-1)[..., None].astype(np.min_scalar_type(y.shape[-1] - 1))
    return softmax(y)


def paths_of(kinds: Sequence[str], path: Path) -> dict[str, Path]:
    """Return the file of each kind: of several, 'out.ome.zarr' becomes 'out-classes.ome.zarr'."""
    if len(kinds) == 1:
        return {kinds[0]: path}
    stem, dot, suffix = path.name.partition(".")
    return {kind: path.with_name(f"{stem}-{kind}{dot}{suffix}") for kind in kinds}
