"""Weights of grid cells: the cosine of latitude, or a variable in a file."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..errors import ConfigError, DataError, ShapeError
from ..geometry import Box
from .coordinates import coordinate_values, require_equal_coordinates
from .fields import FieldMetadata
from .table import open_source

COSINE = "cos(lat)"
_MAX_LATITUDE = 90.001  # degrees, with a margin for rounding in files
_ROWS_PER_BLOCK = 256  # rows summed at once


def check_cell_weights(weights: str, extent: Sequence[int], fields: FieldMetadata | None) -> None:
    """Check that weights are available for outputs of this extent; else raise DataError, ConfigError or ShapeError.

    Parameters
    ----------
    weights : str
        'cos(lat)', or a variable in a file: 'FILE.nc:NAME'.
    extent : tuple of int, global
    fields : FieldMetadata, or None
        Metadata of the outputs.
    """
    if weights == COSINE:
        _require_latitude(extent, fields)
    else:
        _CellWeightVariable(weights, extent, fields).close()


def cell_weights(weights: str, extent: Sequence[int], box: Box, fields: FieldMetadata | None) -> np.ndarray:
    """Return the float64 weights (*box, 1) of the cells of a box, normalised to a global mean of 1.

    Raises
    ------
    DataError, ConfigError, ShapeError
        As from `check_cell_weights`, or if weights are negative or all zero.
    """
    if weights == COSINE:
        latitude = _require_latitude(extent, fields)
        cosine = np.cos(np.deg2rad(latitude))
        cosine = np.maximum(cosine, 0.0)  # rounding may give negative cosines at the poles
        cosine_map = np.broadcast_to(cosine[:, None] if cosine.ndim == 1 else cosine, tuple(extent))
        return np.ascontiguousarray((cosine_map[box.slices] / cosine.mean())[..., None])
    variable = _CellWeightVariable(weights, extent, fields)
    try:
        return (variable.read(box) / variable.mean())[..., None]
    finally:
        variable.close()


def _require_latitude(extent: Sequence[int], fields: FieldMetadata | None) -> np.ndarray:
    if fields is None:
        raise ConfigError(
            f"weights: {COSINE} needs a data set with latitudes; use ClimateFiles, or give weights: 'FILE.nc:NAME'"
        )
    if fields.latitude is None:
        raise DataError(
            f"{fields.source}: has no latitude, which weights: {COSINE} needs; add a coordinate along its rows"
            " with units degrees_north, or give weights: 'FILE.nc:NAME'"
        )
    if not (np.abs(fields.latitude) <= _MAX_LATITUDE).all():  # also rejects NaN
        raise DataError(
            f"{fields.source}: weights: {COSINE} requires latitudes up to 90 degrees, but some are larger or missing;"
            " correct the coordinate, or give weights: 'FILE.nc:NAME'"
        )
    if tuple(extent) != tuple(fields.extent):
        raise ShapeError(
            f"weights: outputs have {list(extent)} cells, but the fields have {list(fields.extent)}; make the network"
            " preserve the extent (padding: same)"
        )
    return fields.latitude


class _CellWeightVariable:
    """Weights from a variable in a file, broadcast along spatial axes that it lacks or that have extent 1."""

    def __init__(self, name: str, extent: Sequence[int], fields: FieldMetadata | None) -> None:
        self._source, self._extent = open_source(name), tuple(extent)
        self._source.convert_integers()
        stored_extents = {letter: n for letter, n in zip(self._source.axes, self._source.shape, strict=True) if n > 1}
        expected = dict(zip("ZYX"[3 - len(self._extent) :], self._extent, strict=True))
        try:
            if any(expected.get(letter) != n for letter, n in stored_extents.items()):
                raise DataError(
                    f"{name}: has shape {stored_extents}, expected {expected}; give one weight for each cell of the"
                    " outputs"
                )
            if fields is not None and self._extent == tuple(fields.extent):
                self._check_coordinates(fields)
        except BaseException:
            self.close()
            raise

    def _check_coordinates(self, fields: FieldMetadata) -> None:
        """Raise DataError if the weights have other rows or columns than the fields."""
        variables = self._source.auxiliary_variables()[0]
        for letter, reference in fields.coordinates.items():
            values = coordinate_values(self._source, letter, variables)
            if values is not None and reference is not None and values.shape == reference.shape:
                require_equal_coordinates(self._source, letter, values, fields.source, reference)

    def read(self, box: Box) -> np.ndarray:
        letters = "ZYX"[3 - box.ndim :]
        slice_by_letter = dict(zip(letters, box.slices, strict=True))
        stored = dict(zip(self._source.axes, self._source.shape, strict=True))
        cells = [slice_by_letter[x] if x in slice_by_letter and n > 1 else slice(0, 1) for x, n in stored.items()]
        values = self._source.read(cells)
        shape = [cut.stop - cut.start if stored.get(x, 1) > 1 else 1 for x, cut in slice_by_letter.items()]
        order = [x for x in stored if x in slice_by_letter]
        values = values.reshape([n for x, n in zip(stored, values.shape, strict=True) if x in slice_by_letter])
        values = np.transpose(values, [order.index(x) for x in letters if x in order]).reshape(shape).astype(np.float64)
        if not (np.isfinite(values).all() and (values >= 0).all()):
            raise DataError(f"{self._source.path}: has negative or missing weights; correct them")
        return np.broadcast_to(values, box.shape)

    def mean(self) -> float:
        """Return the mean over all cells, summed in fixed blocks of rows, so that it is equal on all ranks."""
        num_rows, *other_extents = self._extent
        total = 0.0
        for first in range(0, num_rows, _ROWS_PER_BLOCK):
            box = Box((first, *[0] * len(other_extents)), (min(first + _ROWS_PER_BLOCK, num_rows), *other_extents))
            total += float(self.read(box).sum())
        if not total:
            raise DataError(f"{self._source.path}: all weights are 0; give positive weights")
        return total / float(np.prod(self._extent))

    def close(self) -> None:
        self._source.close()
