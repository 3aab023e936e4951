"""Images and volumes of any size in an HDF5 file; each rank reads its tile."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from ...arrays import rng
from ...comm import ProcessGrid
from ...errors import ConfigError, DataError
from ...registry.ranges import Count, Finite, Positive, above
from ...terminal.console import counted
from ..base import SPLITS, Dataset, Split, count_named_classes
from ..raw_values import white_value
from .hdf5_source import ArrayInfo, HDF5GroupInfo, hash_content, read_group_info
from .hdf5_tiles import HDF5Array, HDF5Targets, PrefetchingSplit

_MAX_CLASSES = 2**31
_DEFAULT_TEST_SHARE = 0.1


class HDF5Dataset(Dataset):
    """Images (N, H, W, C), volumes (N, D, H, W, C) or signals (N, L, C) in HDF5, with labels per sample or per cell.

    Batches are read on demand: each rank reads its own tile, and a thread prefetches the next batch. `neondist data
    convert` writes such files with chunks suited to tiles; any other layout can be read too.

    Parameters
    ----------
    path : path
        The file; `~` is expanded.
    images, labels : str
        Names of the arrays in each group. Labels are classes (N,), targets (N, K), or maps (N, H, W) or (N, H, W, K)
        with the spatial extent of the network's output.
    train : str
        Name of the training group; '/' is the root of the file.
    test : str or mapping
        The test group, which may be missing if it has the default name; or another file, as for `validation`.
    test_share : float, optional
        Fraction of the samples to draw once and hold out for testing if there is no group `test`. Default: 0.1, or
        none if there is a validation group or file, or a single sample.
    classes : int, optional
        Number of classes. Default: the attribute 'classes' of the labels, or the largest class plus one; unknown for
        maps.
    class_names : sequence of str, optional
        Names of the classes in reports, from class 0. Default: the attribute 'names' of the labels.
    mean, std : float or one per channel, optional
        The network input is (x / scale - mean) / std. Default: the attributes 'mean' and 'std' of the training images,
        or 0 and 1.
    scale : float, optional
        Raw value that maps to 1. Default: the attribute 'scale', or 255 for uint8, 65535 for uint16, else 1.
    ahead : bool
        Prefetch the next batch in a thread.
    validation : str, mapping, float, int or None
        The validation group, which may be missing if it has the default name; another file, as its name (ending in .h5
        or .hdf5) or {path: FILE, group: NAME}, where the group defaults to the name of the training group; or the
        fraction or number of training samples to draw once and hold out. None: no validation.

    Raises
    ------
    ConfigError
        If an argument is invalid.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        images: str = "images",
        labels: str = "labels",
        train: str = "train",
        test: str | Mapping[str, str | os.PathLike[str]] = "test",
        test_share: Annotated[float, above(0, below=1)] | None = None,
        classes: Count | None = None,
        class_names: Sequence[str] | None = None,
        mean: Finite | Sequence[Finite] | None = None,
        std: Positive | Sequence[Positive] | None = None,
        scale: Positive | None = None,
        ahead: bool = True,
        validation: str | Mapping[str, str | os.PathLike[str]] | float | int | None = "validation",
    ) -> None:
        if not os.fspath(path):
            raise ConfigError(f"path: {path!r} is not a path; give an HDF5 file")
        for field, name in (("images", images), ("labels", labels), ("train", train)):
            _check_hdf5_name(field, name)
        self.path, self.images, self.labels = path, images, labels
        self._group_locations = {"train": (self.file, train), "test": self._file_and_group_of("test", test, train)}
        if isinstance(validation, (str, Mapping)):
            self._group_locations["validation"] = self._file_and_group_of("validation", validation, train)
            validation = None
        super().__init__(validation=validation)
        self.test_share, self.mean, self.std, self.scale = test_share, mean, std, scale
        self._given_classes, self._given_class_names = count_named_classes(classes, class_names), class_names
        self.ahead = ahead

    @property
    def file(self) -> Path:
        """The HDF5 file."""
        return Path(os.path.expanduser(self.path))

    def check(self) -> None:
        """Check the shapes and dtypes of the arrays, and read the labels unless they are maps."""
        self._read_groups()

    def known_splits(self) -> Sequence[str]:
        """Return the names of the splits."""
        groups = self._read_groups()
        exists = {"train": True, "test": self._random_test_share(groups), "validation": self._validation_share} | groups
        return [name for name in SPLITS if exists.get(name)]

    def open_splits(self, grid: ProcessGrid) -> tuple[Split, Split | None, Split | None]:
        """Return the splits, whose tiles are read from the file on demand."""
        groups = self._read_groups()
        train = groups["train"]
        self.content_hash = hash_content(groups.values())
        numbers = {name: np.arange(len(group)) for name, group in groups.items()}
        if self._random_test_share(groups):
            num_training = len(numbers["train"])
            num_test = min(max(1, round(self._random_test_share(groups) * num_training)), num_training - 1)
            numbers["train"], numbers["test"] = _split_off_random_samples("test_share", numbers["train"], num_test)
        if self._validation_share is not None:
            num_val = self.count_validation_samples(len(numbers["train"]))
            numbers["train"], numbers["validation"] = _split_off_random_samples("validation", numbers["train"], num_val)
        splits = {name: self._make_split(grid, groups.get(name, train), train, n) for name, n in numbers.items()}
        return splits["train"], splits.get("validation"), splits.get("test")

    def _file_and_group_of(
        self, split: str, location: str | Mapping[str, str | os.PathLike[str]], train: str
    ) -> tuple[Path, str]:
        if isinstance(location, str):
            if not location.endswith((".h5", ".hdf5")):
                return self.file, _check_hdf5_name(split, location)
            location = {"path": location}
        if not {"path"} <= set(location) <= {"path", "group"} or not os.fspath(location["path"]):
            raise ConfigError(f"{split}: {dict(location)!r} is invalid; expected {{path: FILE, group: NAME}}")
        return Path(os.path.expanduser(location["path"])), _check_hdf5_name(split, location.get("group", train))

    def _random_test_share(self, groups: Mapping[str, HDF5GroupInfo]) -> float:
        """Return the fraction of the training samples that is held out for testing."""
        no_test_split = "validation" in groups or len(groups["train"]) < 2
        return 0.0 if "test" in groups else self.test_share or (0.0 if no_test_split else _DEFAULT_TEST_SHARE)

    def _read_groups(self) -> dict[str, HDF5GroupInfo]:
        """Return the description of each existing split; DataError if groups are missing or do not match."""
        groups = {}
        for name, (path, group) in self._group_locations.items():
            info = read_group_info(path, group, self.images, self.labels)
            if info is not None:
                groups[name] = info
            elif name == "train" or (path, group) != (self.file, name):
                raise DataError(f"{path}: has no group '{group}'; specify the group with {name}: ('/' is the file)")
        first = groups["train"]
        shape = first.images.shape[1:]
        for info in groups.values():
            labels_match = info.labels.shape[1 : len(shape)] == first.labels.shape[1 : len(shape)]
            if info.images.shape[1:] != shape or info.has_label_maps != first.has_label_maps or not labels_match:
                raise DataError(
                    f"{info.path}: {info.images.name} {info.images.shape} and its labels {info.labels.shape}"
                    f" differ in shape from {first.images.name} {first.images.shape} and its labels"
                    f" {first.labels.shape}; make the shapes agree"
                )
            if self.scale is None and white_value(info.images.dtype) != white_value(first.images.dtype):
                raise DataError(
                    f"{info.path}: {info.images.name} is {info.images.dtype}, but {first.images.name} is"
                    f" {first.images.dtype}, and all splits have the same scale; give both the same dtype, or set scale"
                )
        if self._random_test_share(groups) and len(first) < 2:
            raise DataError(f"{self.file}: one sample cannot be split into training and test; leave out test_share")
        self.sample_shape, self.target_shape = shape, first.labels.shape[1:]
        self.classes = self._count_classes(groups)
        self.class_names = self._given_class_names or first.labels.class_names
        self._normalisation_arguments(first.images)
        return groups

    def _count_classes(self, groups: dict[str, HDF5GroupInfo]) -> int | None:
        """Return the number of classes; DataError if a label is out of range."""
        attr = groups["train"].labels.numeric_attributes.get("classes")
        if attr is not None and (attr.size != 1 or not 1 <= attr.item() <= _MAX_CLASSES or attr.item() % 1):
            raise DataError(
                f"{self.file}: attribute 'classes' of {groups['train'].labels.name} is"
                f" {attr.ravel()[:3].tolist()}, which is not a number of classes; correct it, or give classes"
            )
        count = self._given_classes or (None if attr is None else int(attr.item()))
        for group in groups.values():
            values = group.sample_labels
            if values is not None and values.dtype.kind == "f" and not np.isfinite(values).all():
                at = int(np.flatnonzero(~np.isfinite(values.reshape(len(values), -1)).all(1))[0])
                raise DataError(f"{group.path}: {group.labels.name} of sample {at} is not finite; correct it")
            if values is None or values.ndim != 1 or values.dtype.kind not in "iub":
                continue
            count = count if self._given_classes or attr is not None else max(count or 0, int(values.max()) + 1)
            bad_samples = np.flatnonzero((values < 0) | (values >= (count or 0)))
            if bad_samples.size:
                at = bad_samples[0]
                raise DataError(
                    f"{group.path}: {group.labels.name} of sample {at} is {values[at]}; expected a class from 0, below"
                    f" {count}; correct it, or give classes"
                )
        return count

    def _make_split(
        self, grid: ProcessGrid, group: HDF5GroupInfo, train_group: HDF5GroupInfo, sample_numbers: np.ndarray
    ) -> Split:
        def get_tiles(array: ArrayInfo, cls: type[HDF5Array]) -> HDF5Array:
            extent = array.shape[1 : len(self.sample_shape)]
            # (N, K) may be K numbers for each signal, which a vector is compared with: every rank reads all of them
            is_tiled = len(array.shape) > 2 or (extent == self.sample_shape[:-1] and not self.has_vector_targets)
            cells = grid.tile_box(extent).slices if is_tiled else ()
            return cls(
                group.path, array.name, array.shape, array.dtype, cells, sample_numbers, group.file_size_and_mtime
            )

        labels = (
            get_tiles(group.labels, HDF5Targets) if group.sample_labels is None else group.sample_labels[sample_numbers]
        )
        arguments = self._normalisation_arguments(train_group.images)
        return PrefetchingSplit(get_tiles(group.images, HDF5Array), labels, self.ahead, **arguments)

    def _normalisation_arguments(self, images: ArrayInfo) -> dict[str, Any]:
        defaults = {"mean": 0.0, "std": 1.0, "scale": white_value(images.dtype)}
        arguments = {}
        for field, default in defaults.items():
            override = getattr(self, field)
            stored = images.numeric_attributes.get(field, default)
            values = np.asarray(stored if override is None else override, np.float64)
            if values.shape not in ((), (1,), images.shape[-1:]):
                raise DataError(
                    f"{field}: values of shape {values.shape} do not fit the"
                    f" {counted(images.shape[-1], 'channel')} of {images.name}; give one value, or one per channel"
                )
            arguments[field] = _check_finite(field, values, positive=field != "mean")
        return arguments


def _check_hdf5_name(field: str, name: object) -> str:
    if not isinstance(name, str) or not name or "\0" in name:
        raise ConfigError(f"{field}: {name!r} is not the name of an array or a group; give one")
    return name


def _split_off_random_samples(key: str, sample_numbers: np.ndarray, num_drawn: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the sample numbers without `num_drawn` randomly drawn ones, and the drawn ones; the same in every run."""
    shuffled = sample_numbers[rng.uniform(rng.key(key), sample_numbers).argsort(kind="stable")]
    return np.sort(shuffled[num_drawn:]), np.sort(shuffled[:num_drawn])


def _check_finite(field: str, values: np.ndarray, positive: bool) -> np.ndarray:
    if not np.all(np.isfinite(values)) or (positive and not np.all(values > 0)):
        raise ConfigError(f"{field}: {values.tolist()} is invalid; expected {'positive ' * positive}numbers")
    return values
