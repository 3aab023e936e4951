"""A folder of PNG, TIFF, JPEG and other images, read by Pillow one at a time.

Nothing in it is left out without a word, and no link followed out of it.
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
from ...formats.image_loader import SUFFIXES, Loader
from ..csv_table import read_rows
from ..split_source import Block, SplitSource, per_block

_CLASS = np.dtype("i8")
_MOST = 10  # digits of a label


def image_parts(
    folder: Path, loader: Loader, table: Path | None = None, maps: Path | None = None
) -> dict[str, SplitSource]:
    """Return the parts of a folder; the notes of the first say what is left out.

    Subfolders are classes, in the order of their names. Where they are called train, val and test, these are the
    splits, and their subfolders the classes. `table` is a CSV file of FILE,LABEL; `maps` a folder with a map of classes
    for each image, under the same name (its suffix may differ).

    Raises
    ------
    DataError
        There are not images, no labels, or they do not fit together.
    """
    if table is not None:
        found = {"train": _listed(folder, table)}
        return _parts(found, loader, _left_out(folder, found, table))
    sets, others = sets_of(folder)
    if maps is not None:
        found = {name: _mapped(path, maps / path.relative_to(folder)) for name, path in sets.items()}
        return _parts(found, loader, _left_out(folder, found, maps))
    classes = [path for path in subfolders(sets["train"]) if path not in others]
    names = tuple(path.name for path in classes if images(path))
    if not names:
        raise DataError(
            f"{sets['train']}: has no folder of images for each class; make one, or give --labels FILE.csv, or"
            " --maps FOLDER"
        )
    found = {name: _sorted(path, names) for name, path in sets.items()}
    empty = tuple(
        f"left out: {path} has no images, so it is not counted as a class" for path in classes if path.name not in names
    )
    parts = _parts(found, loader, empty + _left_out(folder, found))
    return {name: replace(part, names=names) for name, part in parts.items()}


def _sorted(folder: Path, names: tuple[str, ...]) -> list[tuple[Path, Any]]:
    strange = sorted({path.name for path in subfolders(folder) if images(path)} - set(names))
    if strange:
        raise DataError(f"{folder}: the class '{strange[0]}' is not among those for training ({', '.join(names)})")
    there = {path.name for path in subfolders(folder)}
    return [(path, label) for label, name in enumerate(names) if name in there for path in images(folder / name)]


def _mapped(folder: Path, maps: Path) -> list[tuple[Path, Any]]:
    if not maps.is_dir():
        raise DataError(f"{maps}: no such folder; expected a folder with a map for each image of {folder}")
    there: dict[Path, Path] = {}
    for path in images(maps):
        _require_inside(maps, path)
        name = path.relative_to(maps).with_suffix("")
        if name in there:
            raise DataError(f"{path}: and {there[name].name} are maps with the same name; keep the right one")
        there[name] = path
    found = []
    for path in images(folder):
        if path.is_relative_to(maps):
            continue
        name = path.relative_to(folder).with_suffix("")
        if name not in there:
            raise DataError(f"{path}: has no map {maps / name}.*; give each image one")
        found.append((path, there[name]))
    return found


def _listed(folder: Path, table: Path) -> list[tuple[Path, Any]]:
    rows = read_rows(table, "FILE,LABEL")
    if rows and len(rows[0][1]) >= 2 and not rows[0][1][1].isdecimal() and not _is_file(folder, rows[0][1][0]):
        rows = rows[1:]  # the head
    found: dict[Path, int] = {}
    for line, row in rows:
        if len(row) < 2 or any(row[2:]) or not row[1].isdecimal() or len(row[1]) > _MOST:
            shown = ",".join(row)
            shown = shown if len(shown) < 80 else shown[:77] + "..."
            raise DataError(f"{table}: line {line} is {shown!r}; write FILE,LABEL with a number from 0")
        path = folder / row[0]
        if not _is_file(folder, row[0]):
            raise DataError(f"{table}: line {line}: {folder} has no file {row[0]!r}; correct the table")
        if found.setdefault(path, int(row[1])) != int(row[1]):
            raise DataError(f"{table}: line {line}: {row[0]!r} has label {found[path]} in an earlier line; keep one")
    return list(found.items())


def _is_file(folder: Path, name: str) -> bool:
    """Return whether a name of the table is that of a file inside the folder."""
    try:
        path = folder / name
        return path.resolve().is_relative_to(folder.resolve()) and path.is_file()
    except (OSError, ValueError, RuntimeError):  # too long, a null character, a link to itself
        return False


def _left_out(folder: Path, found: dict[str, list[tuple[Path, Any]]], *beside: Path) -> tuple[str, ...]:
    """Return a line for each folder or kind of files below `folder` that is neither taken nor `beside` it."""
    taken = {path for pairs in found.values() for path, _ in pairs}
    skipped: Counter[str] = Counter()
    for path in files(folder):
        _require_inside(folder, path)
        if path in taken or path.name.startswith(".") or any(path.is_relative_to(other) for other in beside):
            continue
        inside = path.relative_to(folder).parts
        if path.suffix.lower() not in SUFFIXES:
            skipped[f"files called *{path.suffix}"] += 1
        else:
            skipped["images in " + str(folder / inside[0] if len(inside) > 1 else folder)] += 1
    return tuple(f"left out: {count} {what}" for what, count in sorted(skipped.items()))


def _parts(found: dict[str, list[tuple[Path, Any]]], loader: Loader, notes: tuple[str, ...]) -> dict[str, SplitSource]:
    parts = {name: _part(name, pairs, loader) for name, pairs in found.items()}
    return parts | {"train": replace(parts["train"], notes=notes)}


def _part(name: str, pairs: list[tuple[Path, Any]], loader: Loader) -> SplitSource:
    if not pairs:
        raise DataError(f"{name}: no images found; recognised suffixes are " + " ".join(SUFFIXES))
    first, label = pairs[0]
    sample = loader.load(first)
    target = loader.labels(label) if isinstance(label, Path) else np.zeros((), _CLASS)
    part = SplitSource(len(pairs), sample.shape, sample.dtype, target.shape, target.dtype, lambda: iter(()))

    def checked(path: Path, array: np.ndarray, like: np.ndarray, origin: Path) -> np.ndarray:
        if (array.shape, array.dtype) != (like.shape, like.dtype):
            raise DataError(
                f"{path}: is {_words(array)}, but {origin.name} is {_words(like)}; all images of a file must have"
                " the same size and type: scale them with --size HEIGHT WIDTH, or give --mode L, RGB or RGBA"
            )
        return array

    def blocks() -> Iterator[Block]:
        count = per_block(sample.shape, sample.dtype)
        for at in range(0, len(pairs), count):
            some = pairs[at : at + count]
            x = np.stack([checked(path, loader.load(path), sample, first) for path, _ in some])
            if target.ndim:
                y = np.stack([checked(path, loader.labels(path), target, label) for _, path in some])
            else:
                y = np.array([number for _, number in some], _CLASS)
            yield x, y

    return replace(part, blocks=blocks)


def _words(array: np.ndarray) -> str:
    return f"{' x '.join(map(str, array.shape))} {array.dtype}"


_CALLED = {"train": ("train", "training"), "validation": ("val", "valid", "validation"), "test": ("test", "testing")}


def images(folder: Path) -> list[Path]:
    """Return the images in a folder and in all below it, in the order of their names."""
    return sorted(path for path in files(folder) if path.suffix.lower() in SUFFIXES)


def files(folder: Path) -> Iterator[Path]:
    """Yield the files in a folder and in all below it.

    Raises
    ------
    DataError
        A folder cannot be read, or is a link: what it leads to need not be the user's to give away.
    """

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename}: cannot be read ({error.strerror}); check its permissions") from error

    for place, folders, names in os.walk(folder, onerror=refuse):
        for name in folders:
            if os.path.islink(os.path.join(place, name)):
                _check_link(folder, Path(place, name))
        yield from (path for name in names if (path := Path(place, name)).is_file())


def subfolders(folder: Path) -> list[Path]:
    """Return the folders in a folder, in the order of their names; DataError as of `files`."""
    try:
        found = sorted(path for path in folder.iterdir() if path.is_dir())
    except OSError as error:
        raise DataError(f"{folder}: cannot be read ({error.strerror}); check its permissions") from error
    for path in found:
        if path.is_symlink():
            _check_link(folder, path)
    return found


def _require_inside(root: Path, path: Path) -> None:
    if path.is_symlink() and not path.resolve().is_relative_to(root.resolve()):
        _check_link(root, path, "file")


def _check_link(root: Path, path: Path, what: str = "folder") -> None:
    raise DataError(f"{path}: is a link to a {what} outside {root}, which is not followed; put the {what} there")


def sets_of(folder: Path) -> tuple[dict[str, Path], list[Path]]:
    """Return the folders of the splits by name, 'train' (which may be the folder itself) first, and those left out."""
    there = subfolders(folder)
    found: dict[str, Path] = {}
    for split, names in _CALLED.items():
        called = [path for path in there if path.name.lower() in names]
        if len(called) > 1:
            raise DataError(
                f"{folder}: has several folders for one split: {', '.join(p.name for p in called)}; keep one"
            )
        if called:
            found[split] = called[0]
    if not found:
        return {"train": folder}, []
    if "train" not in found:
        name = next(iter(found.values())).name
        raise DataError(
            f"{folder}: has a folder '{name}', but no training folder; name that 'train', or rename '{name}' if it"
            " is a class"
        )
    return found, [path for path in there if path not in found.values()]
