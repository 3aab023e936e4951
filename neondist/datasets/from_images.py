"""A folder of PNG, TIFF, JPEG and other images, read by Pillow one at a time."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DataError
from .image_loader import Loader
from .part import Block, Part, per_block

SUFFIXES = (".png", ".tif", ".tiff", ".jpg", ".jpeg", ".bmp", ".pgm", ".ppm", ".gif", ".webp")
_TESTS = ("test", "val", "valid", "validation")
_CLASS = np.dtype("i8")


def image_parts(folder: Path, loader: Loader, table: Path | None = None, maps: Path | None = None) -> dict[str, Part]:
    """Return the parts of a folder.

    Subfolders are classes, in the order of their names. Where they are called train and test (or val), these are the
    parts, and their subfolders the classes. `table` is a CSV file of FILE,LABEL; `maps` a folder with a map of classes
    for each image, under the same name (its suffix may differ).

    Raises
    ------
    DataError
        There are no images, no labels, or they do not fit together.
    """
    if table is not None:
        return {"train": _part(_listed(folder, table), loader)}
    parts = {"train": folder / "train" if (folder / "train").is_dir() else folder}
    tests = [folder / name for name in _TESTS if (folder / name).is_dir()]
    if tests and parts["train"] != folder:
        parts["test"] = tests[0]
    if maps is not None:
        inside = {name: maps / path.relative_to(folder) for name, path in parts.items()}
        return {name: _part(_mapped(path, inside[name]), loader) for name, path in parts.items()}
    names = tuple(sorted(path.name for path in parts["train"].iterdir() if path.is_dir() and _images(path)))
    if not names:
        raise DataError(
            f"{parts['train']}: has no folder of images for each class; make one, or give --labels FILE.csv, or"
            " --maps FOLDER"
        )
    return {name: replace(_part(_sorted(path, names), loader), names=names) for name, path in parts.items()}


def _images(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())


def _sorted(folder: Path, names: tuple[str, ...]) -> list[tuple[Path, Any]]:
    strange = sorted({path.name for path in folder.iterdir() if path.is_dir() and _images(path)} - set(names))
    if strange:
        raise DataError(f"{folder}: the class '{strange[0]}' is not among those for training ({', '.join(names)})")
    return [(path, label) for label, name in enumerate(names) for path in _images(folder / name)]


def _mapped(folder: Path, maps: Path) -> list[tuple[Path, Any]]:
    if not maps.is_dir():
        raise DataError(f"{maps}: no such folder; it shall hold a map for each image of {folder}")
    there = {path.relative_to(maps).with_suffix(""): path for path in _images(maps)}
    found = []
    for path in _images(folder):
        if path.is_relative_to(maps):
            continue
        name = path.relative_to(folder).with_suffix("")
        if name not in there:
            raise DataError(f"{path}: has no map {maps / name}.*; give each image one")
        found.append((path, there[name]))
    return found


def _listed(folder: Path, table: Path) -> list[tuple[Path, Any]]:
    try:
        rows = [row for row in csv.reader(table.read_text(encoding="utf-8-sig").splitlines()) if any(row)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{table}: cannot be read ({error}); give a CSV file of FILE,LABEL") from error
    if rows and len(rows[0]) >= 2 and not (folder / rows[0][0]).is_file():
        rows = rows[1:]  # the head
    found: list[tuple[Path, Any]] = []
    for number, row in enumerate(rows, start=1):
        if len(row) < 2 or not row[1].strip().isdecimal():
            raise DataError(f"{table}: line {number} of the rows is {row}; write FILE,LABEL with a number from 0")
        path = folder / row[0].strip()
        if not path.resolve().is_relative_to(folder.resolve()) or not path.is_file():
            raise DataError(f"{table}: {folder} has no file {row[0]!r}; correct the table")
        found.append((path, int(row[1])))
    return found


def _part(files: list[tuple[Path, Any]], loader: Loader) -> Part:
    if not files:
        raise DataError("no images found; suffixes that count are " + " ".join(SUFFIXES))
    first, label = files[0]
    sample = loader.load(first)
    target = loader.labels(label) if isinstance(label, Path) else np.zeros((), _CLASS)
    part = Part(len(files), sample.shape, sample.dtype, target.shape, target.dtype, lambda: iter(()))

    def checked(path: Path, array: np.ndarray, like: np.ndarray, origin: Path) -> np.ndarray:
        if (array.shape, array.dtype) != (like.shape, like.dtype):
            raise DataError(
                f"{path}: is {_words(array)}, but {origin.name} is {_words(like)}; images of one file are alike: scale"
                " them with --size HEIGHT WIDTH, or give --mode L, RGB or RGBA"
            )
        return array

    def blocks() -> Iterator[Block]:
        count = per_block(sample.shape, sample.dtype)
        for at in range(0, len(files), count):
            some = files[at : at + count]
            x = np.stack([checked(path, loader.load(path), sample, first) for path, _ in some])
            if target.ndim:
                y = np.stack([checked(path, loader.labels(path), target, label) for _, path in some])
            else:
                y = np.array([number for _, number in some], _CLASS)
            yield x, y

    return replace(part, blocks=blocks)


def _words(array: np.ndarray) -> str:
    return f"{' x '.join(map(str, array.shape))} {array.dtype}"
