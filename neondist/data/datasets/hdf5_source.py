"""Contents of an HDF5 file, validated before use."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import DataError
from ...io.hdf5.checksums import fingerprint_array, read_verified_array
from ...io.hdf5.reader import array_names, convert_hdf5_errors, find_object, is_numeric, open_hdf5, size_and_mtime
from ...system.memory import require_memory
from ...terminal.console import counted

MAX_CHUNK_BYTES = 1 << 30  # maximum bytes of a chunk, which is decoded whole; typical chunks have a few MiB
_MAX_COMPRESSION_RATIO = 1032  # maximum compression ratio of deflate


@dataclass(frozen=True)
class ArrayInfo:
    """An array of a file: its full name, shape, dtype, numeric attributes, and the names of its classes, if any."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    numeric_attributes: dict[str, np.ndarray]
    class_names: tuple[str, ...] = ()


@dataclass(frozen=True)
class HDF5GroupInfo:
    """The samples of one split.

    Attributes
    ----------
    path, file_size_and_mtime : the file, and its `hdf5.size_and_mtime` from before it was read
    images : (N, *spatial, C)
    labels : (N,) or (N, K), read whole; or maps (N, *spatial) or (N, *spatial, C) of any extent
    sample_labels : the labels if they are (N,) or (N, K); None for maps
    """

    path: Path
    file_size_and_mtime: tuple[int, int]
    images: ArrayInfo
    labels: ArrayInfo
    sample_labels: np.ndarray | None

    def __len__(self) -> int:
        return self.images.shape[0]

    @property
    def has_label_maps(self) -> bool:
        """Whether every cell has its own target."""
        return self.sample_labels is None


def read_group_info(path: Path, group: str, images: str, labels: str) -> HDF5GroupInfo | None:
    """Return the description of a group, or None if it does not exist; the images are not read.

    Raises
    ------
    DataError
        If the file is missing or damaged, or an array is missing or invalid.
    """
    file_state = size_and_mtime(path)
    with open_hdf5(path) as file, convert_hdf5_errors(path):
        if find_object(file, group) is None:
            return None
        return HDF5GroupInfo(path, file_state, *_read_hdf5_array_infos(path, file, group, images, labels))


def hash_content(groups: Iterable[HDF5GroupInfo]) -> str:
    """Return a hash of the groups' arrays, computed from some of the cells or their checksums."""
    hashes = []
    for group in groups:
        with open_hdf5(group.path) as file, convert_hdf5_errors(group.path):
            hashes += [f"{fingerprint_array(file, array.name):08x}" for array in (group.images, group.labels)]
    return " ".join(hashes)


def _read_hdf5_array_infos(
    path: Path, file: Any, group: str, images: str, labels: str
) -> tuple[ArrayInfo, ArrayInfo, np.ndarray | None]:
    x, y = (_read_array_info(path, file, group, name) for name in (images, labels))
    if len(x.shape) < 3:
        raise DataError(
            f"{path}: {x.name} has shape {x.shape}; images are (N, H, W, C), volumes (N, D, H, W, C): add an axis of"
            " length 1 for one channel"
        )
    if x.dtype.kind == "b":
        raise DataError(f"{path}: {x.name} holds booleans; store them as uint8")
    if y.shape[0] != x.shape[0]:
        raise DataError(
            f"{path}: {x.name} has {counted(x.shape[0], 'sample')}, {y.name} has {y.shape[0]}; give one label per"
            " sample"
        )
    ndim = len(x.shape) - 2
    if len(y.shape) > ndim:
        return x, y, None
    if len(y.shape) > 2:
        raise DataError(f"{path}: {y.name} has shape {y.shape}; give (N,) classes, or maps of {ndim} spatial axes")
    if find_object(file, y.name).nbytes > max(_MAX_COMPRESSION_RATIO * path.stat().st_size, 1 << 20):
        raise DataError(
            f"{path}: {y.name} declares {counted(y.shape[0], 'label')}, more than fit in the file; write it again"
        )
    require_memory(2 * find_object(file, y.name).nbytes, f"{path}: {y.name}", "use a machine with more memory")
    return x, y, read_verified_array(file, y.name)


def _read_class_names(array: Any) -> tuple[str, ...]:
    """Return the class names in the attribute 'names' of labels; () if there are none."""
    import h5py

    attribute = array.attrs.get_id("names") if "names" in array.attrs else None
    if attribute is None or len(attribute.shape) != 1 or h5py.check_string_dtype(attribute.dtype) is None:
        return ()
    return tuple(map(os.fsdecode, array.attrs["names"].tolist()))


def _read_array_info(path: Path, file: Any, group: str, name: str) -> ArrayInfo:
    import h5py

    full = f"{group.strip('/')}/{name}".lstrip("/")
    array = find_object(file, full)
    if array is None:
        names = ", ".join(array_names(file))
        remedy = f"choose one of {names}" if names else "it has no arrays: specify another file"
        raise DataError(f"{path}: has no array '{full}'; {remedy}")
    if not isinstance(array, h5py.Dataset) or not is_numeric(array):
        raise DataError(f"{path}: '{full}' is not an array of numbers; specify one")
    if 0 in array.shape or not array.shape:
        raise DataError(f"{path}: {full} is empty: its shape is {array.shape}; write at least one sample")
    chunk = np.prod(array.chunks or (1,), dtype=object) * array.dtype.itemsize
    if chunk > MAX_CHUNK_BYTES:
        raise DataError(f"{path}: {full} has chunks of {chunk / 1e9:.1f} GB; write it again with chunks of about 1 MB")
    ids = {key: array.attrs.get_id(key) for key in ("mean", "std", "scale", "classes") if key in array.attrs}
    attrs = {key: np.asarray(array.attrs[key]) for key, kind in ids.items() if is_numeric(kind) and len(kind.shape) < 2}
    return ArrayInfo(full, array.shape, array.dtype, attrs, _read_class_names(array))
