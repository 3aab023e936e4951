"""Files of an image data set and their labels, checked before training."""

from __future__ import annotations

import glob
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product, takewhile
from pathlib import Path

import numpy as np

from ...errors import DataError
from ...formats import TileSource, open_source
from ...formats.channel_stack import split_stack_name
from ...formats.image_loader import IMAGE_SUFFIXES
from ...formats.pictures import ClassMapSource
from ...formats.table import has_known_suffix
from ...terminal.console import counted
from ..csv_table import is_number, read_csv_rows

_ARRAY_OR_LEVEL_SUFFIX = re.compile(r"(.+\.(?:h5|hdf5|nc|nc4|zarr))(:[^:]+)$|(.+)(#\d+)$", re.IGNORECASE)
_MAX_MISPLACED_CELLS = 0.1
"""Largest distance between a mask's cell and that of its image, in cells, that is not reported."""
_PICTURE_SUFFIXES = {suffix for suffix in IMAGE_SUFFIXES if "tif" not in suffix}


@dataclass(frozen=True)
class ImageEntry:
    """One image of a file.

    Attributes
    ----------
    name : name of the file, for `open_source`
    leading_index : index of the image on the file's leading axes, before the spatial ones
    shape, dtype : shape (*spatial, C) and dtype of the image
    affine : affine of the file, if any
    """

    name: str
    leading_index: tuple[slice, ...]
    shape: tuple[int, ...]
    dtype: np.dtype
    affine: np.ndarray | None = field(default=None, compare=False)

    @property
    def extents(self) -> tuple[int, ...]:
        """Spatial extents of the image."""
        return self.shape[:-1]


def match_files(field: str, pattern: str) -> list[str]:
    """Return the files that match a pattern, sorted by name, each with the pattern's array or level suffix."""
    match = _ARRAY_OR_LEVEL_SUFFIX.fullmatch(pattern)
    file_pattern, suffix = (match[1] or match[3], match[2] or match[4]) if match else (pattern, "")
    paths = sorted(glob.glob(os.path.expanduser(file_pattern), recursive=True))
    if file_pattern.endswith("*"):  # also matches tables
        paths = [path for path in paths if has_known_suffix(Path(path))] or paths
    if not paths:
        raise DataError(f"{field}: no file matches {pattern}; correct the pattern, such as 'scans/*.tif'")
    return [path + suffix for path in paths]


def match_images(field: str, patterns: str | Sequence[str], labels: str) -> list[str]:
    """Return the files that match a pattern, except masks: a.png and a_mask.png may be in one folder.

    With several patterns, an image has one file per pattern, matched by the varying part of the path; the result has
    their names joined by commas.
    """
    names_by_pattern = []
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        names = match_files(field, pattern)
        has_masks = labels not in ("folders", pattern) and not labels.lower().endswith(".csv")
        masks = match_files("labels", labels) if has_masks else []
        names_by_pattern.append(sorted({*names} - {*masks}) or names)
    if len(names_by_pattern) == 1:
        return names_by_pattern[0]
    keys = [_varying_parts(names) for names in names_by_pattern]
    for pattern, names, own_keys in zip(patterns, names_by_pattern, keys, strict=True):
        if commas := [name for name in names if "," in name]:
            raise DataError(f"{commas[0]}: has a comma in its name, where commas separate files of an image; rename it")
        for name, key in zip(names_by_pattern[0] + names, keys[0] + own_keys, strict=True):
            if (key in keys[0]) != (key in own_keys):
                raise DataError(
                    f"{name}: has no counterpart in {pattern if key in keys[0] else patterns[0]}; name the files of an"
                    " image alike, and give one file per pattern for each image"
                )
        if len({*own_keys}) < len(own_keys):
            raise DataError(f"{field}: several files of {pattern} belong to the same image; correct the pattern")
    files = [dict(zip(own_keys, names, strict=True)) for own_keys, names in zip(keys, names_by_pattern, strict=True)]
    return [",".join(by_key[key] for by_key in files) for key in keys[0]]


def is_picture(name: str) -> bool:
    """Return whether a file is a picture, which is decoded as a whole; TIFF files may be read in parts."""
    return Path(name).suffix.lower() in _PICTURE_SUFFIXES


def open_mask(
    name: str, axes: str | None = None, class_values: Sequence[int] = (), ignored_value: int | None = None
) -> TileSource:
    """Open a mask; a picture with a palette is read as palette indices."""
    source = ClassMapSource(Path(name), "", 0, None) if is_picture(name) else open_source(name, axes=axes)
    source.class_values, source.ignored_value = class_values, ignored_value
    return source


def is_class_map(mask: ImageEntry) -> bool:
    """Return whether a mask has one integer per cell, so that targets have no axis of channels."""
    return mask.shape[-1] == 1 and mask.dtype.kind in "iub"


def list_images(names: Sequence[str], num_axes: int | None, masks: bool = False) -> list[ImageEntry]:
    """Return the images in some files; `num_axes`: number of spatial axes; None: Y, X, and Z if present."""
    items = []
    for name in names:
        with open_mask(name) if masks else open_source(name) as source:
            num_spatial = sum(letter in "ZYX" for letter in source.axes) if num_axes is None else num_axes
            leading_shape = source.shape[: -num_spatial - 1]
            if len(source.shape) <= num_spatial:
                raise DataError(f"{name}: has axes {source.axes}; expected {num_spatial} spatial axes and channels")
            for place in product(*map(range, leading_shape)):
                leading_index = tuple(slice(index, index + 1) for index in place)
                shape = source.shape[len(leading_shape) :]
                items.append(ImageEntry(name, leading_index, shape, source.dtype, source.affine()))
    return items


def require_same_format(items: Sequence[ImageEntry], extents: tuple[int, ...], whole_images: bool) -> None:
    """Raise DataError if images differ in dtype, channels or (for `whole_images`) shape, or are smaller than a crop."""
    first = items[0]
    for item in items:
        if (item.shape[-1], item.dtype, len(item.shape)) != (first.shape[-1], first.dtype, len(first.shape)):
            raise DataError(
                f"{item.name}: is {_describe(item)}, but {first.name} is {_describe(first)}; all images must have the"
                " same number of axes, channels and dtype: remove it, or convert all (neondist data convert --mode RGB)"
            )
        if whole_images and item.shape != first.shape:
            raise DataError(
                f"{item.name}: is {_describe(item)}, but {first.name} is {_describe(first)}; give crop: [h, w]"
            )
        if any(n < c for n, c in zip(item.extents, extents, strict=True)):
            raise DataError(
                f"{item.name}: is {_describe(item)}, smaller than crop {list(extents)}; leave it out, or reduce crop"
            )


def read_labels(
    labels: str, items: Sequence[ImageEntry], classes: int | None, class_names: Sequence[str] = ()
) -> tuple[np.ndarray, int | None, Sequence[str]]:
    """Return the class or target of each image (from its folder or a table), the number of classes, and their names.

    `class_names`: the class names of the training split, whose numbers the other splits share.
    """
    if labels == "folders":
        folders = [Path(split_stack_name(item.name)[0]).parent.name for item in items]
        if not class_names and len(set(folders)) < 2:
            raise DataError(f"labels: all images are in folder '{folders[0]}'; give each class a folder, or set labels")
        values, class_names = _number_class_names(labels, folders, class_names)
        return values, classes or len(class_names), class_names
    table = _read_label_table(Path(os.path.expanduser(labels)), items)
    if table.shape[1] == 1 and not any(map(is_number, table[:, 0])):
        if not class_names and len(set(table[:, 0])) < 2:
            raise DataError(f"{labels}: all images have the class '{table[0, 0]}'; give two classes, or more")
        values, class_names = _number_class_names(labels, table[:, 0].tolist(), class_names)
        table = values.reshape(-1, 1).astype(str)
    if table.shape[1] > 1 or not all(value.lstrip("+").isdecimal() for value in table[:, 0]):
        for item, row in zip(items, table.tolist(), strict=True):
            for text in row:
                if not is_number(text):
                    raise DataError(
                        f"{labels}: {text!r} of {item.name} is not a number; write FILE,CLASS with a number from 0 or a"
                        " class name, or FILE,NUMBER"
                    )
        targets = table.astype(np.float64)
        if not np.isfinite(targets).all():
            at = int(np.flatnonzero(~np.isfinite(targets).all(1))[0])
            raise DataError(f"{labels}: {items[at].name} has a target that is not finite; correct it")
        return targets, classes, ()
    values = table[:, 0].astype(np.int64)
    count = classes or int(values.max()) + 1
    if values.max() >= count:
        at = int(np.argmax(values))
        raise DataError(f"{labels}: {items[at].name} has the class {values[at]}; expected 0 to {count - 1}; correct it")
    return values, count, class_names


def select_images_in_table(labels: str, items: Sequence[ImageEntry]) -> list[ImageEntry]:
    """Return the images that a table of labels lists."""
    rows_by_image = _read_rows_by_image(Path(os.path.expanduser(labels)), items)
    return [item for item in items if item.name in rows_by_image]


def _number_class_names(labels: str, texts: Sequence[str], names: Sequence[str]) -> tuple[np.ndarray, Sequence[str]]:
    """Return the class number of each text, and all class names."""
    names = names or sorted(set(texts))
    if unknown := set(texts).difference(names):
        choices = ", ".join(names)[:200]
        raise DataError(f"{labels}: '{min(unknown)}' is not among the training classes ({choices}); correct it")
    return np.array([names.index(text) for text in texts]), names


def describe_misplaced_masks(images: Sequence[ImageEntry], masks: Sequence[ImageEntry]) -> list[str]:
    """Return a warning if affines place masks elsewhere than their images; nibabel users often write an identity."""
    texts = list[str]()
    for image, mask in zip(images, masks, strict=True):
        if image.affine is None or mask.affine is None or np.array_equal(mask.affine, np.eye(4)):
            continue
        extents = (*reversed(image.extents), 1)[:3]
        corners = np.array([(*corner, 1) for corner in product(*((0, n - 1) for n in extents))])
        cell_size = np.linalg.norm(image.affine[:3, : len(image.extents)], axis=0).min()
        distance = np.linalg.norm((corners @ (mask.affine - image.affine).T)[:, :3], axis=1).max() / cell_size
        if distance > _MAX_MISPLACED_CELLS:
            texts.append(f"{mask.name} places its cells up to {distance:.3g} cells from those of {image.name}")
    if not texts:
        return []
    others = f" (and {counted(len(texts) - 1, 'other mask')})" if len(texts) > 1 else ""
    return [f"warning: {texts[0]}{others}, but cells are paired by index; resample it, or correct its affine"]


def find_masks(pattern: str, items: Sequence[ImageEntry], num_axes: int) -> list[ImageEntry]:
    """Return the mask of each image: the file of the same name, or the only mask for the only image."""
    names = match_files("labels", pattern)
    image_names = list(dict.fromkeys(item.name for item in items))
    files = [split_stack_name(name)[0] for name in image_names]
    is_pair = len(image_names) == len(names) == 1
    mask_by_file = dict(zip(files, names, strict=True)) if is_pair else _match_masks_by_stem(files, names, pattern)
    mask_by_image = {name: mask_by_file[file] for name, file in zip(image_names, files, strict=True)}
    masks_by_image = {name: list_images([mask], num_axes, masks=True) for name, mask in mask_by_image.items()}
    sample_counts = Counter(item.name for item in items)
    for name, group in masks_by_image.items():
        if len(group) != sample_counts[name]:
            image = f"its image {name} has {counted(sample_counts[name], 'sample')}"
            problem = f"{counted(len(group), 'mask')} of {_describe(group[0])}, but {image}"
            raise DataError(f"{group[0].name}: has {problem}; give a mask for each slice, page or time")
    all_masks = [mask for group in masks_by_image.values() for mask in group]
    for item, mask in zip(items, all_masks, strict=True):
        if mask.extents != item.extents:
            raise DataError(
                f"{mask.name}: is {_describe(mask)}, but its image {item.name} is {_describe(item)}; make them match"
            )
    first = all_masks[0]
    for mask in all_masks:
        if (mask.shape[-1], mask.dtype.kind) != (first.shape[-1], first.dtype.kind):
            raise DataError(
                f"{mask.name}: is {_describe(mask)}, but {first.name} is {_describe(first)}; all masks must have the"
                " same channels and kind of dtype"
            )
    return all_masks


def _match_masks_by_stem(images: Sequence[str], mask_names: Sequence[str], pattern: str) -> dict[str, str]:
    """Return the mask of each image, matched by name up to the first dot, or by the full name if that is ambiguous.

    If no names match, or masks have equal names, masks are matched by the varying part of their paths:
    'case1/case1_t1.nii' and 'case1/case1_seg.nii'.
    """
    are_stems_unique = len({_stem_without_suffixes(name).partition(".")[0] for name in images}) == len(images)

    def stem_of(name: str) -> str:
        return _stem_without_suffixes(name).partition(".")[0] if are_stems_unique else _stem_without_suffixes(name)

    stems = [stem_of(name) for name in mask_names]
    if len(set(stems)) < len(stems) or not {stem_of(name) for name in images} & set(stems):
        image_parts, mask_parts = _varying_parts(images), _varying_parts(mask_names)
        if len({*image_parts}) == len(images) and sorted(image_parts) == sorted(mask_parts):
            mask_by_part = dict(zip(mask_parts, mask_names, strict=True))
            return {name: mask_by_part[part] for name, part in zip(images, image_parts, strict=True)}
    mask_by_stem: dict[str, str] = {}
    for name in mask_names:
        if stem_of(name) in mask_by_stem:
            raise DataError(f"{name}: has the same name as the mask {mask_by_stem[stem_of(name)]}; keep one of them")
        mask_by_stem[stem_of(name)] = name
    missing = [name for name in images if stem_of(name) not in mask_by_stem]
    if missing:
        others = f", and {counted(len(missing) - 1, 'other image')} of {len(images)} have none" if missing[1:] else ""
        problem = f"has no mask called {stem_of(missing[0])} among {pattern}{others}"
        raise DataError(f"{missing[0]}: {problem}; add it, name masks like their images, or remove the image")
    surplus = sorted(set(mask_by_stem) - {stem_of(name) for name in images})
    if surplus:
        raise DataError(f"{mask_by_stem[surplus[0]]}: is a mask without an image; remove it, or correct the pattern")
    return {name: mask_by_stem[stem_of(name)] for name in images}


def _varying_parts(names: Sequence[str]) -> list[str]:
    """Return the paths without their suffixes, and without their common beginning and end."""
    paths = [str(Path(name).with_name(_stem_without_suffixes(name))) for name in names]
    common_start = _common_beginning(paths)
    tails = [path.removeprefix(common_start)[::-1] for path in paths]
    common_end = _common_beginning(tails)
    return [tail.removeprefix(common_end)[::-1] for tail in tails]


def _common_beginning(texts: Sequence[str]) -> str:
    columns = takewhile(lambda column: len(set(column)) == 1, zip(*texts, strict=False))
    return "".join(column[0] for column in columns)


def _stem_without_suffixes(name: str) -> str:
    """Return the name of a file without its suffixes: 'a' for 'scans/a.ome.tif'."""
    return Path(_ARRAY_OR_LEVEL_SUFFIX.sub(r"\1\3", name)).stem.removesuffix(".ome").removesuffix(".nii")


def _read_label_table(path: Path, items: Sequence[ImageEntry]) -> np.ndarray:
    """Return the labels in a table as text, one row per image."""
    rows_by_name = _read_rows_by_image(path, items)
    for item in items:
        if item.name not in rows_by_name:
            raise DataError(f"{path}: has no row for {item.name}; give each image a label")
    return np.array([rows_by_name[item.name] for item in items], dtype=str)


def _read_rows_by_image(path: Path, items: Sequence[ImageEntry]) -> dict[str, list[str]]:
    rows = read_csv_rows(path, "FILE,CLASS")
    names_by_tail: dict[str, set[str]] = {}
    for item in items:
        for file in split_stack_name(item.name):
            for tail in (*_trailing_path_parts(file), _stem_without_suffixes(file)):
                names_by_tail.setdefault(tail, set()).add(item.name)

    def match_image_names(text: str) -> set[str]:
        return next((names_by_tail[tail] for tail in _trailing_path_parts(text) if tail in names_by_tail), set())

    if rows and not match_image_names(rows[0][1][0]):
        rows = rows[1:]  # the header
    rows_by_name: dict[str, list[str]] = {}
    for line, row in rows:
        name, *others = sorted(match_image_names(row[0])) or [""]
        if others:
            raise DataError(f"{path}:{line}: {row[0]!r} could be {name} or {others[0]}; add the folder to the path")
        if not name:
            raise DataError(
                f"{path}:{line}: {row[0]!r} matches no image; remove the row, or correct the pattern of images"
            )
        if len(row) < 2 or (rows_by_name and len(row) - 1 != len(next(iter(rows_by_name.values())))):
            raise DataError(
                f"{path}:{line}: the row {','.join(row)[:80]!r} has {counted(len(row) - 1, 'value')}; give all rows the"
                " same number of values"
            )
        if rows_by_name.setdefault(name, row[1:]) != row[1:]:
            raise DataError(f"{path}:{line}: {row[0]!r} has two rows; keep one")
    return rows_by_name


def _trailing_path_parts(name: str) -> list[str]:
    """Return a path and its trailing parts, down to the file name."""
    parts = Path(name).parts
    return ["/".join(parts[at:]) for at in range(len(parts))]


def _describe(item: ImageEntry) -> str:
    return f"{' x '.join(map(str, item.shape))} {item.dtype}"
