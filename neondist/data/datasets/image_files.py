"""Crops of images of any size in files of any supported format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Literal

import numpy as np

from ...arrays import rng
from ...comm import ProcessGrid
from ...errors import ConfigError, DataError
from ...formats import TileSource
from ...io.hdf5 import checksum
from ...registry.ranges import Count, Finite, Positive
from ...system.memory import parse_bytes
from ...terminal.console import counted
from ..base import SPLITS, Dataset, Split, count_held_out, count_named_classes, require_fraction_or_count, tile_slices
from .image_crops import CropSplit, RandomCropPositions, RandomCropTileReader
from .image_lists import (
    ImageEntry,
    describe_misplaced_masks,
    find_masks,
    is_class_map,
    list_images,
    match_images,
    open_mask,
    read_labels,
    require_same_format,
    select_images_in_table,
)

_NUM_FIT_BOXES, _BOX_EXTENT = 64, 256  # number and extent of the boxes for fitting the normalisation


class ImageFiles(Dataset):
    """Images, volumes or fields in files: TIFF, Zarr, NIfTI, NetCDF, HDF5, PNG and others that `nd.open_source` opens.

    With `crop`, images may have different sizes: every sample is a crop of that size at a random position. The position
    is redrawn in each epoch and depends only on seed, epoch and sample, so it is the same on every grid. Each rank
    reads only its tile of a crop if the format allows. Validation and test crops are fixed. Images along axes of a file
    before the spatial ones (time, samples; depth, if crops have two axes) are separate samples.

    Parameters
    ----------
    images : str or sequence of str
        A pattern such as ``'scans/*.tif'``, ``'data/**/*.png'`` or, for all file types, ``'data/*'``; 'FILE.nc:NAME'
        selects an array, the suffix '#1' a resolution level. With several patterns, as in
        ``['*/t1.nii', '*/t2.nii']``, the channels of an image are in one file per pattern.
    labels : str
        'folders': folder names are classes. FILE.csv: rows of FILE,CLASS, with class numbers from 0 or class names
        (numbered in sorted order), or of FILE,NUMBER,... for regression. Otherwise a pattern of masks named like the
        images, possibly with another beginning or end (a_t1.nii, a_seg.nii): integer masks contain a class per cell,
        other masks a target per cell.
    crop : list of int, optional
        Extents of a crop, [h, w] or [d, h, w]. Default: whole images, which must all have the same size.
    crops_per_image : int
        Number of crops (samples) per image.
    classes : int, optional
        Number of classes. Default: the number of folders, or one more than the largest class of a table; unknown for
        masks.
    class_names : sequence of str, optional
        Names of the classes in reports, from class 0, such as ``[background, vessel]``. Default: the names of folders,
        or the class names in a table.
    class_values : sequence of int, optional
        Value of each class in masks, such as ``[0, 255]``. Default: classes are numbered from 0.
    ignore_index : int, optional
        Value in masks that is not a class, to be ignored by a cost with the same `ignore_index`.
    normalise : 'mean', 'percentile' or 'none'
        The network input is (x - mean) / std, or (x - p) / (q - p) with the percentiles p and q, per channel, computed
        once from up to 64 boxes of the training images, with up to 256 cells per side (64 for volumes); checkpoints
        store these values.
    percentiles : (float, float)
        Percentages of the percentiles p and q. Default: 1 and 99.
    mean, std : float or one per channel, optional
        Values that override the computed ones.
    fill : float, optional
        Value substituted for NaN, in the units of the file. Default: NaN is an error.
    seed : int
        Seed of the positions of crops and of the choice of validation and test images.
    validation, test : float, int, str or mapping, optional
        Fraction or number of the images to draw once and hold out for this split; or other files, as a pattern of
        images or {images: PATTERN, labels: ...}, by default labelled like the training images; or another table of the
        same images, 'FILE.csv'.
    ahead : bool
        Prefetch the next batch in a thread.
    cache : int or str
        Maximum size of each cache of decoded chunks: 128MiB, 4GiB or a number of bytes; 0 disables caching. For each
        split, a rank has one cache for the images and one for the masks.

    Raises
    ------
    ConfigError
        If an argument is invalid.
    """

    def __init__(
        self,
        images: str | Sequence[str],
        labels: str = "folders",
        *,
        crop: Sequence[Count] | None = None,
        crops_per_image: Count = 1,
        classes: Count | None = None,
        class_names: Sequence[str] | None = None,
        class_values: Sequence[int] | None = None,
        ignore_index: int | None = None,
        normalise: Literal["mean", "percentile", "none"] = "mean",
        percentiles: tuple[float, float] = (1.0, 99.0),
        mean: Finite | Sequence[Finite] | None = None,
        std: Positive | Sequence[Positive] | None = None,
        fill: Finite | None = None,
        seed: int = 0,
        validation: float | int | str | Mapping[str, str | Sequence[str]] | None = 0.1,
        test: float | int | str | Mapping[str, str | Sequence[str]] | None = None,
        ahead: bool = True,
        cache: int | str = "128MiB",
    ) -> None:
        options = {"validation": validation, "test": test}
        self._files_of_split = {
            split: _files_of_split(split, option, labels)
            for split, option in options.items()
            if isinstance(option, str | Mapping)
        }
        super().__init__(validation=None if isinstance(validation, str | Mapping) else validation)
        if crop is not None and not 1 <= len(crop) <= 3:
            raise ConfigError(f"crop: {list(crop)} has {len(crop)} extents; give [h, w] or [d, h, w]")
        if not 0 <= percentiles[0] < percentiles[1] <= 100:
            raise ConfigError(f"percentiles: {list(percentiles)} is invalid; expected [low, high] within 0 to 100")
        self.images, self.labels, self.crop, self.crops_per_image = images, labels, crop, crops_per_image
        self._given_classes, self.ignore_index = count_named_classes(classes, class_names), ignore_index
        self.class_values = list(class_values or ())
        if class_values is not None:
            self._given_classes = self._given_classes or len(class_values)
            _check_class_values(class_values, self._given_classes, ignore_index)
        self._given_class_names = class_names
        self.normalise, self.percentiles, self.mean, self.std, self.fill = normalise, percentiles, mean, std, fill
        self.seed, self.ahead, self.cache = seed, ahead, cache
        self._cache_bytes = parse_bytes("cache", cache, minimum=0)
        self._test_share = None if isinstance(test, str | Mapping) else test
        require_fraction_or_count("test", self._test_share)
        #: numbers of the images that are listed for each split
        self._image_numbers: dict[str, np.ndarray] = {}
        self._masks: list[ImageEntry] | None = None
        self._image_labels: np.ndarray | None = None
        self._images: list[ImageEntry] = []

    def check(self) -> None:
        """Check the headers of all files: shapes, dtypes, missing or surplus masks, labels out of range."""
        items_by_split, labels_by_split = self._list_images()
        splits_by_labels = {
            labels: [split for split in labels_by_split if labels_by_split[split] == labels]
            for labels in labels_by_split.values()
        }
        self._images, self._image_numbers = [], {}
        for split in chain(*splits_by_labels.values()):
            first_number = len(self._images)
            self._images += items_by_split[split]
            self._image_numbers[split] = np.arange(first_number, len(self._images))
        first = self._images[0]
        extents = tuple(self.crop) if self.crop is not None else first.extents
        require_same_format(self._images, extents, self.crop is None)
        self.sample_shape = (*extents, first.shape[-1])
        self.classes = self._given_classes
        target_arrays, masks, self.warnings = [], [], []
        class_names: Sequence[str] = ()
        for labels, splits in splits_by_labels.items():
            items = [item for split in splits for item in items_by_split[split]]
            if labels == "folders" or labels.lower().endswith(".csv"):
                targets, self.classes, class_names = read_labels(labels, items, self.classes, class_names)
                target_arrays.append(targets)
            else:
                masks_of_items = find_masks(labels, items, len(extents))
                masks += masks_of_items
                self.warnings += describe_misplaced_masks(items, masks_of_items)
        self.class_names = self._given_class_names or class_names
        kinds = {(x.shape[1:], x.dtype.kind) for x in target_arrays} | {(x.shape[-1:], x.dtype.kind, "") for x in masks}
        if len(kinds) > 1:
            raise DataError(
                f"{splits[0]}: labels differ in type or shape from those of the training split; give classes,"
                " numbers or masks of one kind in all splits"
            )
        self._image_labels, self._masks = np.concatenate(target_arrays) if target_arrays else None, masks or None
        if self._image_labels is not None:
            self.target_shape = self._image_labels.shape[1:]
        else:
            self.target_shape = extents if is_class_map(masks[0]) else (*extents, masks[0].shape[-1])
        if self._validation_share is not None and len(items_by_split["train"]) < 2:
            raise DataError(f"{self.images}: one image cannot be split; add images, or set test and validation: null")
        self._image_numbers_by_split()

    def open_splits(self, grid: ProcessGrid) -> tuple[Split, Split | None, Split | None]:
        """Return the splits, whose tiles are read from the files on demand."""
        if not self._images:
            self.check()
        content = [f"{item.name} {item.shape} {item.dtype}" for item in [*self._images, *(self._masks or [])]]
        self.content_hash = f"{checksum(np.frombuffer(repr(content).encode(), np.uint8)):08x}"
        numbers_by_split = self._image_numbers_by_split()
        normalisation = self._fit_normalisation(numbers_by_split[0])
        train, *rest = (self._make_split(grid, part, normalisation) if len(part) else None for part in numbers_by_split)
        assert train is not None
        return train, rest[0], rest[1]

    def known_splits(self) -> Sequence[str]:
        """Return the names of the splits."""
        return [name for name, numbers in zip(SPLITS, self._image_numbers_by_split(), strict=True) if len(numbers)]

    def open_mask(self, name: str, axes: str | None = None) -> TileSource:
        """Open a file of class labels whose values are those of the masks."""
        return open_mask(name, axes, self.class_values, self.ignore_index)

    def _list_images(self) -> tuple[dict[str, list[ImageEntry]], dict[str, str]]:
        """Return the images that are listed for each split, training images first, and their labels."""
        num_axes = None if self.crop is None else len(self.crop)
        labels = {"train": self.labels}
        labels |= {split: str(files.get("labels", self.labels)) for split, files in self._files_of_split.items()}
        patterns_by_split = {"train": self.images} | {
            split: files.get("images", "") for split, files in self._files_of_split.items()
        }
        items_by_split: dict[str, list[ImageEntry]] = {}
        for split, pattern in patterns_by_split.items():
            field = "images" if split == "train" else f"{split}.images"
            items_by_split[split] = list_images(match_images(field, pattern or self.images, labels[split]), num_axes)
        if "" in patterns_by_split.values():  # tables select the images of splits
            for split, pattern in patterns_by_split.items():
                if pattern in ("", self.images):
                    items_by_split[split] = select_images_in_table(labels[split], items_by_split[split])
        for split, others in items_by_split.items():
            for other in list(items_by_split)[: list(items_by_split).index(split)]:
                if shared := {item.name for item in others} & {item.name for item in items_by_split[other]}:
                    other_name = "training" if other == "train" else other
                    raise DataError(f"{split}: {min(shared)} is also a {other_name} image; make the splits disjoint")
        return items_by_split, labels

    def _image_numbers_by_split(self) -> list[np.ndarray]:
        training = self._image_numbers["train"]
        count = len(training)
        shuffled = training[rng.uniform(rng.key(self.seed, "validation"), np.arange(count)).argsort(kind="stable")]
        num_validation = 0 if self._validation_share is None else self.count_validation_samples(count)
        num_test = 0 if self._test_share is None else count_held_out("test", self._test_share, count)
        if num_validation + num_test >= count:
            raise DataError(
                f"test: {counted(num_validation, 'image')} for validation and {num_test} for test leave no training"
                " images; hold out fewer"
            )
        validation, test, train = np.split(shuffled, [num_validation, num_validation + num_test])
        parts = {"train": train, "validation": validation, "test": test}
        parts |= {split: numbers for split, numbers in self._image_numbers.items() if split != "train"}
        return [np.sort(parts[split]) for split in SPLITS]

    def _make_split(self, grid: ProcessGrid, image_numbers: np.ndarray, normalisation: dict[str, Any]) -> Split:
        sample_images = np.repeat(image_numbers, self.crops_per_image)
        keys = sample_images * self.crops_per_image + np.tile(np.arange(self.crops_per_image), len(image_numbers))
        extents = self.sample_shape[:-1]
        crops = RandomCropPositions(self.seed, keys, [self._images[n].extents for n in sample_images], extents)
        tile = tile_slices(grid, self.sample_shape)[:-1]
        tiles = RandomCropTileReader(
            crops, [self._images[n] for n in sample_images], tile, fill=self.fill, cache=self._cache_bytes
        )
        if self._masks is None:
            labels: Any = self._image_labels[sample_images]  # type: ignore[index]
        else:
            classes = None if self._given_classes is None else (self._given_classes, self.ignore_index)
            masks = [self._masks[n] for n in sample_images]
            labels = RandomCropTileReader(crops, masks, tile, self.open_mask, classes=classes, cache=self._cache_bytes)
        return CropSplit(crops, tiles, labels, self.ahead, scale=1.0, **normalisation)

    def _fit_normalisation(self, image_numbers: np.ndarray) -> dict[str, Any]:
        """Return mean and std, or p and q - p, of each channel, computed from random boxes of the training images."""
        overrides = {name: value for name, value in (("mean", self.mean), ("std", self.std)) if value is not None}
        if self.normalise == "none" or len(overrides) == 2:
            return {"mean": 0.0, "std": 1.0, **overrides}
        positions = np.linspace(0, len(image_numbers) - 1, min(_NUM_FIT_BOXES, len(image_numbers)))
        chosen_numbers = image_numbers[np.unique(positions.astype(np.int64))]
        repeats = max(1, _NUM_FIT_BOXES // len(chosen_numbers))
        box_cells = []
        for number in chosen_numbers:
            item = self._images[number]
            box_shape = tuple(min(n, _BOX_EXTENT if len(item.extents) < 3 else _BOX_EXTENT // 4) for n in item.extents)
            keys = number * repeats + np.arange(repeats)
            boxes = RandomCropPositions(self.seed, keys, [item.extents] * repeats, box_shape, "fit")
            tiles = RandomCropTileReader(boxes, [item] * repeats, tuple(slice(0, n) for n in box_shape), fill=self.fill)
            box_cells.append(tiles[np.arange(repeats)].reshape(-1, self.sample_shape[-1]))
            tiles.close()
        values = np.concatenate(box_cells).astype(np.float64)
        if self.normalise == "mean":
            offset, scale = values.mean(0), values.std(0)
        else:
            offset, high = np.percentile(values, self.percentiles, axis=0)
            scale = high - offset
        return {"mean": offset, "std": np.where(scale > 0, scale, 1.0), **overrides}


def _files_of_split(
    split: str, option: str | Mapping[str, str | Sequence[str]], labels: str
) -> Mapping[str, str | Sequence[str]]:
    """Return the patterns of a split's images and labels; without images, a table selects from the training files."""
    if isinstance(option, str):
        option = {"labels": option} if option.lower().endswith(".csv") else {"images": option}
    is_table = str(option.get("labels", "")).lower().endswith(".csv")
    if not option or not {"images", "labels"} >= {*option} or not ("images" in option or is_table):
        raise ConfigError(
            f"{split}: expected a mapping with 'images' and optionally 'labels' (default: the training labels), or a"
            f" table FILE.csv, got {', '.join(option) or 'nothing'}"
        )
    if "images" not in option and not labels.lower().endswith(".csv"):
        raise ConfigError(
            f"{split}: {option['labels']} lists images, but labels: {labels} is not a table of the training images;"
            " give one, or the images of this split"
        )
    return option


def _check_class_values(values: Sequence[int], classes: int, ignore_index: int | None) -> None:
    """Raise ConfigError unless there is one value for each class, and `ignore_index` is another value."""
    if len({*values}) < len(values) or len(values) != classes:
        raise ConfigError(
            f"class_values: {list(values)} is invalid; expected {counted(classes, 'different value')}, one per class"
        )
    if ignore_index is not None and (ignore_index in values or 0 <= ignore_index < classes):
        raise ConfigError(
            f"ignore_index: {ignore_index} is also a class number or one of class_values; choose another value, or"
            " leave ignore_index out"
        )
