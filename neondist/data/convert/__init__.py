"""Conversion of image folders, NumPy files, IDX files and CIFAR-10 to HDF5, a few samples at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import ConfigError, DataError, OutputError
from ...formats.image_loader import ImageLoader
from ...io import hdf5
from ...io.hdf5 import ChecksumTable
from ...io.regular_file import open_regular
from ...system.memory import require_memory
from ..chunks import chunk_shape
from ..raw_values import white_value
from ..split_source import SplitSource
from .from_arrays import npy_splits, npz_splits
from .from_images import image_splits
from .from_official import cifar_splits, find_idx_files, idx_splits, read_idx_magic_number

ConversionProgress = Callable[[str, int, int], None]
_SAMPLE_COPIES_IN_MEMORY = 3  # copies of a sample: as read, as written, and HDF5's own
_BLOCK_CELLS = 1 << 17  # cells whose 64-bit copies stay in cache


def open_split_sources(
    sources: Sequence[Path], loader: ImageLoader, table: Path | None = None, maps: Path | None = None
) -> dict[str, SplitSource]:
    """Return the splits ('train', optionally 'validation' and 'test') of one or more files or of a folder.

    Raises
    ------
    DataError, ConfigError
        If the format is unknown, a file is damaged, or an option does not apply to the sources.
    """
    paths = [Path(os.path.expanduser(source)) for source in sources]
    for path in (*paths, *(extra for extra in (table, maps) if extra is not None)):
        if not os.path.exists(path):  # Path.exists would raise without permission
            raise DataError(f"{path}: no such file or folder; check the path and its permissions")
    if table is not None and maps is not None:
        raise ConfigError(
            "--labels and --maps are mutually exclusive; use --labels for classes of images, --maps for pixels"
        )
    try:
        return _create_split_sources(paths, loader, table, maps)
    except OSError as error:
        path, reason = error.filename or paths[0], error.strerror or error
        raise DataError(f"{path}: cannot be read ({reason}); check the path and its permissions") from error


def _create_split_sources(
    paths: list[Path], loader: ImageLoader, table: Path | None, maps: Path | None
) -> dict[str, SplitSource]:
    first = paths[0]
    if first.is_dir() and len(paths) == 1:
        if table is None and maps is None:
            if any((folder / "test_batch.bin").is_file() for folder in (first, first / "cifar-10-batches-bin")):
                return _reject_image_options(cifar_splits(first), loader)
            if official := find_idx_files(first):
                return _reject_image_options(idx_splits(official), loader)
        return image_splits(first, loader, table, maps)
    if table is not None or maps is not None:
        raise ConfigError(
            f"--labels and --maps require a folder of images as the only source, not {first}; give that folder alone,"
            " or leave --labels and --maps out"
        )
    if all(path.suffix == ".npy" for path in paths):
        return _reject_image_options(npy_splits(paths), loader)
    if first.suffix == ".npz" and len(paths) == 1:
        return _reject_image_options(npz_splits(first), loader)
    if first.name.endswith((".tar.gz", ".tgz")) and len(paths) == 1:
        return _reject_image_options(cifar_splits(first), loader)
    if all(path.is_file() and read_idx_magic_number(path) for path in paths):
        return _reject_image_options(idx_splits(paths), loader)
    raise DataError(
        f"{first}: unknown source; give a folder of images, IMAGES.npy LABELS.npy, a .npz, IDX files or their folder,"
        " or CIFAR-10 in binary form"
    )


def _reject_image_options(splits: dict[str, SplitSource], loader: ImageLoader) -> dict[str, SplitSource]:
    if loader != ImageLoader():
        raise ConfigError(
            "--size and --mode apply to folders of images; leave them out, since arrays are written unchanged"
        )
    return splits


def convert(
    splits: dict[str, SplitSource], target: Path, compress: bool = False, progress: ConversionProgress | None = None
) -> dict[str, tuple[int, ...]]:
    """Write the splits atomically to an HDF5 file for `HDF5Dataset`; return the shape of each split's images.

    Parameters
    ----------
    splits : from `open_split_sources`; each is read once
    target : an existing file is replaced if it is HDF5
    compress : compress the chunks with gzip
    progress : called as progress(split name, samples written, total samples)

    Raises
    ------
    DataError
        If a source is damaged, its samples differ in shape, or it has invalid values or labels.
    OutputError
        If the file cannot be written.
    """
    if os.path.exists(target) and not _is_hdf5_or_empty(target):
        raise OutputError(f"{target}: exists but is not an HDF5 file, so it is not replaced; choose another name")
    if len({split.shape for split in splits.values()}) > 1:
        shapes = ", ".join(f"{name} {split.shape}" for name, split in splits.items())
        raise DataError(f"samples of the splits differ in shape: {shapes}; scale them with --size")
    for name, split in splits.items():
        _require_sample_memory(name, split)
    report_progress = progress or (lambda name, done, total: None)
    try:
        with hdf5.NewHDF5File(target) as new_file:
            for name, split in splits.items():
                _write_split(new_file, new_file.file.create_group(name), name, split, compress, report_progress)
    except OSError as error:
        raise OutputError(
            f"{target}: cannot be written ({error.strerror or error}); any existing file is unchanged; free disk"
            " space, or choose another path"
        ) from error
    except MemoryError as error:
        raise DataError(f"{target}: not enough memory for one sample of the source; crop its images first") from error
    return {name: (split.count, *split.shape) for name, split in splits.items()}


def _require_sample_memory(name: str, split: SplitSource) -> None:
    """Raise DataError if one sample does not fit in memory, before it is allocated."""
    sample_bytes = int(np.prod(split.shape, dtype=object)) * split.dtype.itemsize
    subject = f"{name}: a sample of {' x '.join(map(str, split.shape))}"
    require_memory(_SAMPLE_COPIES_IN_MEMORY * sample_bytes, subject, "cut it into pieces first")


def _write_split(
    new_file: hdf5.NewHDF5File, group: Any, name: str, split: SplitSource, compress: bool, progress: ConversionProgress
) -> None:
    filters = {"compression": "gzip", "compression_opts": 1, "shuffle": True} if compress else {}
    chunks = chunk_shape(split.shape[:-1], split.shape[-1], split.dtype.itemsize)
    images = group.create_dataset(
        "images", (split.count, *split.shape), split.dtype, chunks=chunks, fletcher32=True, **filters
    )
    labels_shape = (split.count, *split.label_shape)
    labels = group.create_dataset(
        "labels", labels_shape, split.label_dtype, fletcher32=True, chunks=_label_chunk_shape(split), **filters
    )
    scale = white_value(split.dtype)
    checksum_tables = ChecksumTable(images.shape, images.chunks), ChecksumTable(labels.shape, labels.chunks)
    label_blocks: list[np.ndarray] = []  # labels that are not maps: their chunks span several blocks of images
    label_checker = ClassLabelChecker(name) if _labels_are_classes(split) else None
    done = 0
    sums = np.zeros((2, split.shape[-1]))
    progress(name, 0, split.count)
    for x, y in split.read_blocks():
        if label_checker is not None:
            label_checker.check_block(y)
        images[done : done + len(x)] = x
        labels[done : done + len(y)] = y
        checksum_tables[0].add(x, done)
        if labels.chunks[0] == 1:
            checksum_tables[1].add(y, done)
        else:
            label_blocks.append(y)
        new_file.raise_deferred_error()
        for image in x:
            _add_moments(sums, image.reshape(-1, split.shape[-1]), scale)
        if not np.isfinite(sums).all():
            index = next((n for n, image in enumerate(x) if not np.isfinite(image).all()), 0)
            raise DataError(f"{name}: sample {done + index} has values that are not finite, or too large; correct them")
        done += len(x)
        progress(name, done, split.count)
    if done != split.count:
        raise DataError(
            f"{name}: {done} of {split.count} samples were read, since the source has changed; run the command again"
        )
    if label_blocks:
        checksum_tables[1].add(np.concatenate(label_blocks), 0)
    for table, array in zip(checksum_tables, (images, labels), strict=True):
        table.write(new_file.file, array.name.strip("/"))
    mean, mean_square = sums / max(1, split.count * int(np.prod(split.shape[:-1])))
    std = np.sqrt(np.maximum(mean_square - mean**2, 0.0))
    images.attrs["scale"], images.attrs["mean"] = scale, mean
    images.attrs["std"] = np.where(std > 0, std, 1.0)
    if label_checker is not None:
        labels.attrs["classes"] = max(label_checker.largest_label + 1, len(split.class_names))
    if split.class_names:
        labels.attrs["names"] = np.array([os.fsencode(label) for label in split.class_names])


def _labels_are_classes(split: SplitSource) -> bool:
    return split.label_dtype.kind in "iu" and (not split.label_shape or len(split.label_shape) == len(split.shape) - 1)


def _add_moments(sums: np.ndarray, cells: np.ndarray, scale: float) -> None:
    """Add the cells (n, C) and their squares to the sums (2, C), a few at a time."""
    with np.errstate(over="ignore", invalid="ignore"):  # the caller checks the sums
        for start in range(0, len(cells), _BLOCK_CELLS):
            block = cells[start : start + _BLOCK_CELLS].astype(np.float64) / scale
            sums += block.sum(axis=0), np.einsum("ij,ij->j", block, block)


def _label_chunk_shape(split: SplitSource) -> tuple[int, ...]:
    num_spatial_axes = len(split.shape) - 1
    if len(split.label_shape) < num_spatial_axes:
        return (min(split.count, 1 << 13), *split.label_shape)
    channels = split.label_shape[num_spatial_axes:]
    map_chunk = chunk_shape(split.label_shape[:num_spatial_axes], int(np.prod(channels)), split.label_dtype.itemsize)
    return (*map_chunk[:-1], *channels)


def _is_hdf5_or_empty(path: Path) -> bool:
    """Return whether a file is HDF5, or empty; False if it cannot be read."""
    try:
        if not path.is_file():  # a pipe would block
            return False
        with open_regular(path) as file:
            return file.read(len(hdf5.HDF5_SIGNATURE)) in (hdf5.HDF5_SIGNATURE, b"")
    except OSError:
        return False


_MAX_CLASS_LABEL = 2**31 - 1  # far more classes than any network has outputs
_WHITE_PIXEL_VALUE = 255


class ClassLabelChecker:
    """Validation of the labels of one split, block by block.

    Attributes
    ----------
    largest_label : the largest label so far
    """

    def __init__(self, split_name: str) -> None:
        self.split_name, self.largest_label, self._checked_sample_count = split_name, 0, 0

    def check_block(self, labels: np.ndarray) -> None:
        """Check the labels of the next samples, (n,) or (n, *spatial).

        Raises
        ------
        DataError
            If a label is not a valid class, or the maps are black-and-white masks.
        """
        if not labels.size:
            return
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high > _MAX_CLASS_LABEL:
            bad_label = low if low < 0 else high
            sample = self._checked_sample_count + int(np.argwhere(labels == bad_label)[0][0])
            raise DataError(
                f"{self.split_name}: sample {sample} has the label {bad_label}; correct it to a class number, from 0"
            )
        is_mask = labels.ndim > 1 and high == _WHITE_PIXEL_VALUE and np.isin(labels, (0, _WHITE_PIXEL_VALUE)).all()
        if is_mask and not self.largest_label:
            raise DataError(
                f"{self.split_name}: the maps contain only 0 and 255, which would mean 256 classes; save the class"
                " index of each pixel, 0 or 1 (in NumPy: mask // 255)"
            )
        self.largest_label = max(self.largest_label, high)
        self._checked_sample_count += len(labels)
