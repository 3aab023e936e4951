"""NPY and NPZ files, read as streams: neither memory-mapped nor loaded whole, and never unpickled."""

from __future__ import annotations

import lzma
import os
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tokenize import TokenError
from typing import IO, Any

import numpy as np

from ...errors import DataError, UserError
from ...formats.npy import read_header
from ...io.regular_file import open_regular
from ..split_source import ImagesAndLabels, SplitSource, add_channel_axis, samples_per_block

_ZIP_ERRORS = (zipfile.BadZipFile, zlib.error, lzma.LZMAError)
_IMAGE_KEYS = {
    "train": ("x_train", "train_images", "x", "images", "data"),
    "validation": ("x_val", "val_images", "x_validation", "validation_images"),
    "test": ("x_test", "test_images"),
}
_LABEL_KEYS = {
    "train": ("y_train", "train_labels", "y", "labels", "targets"),
    "validation": ("y_val", "val_labels", "y_validation", "validation_labels"),
    "test": ("y_test", "test_labels"),
}


@dataclass(frozen=True)
class ArrayFile:
    """An array in a .npy file, or a member of a .npz file."""

    path: Path
    member: str | None = None

    @property
    def title(self) -> str:
        """Name for messages."""
        return str(self.path) if self.member is None else f"{self.path}: {self.member}"

    @contextmanager
    def open(self) -> Iterator[tuple[tuple[int, ...], np.dtype, IO[bytes]]]:
        """Open the array; yield its shape, its dtype and a stream of its elements in C order."""
        with _convert_errors(self.title), ExitStack() as stack:
            if self.member is None:
                stream: Any = stack.enter_context(open_regular(self.path))
            else:
                stream = stack.enter_context(stack.enter_context(_open_zip(self.path)).open(self.member))
            shape, is_fortran, dtype = read_header(stream)
            if dtype.kind not in "biuf" or dtype.itemsize > 8:
                raise DataError(f"{self.title}: has elements of dtype {dtype}; give real numbers of at most 64 bits")
            if is_fortran and len(shape) > 1:
                raise DataError(f"{self.title}: is in Fortran order; save numpy.ascontiguousarray(array)")
            num_bytes = int(np.prod(shape, dtype=object)) * dtype.itemsize
            if self._remaining_bytes(stream) < num_bytes:
                raise DataError(f"{self.title}: is truncated: its shape {shape} needs {num_bytes} bytes; save it again")
            yield shape, dtype, stream

    def _remaining_bytes(self, stream: Any) -> int:
        """Return the number of bytes left in an open file, or a member's size according to the archive's directory."""
        if self.member is None:
            return os.fstat(stream.fileno()).st_size - stream.tell()
        with _open_zip(self.path) as archive:
            return archive.getinfo(self.member).file_size

    def shape_and_dtype(self) -> tuple[tuple[int, ...], np.dtype]:
        """Return shape and dtype."""
        with self.open() as (shape, dtype, _):
            return shape, dtype

    def read_pieces(self, max_entries: int) -> Iterator[np.ndarray]:
        """Yield the array along its first axis, at most `max_entries` at once; DataError if it ends too early."""
        with self.open() as (shape, dtype, stream):
            size = int(np.prod(shape[1:], dtype=object)) * dtype.itemsize
            for lo in range(0, shape[0], max_entries):
                n = min(max_entries, shape[0] - lo)
                raw = stream.read(n * size)
                if len(raw) < n * size:
                    raise DataError(
                        f"{self.title}: ends after {lo + len(raw) // max(size, 1)} of {shape[0]} samples; save it again"
                    )
                yield np.frombuffer(raw, dtype).reshape(n, *shape[1:])


def npz_splits(path: Path) -> dict[str, SplitSource]:
    """Return the splits of a .npz file, recognised by the names of its arrays."""
    with _convert_errors(str(path)), _open_zip(path) as archive:
        members = {name.removesuffix(".npy"): name for name in archive.namelist()}
    splits, array_names = {}, ", ".join(sorted(members))
    for split, names in _IMAGE_KEYS.items():
        key_candidates = names, _LABEL_KEYS[split]
        x_key, y_key = (next((n for n in candidates if n in members), None) for candidates in key_candidates)
        if x_key is not None and y_key is not None:
            splits[split] = split_of_arrays(ArrayFile(path, members.pop(x_key)), ArrayFile(path, members.pop(y_key)))
    if "train" not in splits:
        raise DataError(
            f"{path}: has {array_names or 'no arrays'}; name the arrays x_train, y_train (and x_val,"
            " y_val, x_test, y_test), or images and labels"
        )
    notes = tuple(f"left out: the array {name}" for name in sorted(members))
    return splits | {"train": replace(splits["train"], messages=notes)}


def npy_splits(paths: list[Path]) -> dict[str, SplitSource]:
    """Return the splits of .npy files: images and labels for training, optionally for validation and for testing."""
    split_names = {2: ["train"], 4: ["train", "test"], 6: ["train", "validation", "test"]}.get(len(paths))
    if split_names is None:
        raise DataError(
            f"{paths[0]}: give IMAGES.npy LABELS.npy, four files (training, test), or six (training, validation, test)"
        )
    array_files = [ArrayFile(path) for path in paths]
    return {name: split_of_arrays(*array_files[2 * index : 2 * index + 2]) for index, name in enumerate(split_names)}


def split_of_arrays(images: ArrayFile, labels: ArrayFile) -> SplitSource:
    """Return the source of a split of images (N, H, W), (N, H, W, C) or (N, D, H, W, C) and their labels."""
    (shape, dtype), (label_shape, label_dtype) = images.shape_and_dtype(), labels.shape_and_dtype()
    sample_shape = add_channel_axis(images.path, shape[1:])
    if not shape[0]:
        raise DataError(f"{images.title} of shape {shape}: there are no images; give at least one")
    if not label_shape or shape[0] != label_shape[0]:
        raise DataError(
            f"{images.title} of shape {shape} and {labels.title} of shape {label_shape}: give one label per image"
        )
    target_shape = () if label_shape[1:] == (1,) else label_shape[1:]
    if label_dtype.kind == "f" and not target_shape:
        raise DataError(f"{labels.title}: labels are {label_dtype}; save them as integers")
    dtype, label_dtype = (np.dtype("u1") if d.kind == "b" else d.newbyteorder("=") for d in (dtype, label_dtype))

    def read_blocks() -> Iterator[ImagesAndLabels]:
        count = samples_per_block(sample_shape, dtype)
        for x, y in zip(images.read_pieces(count), labels.read_pieces(count), strict=True):
            yield (
                x.reshape(-1, *sample_shape).astype(dtype, copy=False),
                y.reshape(-1, *target_shape).astype(label_dtype, copy=False),
            )

    return SplitSource(shape[0], sample_shape, dtype, target_shape, label_dtype, read_blocks)


@contextmanager
def _open_zip(path: Path) -> Iterator[zipfile.ZipFile]:
    with open_regular(path) as file, zipfile.ZipFile(file) as archive:
        yield archive


@contextmanager
def _convert_errors(title: str) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"{title}: no such file; check the path") from error
    except (OSError, ValueError, EOFError, LookupError, RuntimeError, SyntaxError, TokenError, *_ZIP_ERRORS) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{title}: damaged, or not a NumPy file ({reason}); save it again") from error
