"""Contents of an HDF5 file, validated before use."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import DataError
from ...io.hdf5 import array_names, faults, find, open_file, plain, probe, read_whole, state
from ...system.memory import require_room

LARGEST_CHUNK = 1 << 30  # bytes that one read may ask for beside its own; files in use have chunks of a few MiB
_MOST_PACKED = 1032  # deflate cannot pack more bytes into one


@dataclass(frozen=True)
class ArrayFacts:
    """An array of a file: its full name, shape, dtype, and the numbers that are written beside it."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    attributes: dict[str, np.ndarray]


@dataclass(frozen=True)
class GroupFacts:
    """The samples of one split.

    Attributes
    ----------
    path, state : the file, and what `hdf5.state` told of it before it was looked at
    images : (N, *spatial, C)
    labels : (N,) or (N, K), read whole; or maps (N, *spatial) or (N, *spatial, C), of any extent
    values : the labels, where they are (N,) or (N, K); None where they are maps
    """

    path: Path
    state: tuple[int, int]
    images: ArrayFacts
    labels: ArrayFacts
    values: np.ndarray | None

    def __len__(self) -> int:
        return self.images.shape[0]

    @property
    def maps(self) -> bool:
        """Whether every cell has a target of its own."""
        return self.values is None


def look(path: Path, group: str, images: str, labels: str) -> GroupFacts | None:
    """Return the facts of a group, None if the file has none of that name; the images are not read.

    Raises
    ------
    DataError
        The file is missing, damaged, or an array is missing or of another kind.
    """
    before = state(path)
    with open_file(path) as file, faults(path):
        if find(file, group) is None:
            return None
        return GroupFacts(path, before, *_arrays(path, file, group, images, labels))


def content(groups: Iterable[GroupFacts]) -> str:
    """Return a hash of some of the cells, or of their checksums, of the arrays of groups."""
    hashes = []
    for group in groups:
        with open_file(group.path) as file, faults(group.path):
            hashes += [f"{probe(file, array.name):08x}" for array in (group.images, group.labels)]
    return " ".join(hashes)


def _arrays(
    path: Path, file: Any, group: str, images: str, labels: str
) -> tuple[ArrayFacts, ArrayFacts, np.ndarray | None]:
    x, y = (_array(path, file, group, name) for name in (images, labels))
    if len(x.shape) < 3:
        raise DataError(
            f"{path}: {x.name} has shape {x.shape}; images are (N, H, W, C), volumes (N, D, H, W, C): add an axis of"
            " length 1 for one channel"
        )
    if x.dtype.kind == "b":
        raise DataError(f"{path}: {x.name} holds booleans; store them as uint8")
    if y.shape[0] != x.shape[0]:
        raise DataError(
            f"{path}: {x.name} has {x.shape[0]} samples, {y.name} has {y.shape[0]}; give one label per sample"
        )
    spatial = len(x.shape) - 2
    if len(y.shape) > spatial:
        return x, y, None
    if len(y.shape) > 2:
        raise DataError(f"{path}: {y.name} has shape {y.shape}; give (N,) classes, or maps of {spatial} spatial axes")
    if find(file, y.name).nbytes > max(_MOST_PACKED * path.stat().st_size, 1 << 20):
        raise DataError(f"{path}: {y.name} declares {y.shape[0]} labels, more than the file can hold; it is damaged")
    require_room(2 * find(file, y.name).nbytes, f"{path}: {y.name}", "use a machine with more")
    return x, y, read_whole(file, y.name)


def _array(path: Path, file: Any, group: str, name: str) -> ArrayFacts:
    import h5py

    full = f"{group.strip('/')}/{name}".lstrip("/")
    array = find(file, full)
    if array is None:
        raise DataError(f"{path}: has no array '{full}'; it has {', '.join(array_names(file)) or 'none'}: name yours")
    if not isinstance(array, h5py.Dataset) or not plain(array):
        raise DataError(f"{path}: '{full}' is not an array of numbers")
    if 0 in array.shape or not array.shape:
        raise DataError(f"{path}: {full} is empty: its shape is {array.shape}")
    piece = np.prod(array.chunks or (1,), dtype=object) * array.dtype.itemsize
    if piece > LARGEST_CHUNK:
        raise DataError(f"{path}: {full} has chunks of {piece / 1e9:.1f} GB; write it again with chunks of about 1 MB")
    ids = {key: array.attrs.get_id(key) for key in ("mean", "std", "scale", "classes") if key in array.attrs}
    beside = {key: np.asarray(array.attrs[key]) for key, found in ids.items() if plain(found) and len(found.shape) < 2}
    return ArrayFacts(full, array.shape, array.dtype, beside)
