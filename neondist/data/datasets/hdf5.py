"""Images and volumes of any size in an HDF5 file, of which every rank reads its tile."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from ...arrays import rng
from ...comm import ProcessGrid
from ...errors import ConfigError, DataError
from ...registry.ranges import Count, above
from ..base import Dataset, Split
from .hdf5_source import ArrayFacts, GroupFacts, content, look
from .hdf5_tiles import HDF5Tiles, StreamedSplit

_MOST = 2**31  # classes
_TOP = {"u1": 255.0, "u2": 65535.0}
_SHARE = 0.1


class HDF5Dataset(Dataset):
    """Images (N, H, W, C), volumes (N, D, H, W, C) or signals (N, L, C) in HDF5, with labels per sample or per cell.

    Batches are read on demand, each rank its own tile, and a thread prefetches the next batch. `neondist data convert`
    writes such files with chunks suited to tiles; any other layout can be read too.

    Parameters
    ----------
    path : path
        The file; `~` is expanded.
    images, labels : str
        Names of the arrays in each group. Labels are classes (N,), targets (N, K), or maps (N, H, W) or (N, H, W, K),
        whose extent is that of the network's output.
    train, test : str
        The groups; '/' is the file itself.
    test_share : float, optional
        Fraction of the samples held out for testing if there is no group `test`, drawn once. Default: 0.1, or none if
        there is a validation group or file.
    classes : int, optional
        Number of classes. Default: the attribute 'classes' of the labels, or the largest class plus one; unknown for
        maps.
    mean, std : float or one per channel, optional
        The network sees (x / scale - mean) / std. Default: the attributes of these names of the training images, or
        0 and 1.
    scale : float, optional
        Raw value that maps to 1. Default: the attribute, or 255 for uint8, 65535 for uint16, else 1.
    ahead : bool
        Prefetch the next batch in a thread.
    validation : str, mapping, float, int or None
        The validation group, which may be missing if it has the default name; another file, as its name (ending in .h5
        or .hdf5) or {path: FILE, group: NAME}, where the group defaults to the name of the training group; or the
        fraction or number of training samples held out, drawn once. None: no validation.

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
        test: str = "test",
        test_share: Annotated[float, above(0, below=1)] | None = None,
        classes: Count | None = None,
        mean: float | Sequence[float] | None = None,
        std: float | Sequence[float] | None = None,
        scale: float | None = None,
        ahead: bool = True,
        validation: str | Mapping[str, str | os.PathLike[str]] | float | int | None = "validation",
    ) -> None:
        if not os.fspath(path):
            raise ConfigError(f"path: {path!r} is not a path; give an HDF5 file")
        for field, name in (("images", images), ("labels", labels), ("train", train), ("test", test)):
            _name(field, name)
        self.path, self.images, self.labels = path, images, labels
        self.places = {"train": (self.file, train), "test": (self.file, test)}
        if isinstance(validation, (str, Mapping)):
            self.places["validation"] = self._place(validation, train)
            validation = None
        super().__init__(validation=validation)
        self.test_share, self._classes, self.mean, self.std, self.scale = test_share, classes, mean, std, scale
        self.ahead = ahead
        for field, values in (("mean", mean), ("std", std), ("scale", scale)):
            if values is not None:
                _numbers(field, np.asarray(values, np.float64), positive=field != "mean")

    @property
    def file(self) -> Path:
        """The HDF5 file."""
        return Path(os.path.expanduser(self.path))

    def check(self) -> None:
        """Check the shapes and dtypes of the arrays, and read the labels unless they are maps."""
        self._groups()

    def load(self, grid: ProcessGrid) -> tuple[Split, Split | None, Split | None]:
        """Return the splits, whose tiles are read from the file on demand."""
        groups = self._groups()
        first = groups["train"]
        self.content = content(groups.values())
        numbers = {name: np.arange(len(group)) for name, group in groups.items()}
        if self._share(groups):
            count = len(numbers["train"])
            tested = min(max(1, round(self._share(groups) * count)), count - 1)
            numbers["train"], numbers["test"] = _drawn("test_share", numbers["train"], tested)
        if self._kept is not None:
            kept = self.count_kept(len(numbers["train"]))
            numbers["train"], numbers["validation"] = _drawn("validation", numbers["train"], kept)
        splits = {name: self._split(grid, groups.get(name, first), first, of) for name, of in numbers.items()}
        return splits["train"], splits.get("validation"), splits.get("test")

    def _place(self, validation: str | Mapping[str, str | os.PathLike[str]], train: str) -> tuple[Path, str]:
        """Return the file and the group of the validation samples."""
        if isinstance(validation, str):
            if not validation.endswith((".h5", ".hdf5")):
                return self.file, _name("validation", validation)
            validation = {"path": validation}
        if not {"path"} <= set(validation) <= {"path", "group"} or not os.fspath(validation["path"]):
            raise ConfigError(f"validation: {dict(validation)!r} is invalid; expected {{path: FILE, group: NAME}}")
        return Path(os.path.expanduser(validation["path"])), _name("validation", validation.get("group", train))

    def _share(self, groups: Mapping[str, GroupFacts]) -> float:
        """Return the share of the training samples that is drawn for testing."""
        return 0.0 if "test" in groups else self.test_share or (0.0 if "validation" in groups else _SHARE)

    def _groups(self) -> dict[str, GroupFacts]:
        """Return what there is of each split that the file, or a file for validation, has a group for."""
        groups = {}
        for name, (path, group) in self.places.items():
            found = look(path, group, self.images, self.labels)
            if found is not None:
                groups[name] = found
            elif name == "train" or (name == "validation" and (path, group) != (self.file, name)):
                raise DataError(f"{path}: has no group '{group}'; name yours with {name}: ('/' is the file)")
        first = groups["train"]
        shape = first.images.shape[1:]
        for found in groups.values():
            if found.images.shape[1:] != shape or found.maps != first.maps:
                raise DataError(
                    f"{found.path}: {found.images.name} {found.images.shape} and its labels {found.labels.shape}"
                    f" differ in shape from {first.images.name} {first.images.shape} and its labels"
                    f" {first.labels.shape}"
                )
        if self._share(groups) and len(first) < 2:
            raise DataError(f"{self.file}: one sample cannot be split into training and test; add a group 'test'")
        self.sample_shape = shape
        self.classes = self._count(groups)
        self._normalisation(first.images)
        return groups

    def _count(self, groups: dict[str, GroupFacts]) -> int | None:
        """Return the number of classes; DataError if a label is none of them."""
        told = groups["train"].labels.attributes.get("classes")
        if told is not None and (told.size != 1 or not 1 <= told.item() <= _MOST or told.item() != int(told.item())):
            raise DataError(
                f"{self.file}: attribute 'classes' of {groups['train'].labels.name} is"
                f" {told.ravel()[:3].tolist()}, which is not a number of classes; correct it, or give classes"
            )
        count = self._classes or (None if told is None else int(told.item()))
        for group in groups.values():
            values = group.values
            if values is None or values.ndim != 1 or values.dtype.kind not in "iu":
                continue
            count = count if self._classes or told is not None else max(count or 0, int(values.max()) + 1)
            wrong = np.flatnonzero((values < 0) | (values >= (count or 0)))
            if wrong.size:
                at = wrong[0]
                raise DataError(f"{group.path}: {group.labels.name} of sample {at} is {values[at]}, not below {count}")
        return count

    def _split(self, grid: ProcessGrid, group: GroupFacts, first: GroupFacts, numbers: np.ndarray) -> Split:
        def tiles(array: ArrayFacts) -> HDF5Tiles:
            cut = grid.tile_box(array.shape[1 : len(self.sample_shape)]).slices
            return HDF5Tiles(group.path, array.name, array.shape, array.dtype, cut, numbers, group.state)

        labels = tiles(group.labels) if group.values is None else group.values[numbers]
        return StreamedSplit(tiles(group.images), labels, self.ahead, **self._normalisation(first.images))

    def _normalisation(self, images: ArrayFacts) -> dict[str, Any]:
        defaults = {"mean": 0.0, "std": 1.0, "scale": _TOP.get(images.dtype.str[1:], 1.0)}
        found = {}
        for field, default in defaults.items():
            given = getattr(self, field)
            values = np.asarray(images.attributes.get(field, default) if given is None else given, np.float64)
            if values.shape not in ((), (1,), images.shape[-1:]):
                raise DataError(
                    f"{field}: {values.shape} numbers do not fit the {images.shape[-1]} channels of {images.name};"
                    " give one, or one per channel"
                )
            found[field] = _numbers(field, values, positive=field != "mean")
        return found


def _name(field: str, name: Any) -> str:
    if not isinstance(name, str) or not name or "\0" in name:
        raise ConfigError(f"{field}: {name!r} is not the name of an array or a group; give one")
    return name


def _drawn(key: str, numbers: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the sample numbers without `count` that are drawn, once for all, and these."""
    drawn = numbers[rng.uniform(rng.key(key), numbers).argsort(kind="stable")]
    return np.sort(drawn[count:]), np.sort(drawn[:count])


def _numbers(field: str, values: np.ndarray, positive: bool) -> np.ndarray:
    if not np.all(np.isfinite(values)) or (positive and not np.all(values > 0)):
        raise ConfigError(f"{field}: {values.tolist()} is invalid; expected {'positive ' * positive}numbers")
    return values
