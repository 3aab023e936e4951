"""Weights of the cells of a grid: the cosine of latitude, or a variable of a file."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..errors import ConfigError, DataError, ShapeError
from ..geometry import Box
from .fields import Fields
from .table import open_source

COSINE = "cos(lat)"
_POLE = 90.001  # degrees, since files may have them in other precision
_ROWS = 256  # of a file that are summed at once


def check_weights(weights: str, extent: Sequence[int], fields: Fields | None) -> None:
    """Raise DataError or ConfigError unless there are weights for outputs of this extent.

    Parameters
    ----------
    weights : str
        'cos(lat)', or a file: 'FILE.nc:NAME'.
    extent : tuple of int, global
    fields : Fields, or None
        What the outputs are.
    """
    if weights == COSINE:
        _latitude(extent, fields)
    else:
        _Weights(weights, extent).close()


def cell_weights(weights: str, extent: Sequence[int], box: Box, fields: Fields | None) -> np.ndarray:
    """Return the weights (*box, 1) of the cells of a box, in float64; those of all cells have the mean 1.

    Raises
    ------
    DataError, ConfigError
        As `check_weights`; or weights are negative, or all zero.
    """
    if weights == COSINE:
        latitude = _latitude(extent, fields)
        found = np.cos(np.deg2rad(latitude))
        found = np.maximum(found, 0.0)  # rounding, at the poles
        whole = np.broadcast_to(found[:, None] if found.ndim == 1 else found, tuple(extent))
        return np.ascontiguousarray((whole[box.slices] / found.mean())[..., None])
    opened = _Weights(weights, extent)
    try:
        return (opened.read(box) / opened.mean())[..., None]
    finally:
        opened.close()


def _latitude(extent: Sequence[int], fields: Fields | None) -> np.ndarray:
    if fields is None:
        raise ConfigError(
            f"weights: {COSINE} needs a data set with latitudes, such as ClimateFiles; or give a file, 'FILE.nc:NAME'"
        )
    if fields.latitude is None:
        raise DataError(
            f"{fields.source}: has no latitude, which weights: {COSINE} needs; add a coordinate along its rows with"
            " units degrees_north, or give weights: 'FILE.nc:NAME'"
        )
    if not (np.abs(fields.latitude) <= _POLE).all():  # NaN is not
        raise DataError(
            f"{fields.source}: has latitudes beyond 90 degrees, or missing ones, which weights: {COSINE} cannot use;"
            " correct the coordinate, or give weights: 'FILE.nc:NAME'"
        )
    if tuple(extent) != tuple(fields.extent):
        raise ShapeError(
            f"weights: outputs have {list(extent)} cells, but the fields {list(fields.extent)}; make the network"
            " preserve the extent (padding: same)"
        )
    return fields.latitude


class _Weights:
    """A variable of weights (Y, X), or (Y,) for all columns."""

    def __init__(self, name: str, extent: Sequence[int]) -> None:
        self._source, self._extent = open_source(name), tuple(extent)
        given = {letter: n for letter, n in zip(self._source.axes, self._source.shape, strict=True) if n > 1}
        wanted = dict(zip("ZYX"[3 - len(self._extent) :], self._extent, strict=True))
        if any(wanted.get(letter) != n for letter, n in given.items()):
            self._source.close()
            raise DataError(f"{name}: has weights for {given}, but outputs have {wanted}; give one for each cell")

    def read(self, box: Box) -> np.ndarray:
        """Return the weights of a box."""
        names = "ZYX"[3 - box.ndim :]
        known = dict(zip(names, box.slices, strict=True))
        letters = dict(zip(self._source.axes, self._source.shape, strict=True))
        cells = [known[x] if x in known and n > 1 else slice(0, 1) for x, n in letters.items()]
        found = self._source.read(cells)
        kept = [cut.stop - cut.start if letters.get(x, 1) > 1 else 1 for x, cut in known.items()]
        order = [x for x in letters if x in known]
        found = found.reshape([n for x, n in zip(letters, found.shape, strict=True) if x in known])
        found = np.transpose(found, [order.index(x) for x in names if x in order]).reshape(kept).astype(np.float64)
        if not (np.isfinite(found).all() and (found >= 0).all()):
            raise DataError(f"{self._source.path}: has negative or missing weights; correct them")
        return np.broadcast_to(found, box.shape)

    def mean(self) -> float:
        """Return the mean over all cells, read by rows: the same on every rank."""
        rows, *others = self._extent
        sums = 0.0
        for first in range(0, rows, _ROWS):
            box = Box((first, *[0] * len(others)), (min(first + _ROWS, rows), *others))
            sums += float(self.read(box).sum())
        if not sums:
            raise DataError(f"{self._source.path}: all weights are 0; give positive weights")
        return sums / float(np.prod(self._extent))

    def close(self) -> None:
        """Close the file."""
        self._source.close()
