"""A folder of PNG, TIFF, JPEG and other images, read by Pillow one at a time.

Every file that is not converted is reported, and links out of the folder are not followed.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import DataError
from ...formats.image_loader import IMAGE_SUFFIXES, ImageLoader
from ...terminal.console import counted
from ..csv_table import read_csv_rows
from ..split_source import ImagesAndLabels, SplitSource, samples_per_block

_LABEL_DTYPE = np.dtype("i8")
_MAX_LABEL_DIGITS = 10
Sample = tuple[Path, Any]  # an image, and its label or label map


def image_splits(
    folder: Path, loader: ImageLoader, table: Path | None = None, maps: Path | None = None
) -> dict[str, SplitSource]:
    """Return the splits of a folder; the messages of the first one list the files that are left out.

    Subfolders are classes, sorted by name. Subfolders called train, val and test are splits instead, and their own
    subfolders are the classes. `table` is a CSV file with rows FILE,LABEL; `maps` is a folder with a class map for each
    image, under the same name (the suffix may differ).

    Raises
    ------
    DataError
        If images or labels are missing, or do not match.
    """
    if table is not None:
        samples = {"train": _read_label_table(folder, table)}
        return _build_splits(samples, loader, _describe_unused(folder, samples, table))
    sets, unused = find_split_folders(folder)
    if maps is not None:
        samples = {name: _pair_images_with_maps(path, maps / path.relative_to(folder)) for name, path in sets.items()}
        return _build_splits(samples, loader, _describe_unused(folder, samples, maps))
    classes = [path for path in find_subfolders(sets["train"]) if path not in unused]
    names = tuple(path.name for path in classes if walk_images(path))
    if not names:
        raise DataError(
            f"{sets['train']}: has no class folders with images; create a folder for each class, or give"
            " --labels FILE.csv or --maps FOLDER"
        )
    samples = {name: _list_class_samples(path, names) for name, path in sets.items()}
    empty_class_notes = tuple(
        f"left out: {path} has no images, so it is not counted as a class" for path in classes if path.name not in names
    )
    splits = _build_splits(samples, loader, empty_class_notes + _describe_unused(folder, samples))
    return {name: replace(split, class_names=names) for name, split in splits.items()}


def _list_class_samples(folder: Path, names: tuple[str, ...]) -> list[Sample]:
    unknown = sorted({path.name for path in find_subfolders(folder) if walk_images(path)} - set(names))
    if unknown:
        raise DataError(f"{folder}: class '{unknown[0]}' has no training images; rename it to {' or '.join(names)}")
    present = {path.name for path in find_subfolders(folder)}
    return [(path, label) for label, name in enumerate(names) if name in present for path in walk_images(folder / name)]


def _pair_images_with_maps(folder: Path, maps: Path) -> list[Sample]:
    if not maps.is_dir():
        raise DataError(f"{maps}: no such folder; expected a folder with a map for each image of {folder}")
    map_by_stem: dict[Path, Path] = {}
    for path in walk_images(maps):
        _require_inside(maps, path)
        stem = path.relative_to(maps).with_suffix("")
        if stem in map_by_stem:
            raise DataError(f"{path}: is a second map for an image, besides {map_by_stem[stem].name}; keep one of them")
        map_by_stem[stem] = path
    pairs = []
    for path in walk_images(folder):
        if path.is_relative_to(maps):
            continue
        stem = path.relative_to(folder).with_suffix("")
        if stem not in map_by_stem:
            raise DataError(f"{path}: has no map {maps / stem}.*; add a map for each image")
        pairs.append((path, map_by_stem[stem]))
    return pairs


def _read_label_table(folder: Path, table: Path) -> list[Sample]:
    rows = read_csv_rows(table, "FILE,LABEL")
    if rows and len(rows[0][1]) >= 2 and not rows[0][1][1].isdecimal() and not _is_file_inside(folder, rows[0][1][0]):
        rows = rows[1:]  # the header
    labels: dict[Path, int] = {}
    for line, row in rows:
        if len(row) < 2 or any(row[2:]) or not row[1].isdecimal() or len(row[1]) > _MAX_LABEL_DIGITS:
            text = ",".join(row)
            text = text if len(text) < 80 else text[:77] + "..."
            raise DataError(f"{table}: line {line} is {text!r}; expected FILE,LABEL, with a label from 0")
        path = folder / row[0]
        if not _is_file_inside(folder, row[0]):
            raise DataError(f"{table}: line {line}: {folder} has no file {row[0]!r}; correct the table")
        if labels.setdefault(path, int(row[1])) != int(row[1]):
            raise DataError(f"{table}: line {line}: {row[0]!r} has label {labels[path]} in an earlier line; remove one")
    return list(labels.items())


def _is_file_inside(folder: Path, name: str) -> bool:
    try:
        path = folder / name
        return path.resolve().is_relative_to(folder.resolve()) and path.is_file()
    except (OSError, ValueError, RuntimeError):  # the name is too long or has a null character, or links form a cycle
        return False


def _describe_unused(folder: Path, samples: dict[str, list[Sample]], *inputs: Path) -> tuple[str, ...]:
    """Return a line for each subfolder or kind of file of `folder` that is neither a sample nor one of the `inputs`."""
    used_paths = {path for pairs in samples.values() for path, _ in pairs}
    skip_counts: Counter[tuple[str, str]] = Counter()
    for path in walk_files(folder):
        _require_inside(folder, path)
        if path in used_paths or path.name.startswith(".") or any(path.is_relative_to(other) for other in inputs):
            continue
        parts = path.relative_to(folder).parts
        if path.suffix.lower() not in IMAGE_SUFFIXES:
            skip_counts["file", f"called *{path.suffix}"] += 1
        else:
            skip_counts["image", f"in {folder / parts[0] if len(parts) > 1 else folder}"] += 1
    return tuple(f"left out: {counted(count, noun)} {place}" for (noun, place), count in sorted(skip_counts.items()))


def _build_splits(
    samples_by_split: dict[str, list[Sample]], loader: ImageLoader, notes: tuple[str, ...]
) -> dict[str, SplitSource]:
    splits = {name: _build_split(name, samples, loader) for name, samples in samples_by_split.items()}
    return splits | {"train": replace(splits["train"], messages=notes)}


def _build_split(name: str, samples: list[Sample], loader: ImageLoader) -> SplitSource:
    if not samples:
        raise DataError(f"{name}: no images found; recognised suffixes are " + " ".join(IMAGE_SUFFIXES))
    first, label = samples[0]
    image = loader.load(first)
    target = loader.load_labels(label) if isinstance(label, Path) else np.zeros((), _LABEL_DTYPE)
    source = SplitSource(len(samples), image.shape, image.dtype, target.shape, target.dtype, lambda: iter(()))

    def require_same_format(path: Path, array: np.ndarray, expected: np.ndarray, origin: Path) -> np.ndarray:
        if (array.shape, array.dtype) != (expected.shape, expected.dtype):
            raise DataError(
                f"{path}: is {_describe(array)}, but {origin.name} is {_describe(expected)}; all images must have"
                " the same size and type; scale them with --size HEIGHT WIDTH, or give --mode L, RGB or RGBA"
            )
        return array

    def read_blocks() -> Iterator[ImagesAndLabels]:
        count = samples_per_block(image.shape, image.dtype)
        for start in range(0, len(samples), count):
            batch = samples[start : start + count]
            x = np.stack([require_same_format(path, loader.load(path), image, first) for path, _ in batch])
            if target.ndim:
                y = np.stack([require_same_format(path, loader.load_labels(path), target, label) for _, path in batch])
            else:
                y = np.array([number for _, number in batch], _LABEL_DTYPE)
            yield x, y

    return replace(source, read_blocks=read_blocks)


def _describe(array: np.ndarray) -> str:
    return f"{' x '.join(map(str, array.shape))} {array.dtype}"


_FOLDERS = {"train": ("train", "training"), "validation": ("val", "valid", "validation"), "test": ("test", "testing")}


def walk_images(folder: Path) -> list[Path]:
    """Return the images in a folder and its subfolders, sorted by name."""
    return sorted(path for path in walk_files(folder) if path.suffix.lower() in IMAGE_SUFFIXES)


def walk_files(folder: Path) -> Iterator[Path]:
    """Yield the files in a folder and its subfolders.

    Raises
    ------
    DataError
        If a folder cannot be read, or is a link, which may lead to private files outside `folder`.
    """

    def raise_error(error: OSError) -> None:
        raise DataError(f"{error.filename}: cannot be read ({error.strerror}); check its permissions") from error

    for place, folders, names in os.walk(folder, onerror=raise_error):
        for name in folders:
            if os.path.islink(os.path.join(place, name)):
                _reject_link(folder, Path(place, name))
        yield from (path for name in names if (path := Path(place, name)).is_file())


def find_subfolders(folder: Path) -> list[Path]:
    """Return the subfolders of a folder, sorted by name; DataError as in `walk_files`."""
    try:
        folders = sorted(path for path in folder.iterdir() if path.is_dir())
    except OSError as error:
        raise DataError(f"{folder}: cannot be read ({error.strerror}); check its permissions") from error
    for path in folders:
        if path.is_symlink():
            _reject_link(folder, path)
    return folders


def _require_inside(root: Path, path: Path) -> None:
    if path.is_symlink() and not path.resolve().is_relative_to(root.resolve()):
        _reject_link(root, path, "file")


def _reject_link(root: Path, path: Path, target_kind: str = "folder") -> None:
    problem = f"is a link to a {target_kind}, possibly outside {root}, and is not followed"
    raise DataError(f"{path}: {problem}; replace it with the {target_kind}")


def find_split_folders(folder: Path) -> tuple[dict[str, Path], list[Path]]:
    """Return the folders of the splits by name, 'train' (possibly the folder itself) first, and the unused folders."""
    subfolders = find_subfolders(folder)
    splits: dict[str, Path] = {}
    for split, names in _FOLDERS.items():
        split_folders = [path for path in subfolders if path.name.lower() in names]
        if len(split_folders) > 1:
            raise DataError(
                f"{folder}: has several folders for one split: {', '.join(p.name for p in split_folders)}; keep one"
            )
        if split_folders:
            splits[split] = split_folders[0]
    if not splits:
        return {"train": folder}, []
    if "train" not in splits:
        name = next(iter(splits.values())).name
        raise DataError(
            f"{folder}: has a folder '{name}', but no training folder; name that folder 'train', or rename '{name}' if"
            " it is a class"
        )
    return splits, [path for path in subfolders if path not in splits.values()]
