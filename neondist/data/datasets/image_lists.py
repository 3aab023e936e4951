"""Files of a data set of images, and the labels that belong to each, checked before training."""

from __future__ import annotations

import glob
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np

from ...errors import DataError
from ...formats import TileSource, open_source
from ...formats.image_loader import SUFFIXES
from ...formats.pictures import IndexedSource
from ...formats.table import known
from ..csv_table import read_rows

_INSIDE = re.compile(r"(.+\.(?:h5|hdf5|nc|nc4|zarr))(:[^:]+)$|(.+)(#\d+)$", re.IGNORECASE)
_PICTURES = {suffix for suffix in SUFFIXES if "tif" not in suffix}


@dataclass(frozen=True)
class Item:
    """One image of a file.

    Attributes
    ----------
    name : of the file, as `open_source` takes it
    place : of the image on the axes of the file before the spatial ones
    shape, dtype : (*spatial, C)
    """

    name: str
    place: tuple[slice, ...]
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def extents(self) -> tuple[int, ...]:
        """The spatial axes."""
        return self.shape[:-1]


def matching(field: str, pattern: str) -> list[str]:
    """Return the files of a pattern in the order of their names, each with what the pattern says of its inside."""
    found = _INSIDE.fullmatch(pattern)
    files, inside = (found[1] or found[3], found[2] or found[4]) if found else (pattern, "")
    paths = sorted(glob.glob(os.path.expanduser(files), recursive=True))
    if files.endswith("*"):  # which is a table's name too
        paths = [path for path in paths if known(Path(path))] or paths
    if not paths:
        raise DataError(f"{field}: no file matches {pattern}; correct the pattern, such as 'scans/*.tif'")
    return [path + inside for path in paths]


def open_mask(name: str) -> TileSource:
    """Return a mask: of a picture with a palette, the numbers of its colours."""
    if Path(name).suffix.lower() in _PICTURES:
        return IndexedSource(Path(name), "", 0, None)
    return open_source(name)


def samples_of(names: Sequence[str], rank: int | None, masks: bool = False) -> list[Item]:
    """Return the images in some files; `rank`: how many axes they have, None: Y, X, and Z where there is one."""
    items = []
    for name in names:
        with open_mask(name) if masks else open_source(name) as source:
            spatial = sum(letter in "ZYX" for letter in source.axes) if rank is None else rank
            leading = source.shape[: -spatial - 1]
            if len(source.shape) <= spatial:
                raise DataError(f"{name}: has axes {source.axes}; images have {spatial} and their channels here")
            for place in product(*map(range, leading)):
                cut = tuple(slice(at, at + 1) for at in place)
                items.append(Item(name, cut, source.shape[len(leading) :], source.dtype))
    return items


def require_alike(items: Sequence[Item], extents: tuple[int, ...], whole: bool) -> None:
    """Raise DataError if images have other kinds of cells or channels, or are too small for a crop."""
    first = items[0]
    for item in items:
        if (item.shape[-1], item.dtype, len(item.shape)) != (first.shape[-1], first.dtype, len(first.shape)):
            raise DataError(
                f"{item.name}: is {_words(item)}, but {first.name} is {_words(first)}; all images must have the"
                " same channels and dtype"
            )
        if whole and item.shape != first.shape:
            raise DataError(f"{item.name}: is {_words(item)}, but {first.name} is {_words(first)}; give crop: [h, w]")
        if any(n < c for n, c in zip(item.extents, extents, strict=True)):
            raise DataError(
                f"{item.name}: is {_words(item)}, smaller than crop {list(extents)}; leave it out, or reduce crop"
            )


def labelled(
    labels: str, items: Sequence[Item], classes: int | None, names: Sequence[str] = ()
) -> tuple[np.ndarray, int | None, Sequence[str]]:
    """Return a class or numbers for each image, from its folder or a table, the number of classes, and their names.

    `names`: those that are known, so that a test split has the numbers of training.
    """
    if labels == "folders":
        folders = [Path(item.name).parent.name for item in items]
        if not names and len(set(folders)) < 2:
            raise DataError(f"labels: all images are in the folder '{folders[0]}'; give each class a folder, or labels")
        values, names = _numbered(labels, folders, names)
        return values, classes or len(names), names
    table = _table(Path(os.path.expanduser(labels)), items)
    if table.shape[1] == 1 and not any(map(_is_number, table[:, 0])):
        if not names and len(set(table[:, 0])) < 2:
            raise DataError(f"{labels}: all images have the class '{table[0, 0]}'; give two classes, or more")
        values, names = _numbered(labels, table[:, 0].tolist(), names)
        table = values.reshape(-1, 1).astype(str)
    if table.shape[1] > 1 or not all(value.lstrip("+").isdecimal() for value in table[:, 0]):
        try:
            numbers = table.astype(np.float64)
        except ValueError as error:
            wrong = str(error).partition(": ")[2].removeprefix("np.str_(").removesuffix(")")
            raise DataError(
                f"{labels}: {wrong} is not a number; write FILE,CLASS with a number from 0 or a class name, or"
                " FILE,NUMBER"
            ) from None
        if not np.isfinite(numbers).all():
            at = int(np.flatnonzero(~np.isfinite(numbers).all(1))[0])
            raise DataError(f"{labels}: {items[at].name} has a target that is not finite; correct it")
        return numbers, classes, ()
    values = table[:, 0].astype(np.int64)
    count = classes or int(values.max()) + 1
    if values.max() >= count:
        at = int(np.argmax(values))
        raise DataError(f"{labels}: {items[at].name} has the class {values[at]}; valid classes are 0 to {count - 1}")
    return values, count, names


def _numbered(labels: str, texts: Sequence[str], names: Sequence[str]) -> tuple[np.ndarray, Sequence[str]]:
    """Return the numbers of classes, and all their names."""
    names = names or sorted(set(texts))
    if unknown := set(texts).difference(names):
        known = ", ".join(names)[:200]
        raise DataError(f"{labels}: '{min(unknown)}' is not among the training classes, {known}; correct it")
    return np.array([names.index(text) for text in texts]), names


def masks_of(pattern: str, items: Sequence[Item], rank: int) -> list[Item]:
    """Return the mask of each image: the file of its name, or the only file for the only file."""
    names = matching("labels", pattern)
    images = list(dict.fromkeys(item.name for item in items))
    of = dict(zip(images, names, strict=True)) if len(images) == len(names) == 1 else _by_stem(images, names, pattern)
    masks = {name: samples_of([of[name]], rank, masks=True) for name in images}
    counts = Counter(item.name for item in items)
    for name, group in masks.items():
        if len(group) != counts[name]:
            of_each = f"{len(group)} of {_words(group[0])}, but its image {name} has {counts[name]}"
            raise DataError(f"{group[0].name}: as samples {of_each}; give a mask for each slice, page or time")
    found = [mask for group in masks.values() for mask in group]
    for item, mask in zip(items, found, strict=True):
        if mask.extents != item.extents:
            raise DataError(
                f"{mask.name}: is {_words(mask)}, but its image {item.name} is {_words(item)}; make them match"
            )
    first = found[0]
    for mask in found:
        if (mask.shape[-1], mask.dtype.kind) != (first.shape[-1], first.dtype.kind):
            raise DataError(
                f"{mask.name}: is {_words(mask)}, but {first.name} is {_words(first)}; all masks must match"
            )
    return found


def _by_stem(images: Sequence[str], names: Sequence[str], pattern: str) -> dict[str, str]:
    """Return the mask of each image's name, up to its first dot unless that is another image's."""
    apart = len({_stem(name).partition(".")[0] for name in images}) == len(images)

    def called(name: str) -> str:
        return _stem(name).partition(".")[0] if apart else _stem(name)

    there: dict[str, str] = {}
    for name in names:
        if called(name) in there:
            raise DataError(f"{name}: and {there[called(name)]} are masks with the same name; keep the right one")
        there[called(name)] = name
    missing = [name for name in images if called(name) not in there]
    if missing:
        raise DataError(f"{missing[0]}: has no mask called {called(missing[0])} among {pattern}; give each image one")
    extra = sorted(set(there) - {called(name) for name in images})
    if extra:
        raise DataError(f"{there[extra[0]]}: is a mask without an image; remove it, or correct the pattern")
    return {name: there[called(name)] for name in images}


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _stem(name: str) -> str:
    """Return the name of a file without what its format adds: 'a' of 'scans/a.ome.tif'."""
    return Path(_INSIDE.sub(r"\1\3", name)).stem.removesuffix(".ome").removesuffix(".nii")


def _table(path: Path, items: Sequence[Item]) -> np.ndarray:
    """Return the texts of a table, a row for each image."""
    rows = [row for _, row in read_rows(path, "FILE,CLASS")]
    known: dict[str, set[str]] = {}
    for item in items:
        for tail in (*_tails(item.name), _stem(item.name)):
            known.setdefault(tail, set()).add(item.name)

    def named(text: str) -> set[str]:
        return next((known[tail] for tail in _tails(text) if tail in known), set())

    if rows and not named(rows[0][0]):
        rows = rows[1:]  # the head
    of: dict[str, list[str]] = {}
    for row in rows:
        name, *others = sorted(named(row[0])) or [""]
        if others:
            raise DataError(f"{path}: {row[0]!r} could be {name} or {others[0]}; add the folder to the path")
        if not name:
            raise DataError(f"{path}: {row[0]!r} matches no image; remove the row, or correct the pattern of images")
        if len(row) < 2 or (of and len(row) - 1 != len(next(iter(of.values())))):
            raise DataError(
                f"{path}: the row {','.join(row)[:80]!r} has {len(row) - 1} values; give all rows the same number"
            )
        if of.setdefault(name, row[1:]) != row[1:]:
            raise DataError(f"{path}: {row[0]!r} has two rows; keep one")
    for item in items:
        if item.name not in of:
            raise DataError(f"{path}: has no row for {item.name}; give each image a label")
    return np.array([of[item.name] for item in items], dtype=str)


def _tails(name: str) -> list[str]:
    """Return a path, and what it ends with, down to the name of the file."""
    parts = Path(name).parts
    return ["/".join(parts[at:]) for at in range(len(parts))]


def _words(item: Item) -> str:
    return f"{' x '.join(map(str, item.shape))} {item.dtype}"
