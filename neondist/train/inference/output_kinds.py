"""Conversion of a network's outputs for writing: raw, as probabilities, or as classes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...costs.cross_entropy import softmax
from ...errors import ConfigError

OUTPUT_KINDS = ("raw", "probabilities", "classes")


def selected_output_kinds(raw: bool, probabilities: bool, classes: bool) -> list[str]:
    """Return the selected kinds of output; raw outputs by default."""
    kinds_and_flags = zip(OUTPUT_KINDS, (raw, probabilities, classes), strict=True)
    return [kind for kind, selected in kinds_and_flags if selected] or ["raw"]


def check_output_kinds(kinds: Sequence[str], channels: int, path: Path) -> None:
    """Raise ConfigError for kinds that need more output channels, or that the format of `path` cannot store."""
    if "classes" in kinds and path.suffix.lower() in (".jpg", ".jpeg"):
        raise ConfigError(f"{path}: JPEG is lossy and would change classes; choose .png")
    for kind in kinds:
        if kind != "raw" and channels < 2:
            raise ConfigError(f"{kind}: the network has a single output channel, hence no classes; write raw outputs")


def count_output_channels(kind: str, channels: int) -> int:
    """Return the number of channels of a kind of output."""
    return 1 if kind == "classes" else channels


def output_dtype(kind: str, channels: int, dtype: Any) -> np.dtype:
    """Return the dtype of a kind of output."""
    return np.min_scalar_type(channels - 1) if kind == "classes" else np.dtype(dtype)


def sink_options(kind: str, channels: int, path: Path) -> dict[str, Any]:
    """Return the options of `create_sink` for a kind of output that differ from the format's defaults."""
    if kind != "classes":
        return {}
    suffix = path.suffix.lower()
    if suffix in (".npy", ".h5", ".hdf5"):
        return {"channels": False}  # class maps without a channel axis, as usual in NumPy
    if path.name.lower().endswith(".ome.zarr"):
        return {"classes": channels}
    return {"palette": True} if suffix == ".png" and channels <= 256 else {}


def convert_to_output_kind(kind: str, y: np.ndarray) -> np.ndarray:
    """Convert the outputs (n, *cells, C) to one kind."""
    if kind == "raw":
        return y
    if kind == "classes":
        return y.argmax(axis=-1)[..., None].astype(np.min_scalar_type(y.shape[-1] - 1))
    return softmax(y)


def output_paths(kinds: Sequence[str], path: Path) -> dict[str, Path]:
    """Return the file of each kind: with several kinds, 'out.ome.zarr' becomes 'out-classes.ome.zarr'."""
    if len(kinds) == 1:
        return {kinds[0]: path}
    stem, dot, suffix = path.name.partition(".")
    return {kind: path.with_name(f"{stem}-{kind}{dot}{suffix}") for kind in kinds}
