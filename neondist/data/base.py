"""Data sets: splits of samples; a rank holds its tile of every image and label map, and all other targets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from copy import copy
from numbers import Integral, Real
from typing import Any, TypeVar

from ..comm import ProcessGrid, raise_if_any_failed
from ..comm.argument_text import describe_object
from ..errors import ConfigError, DataError, NotReadyError, UserError, set_error_subject
from ..formats.fields import FieldMetadata
from ..geometry import OverlappingPartition
from ..registry import Registered
from ..registry.arguments import check_value
from ..registry.ranges import Count, Index
from ..terminal.console import counted
from .augment import AugmentedTile, Transform
from .split import Split, tile_shape

SPLITS = ("train", "validation", "test")
AnyDataset = TypeVar("AnyDataset", bound="Dataset")


class Dataset(Registered, ABC):
    """Base class of data sets: samples in up to three splits. A subclass implements `check` and `open_splits`.

    Parameters
    ----------
    validation : float or int, optional
        Fraction, such as 0.1, or number of the training samples to hold out for validation. The last samples are held
        out, the same ones on every grid. Default: none, unless the data have a validation split.

    Attributes
    ----------
    sample_shape : tuple of int
        Global shape of one sample, (H, W, C) or (*spatial, C); available after `check`.
    classes : int
        Number of classes; available after `check`. None if unknown, or if the targets are not classes.
    target_shape : tuple of int or None
        Global shape of the target of one sample, () for a class; available after `check`. None if unknown.
    class_names : sequence of str
        Names of the classes for reports; available after `check`. Empty if unknown.
    train : Split
        Available after `open`, as are `validation` and `test`.
    validation, test : Split or None
        The validation split is used to select settings, the test split for reported results. None if absent.
    has_vector_targets : bool
        Whether the model's outputs are vectors, so that (N, K) are numbers, not maps of signals; set by an experiment.
    content_hash : str
        Set by `open_splits`: a hash of the source data, independent of tiles and ranks. It is compared between
        ranks before training; if it is '' (the default), only labels are compared.

    Raises
    ------
    ConfigError
        If `validation` is neither a fraction nor a number of samples.
    """

    content_hash: str = ""
    target_shape: tuple[int, ...] | None = None
    class_names: Sequence[str] = ()
    has_vector_targets = False
    _validation_share: float | int | None = None  # default for subclasses that do not call this constructor
    _num_shards_and_index: tuple[int, int] | None = None
    _batch_size_and_count: tuple[int, int] | None = None
    _grid: ProcessGrid | None = None  # set by `open`

    #: messages to the user before training
    warnings: Sequence[str] = ()
    #: number of shards and index of the shard of each replica, if any
    shard_of_replica: Sequence[tuple[int, int]] = ()
    #: number of samples in the smallest shard
    smallest_shard_size = 0

    sample_shape: tuple[int, ...]
    classes: int | None
    train: Split
    validation: Split | None
    test: Split | None

    def __init_subclass__(cls, **options: Any) -> None:
        """Reset `target_shape` in subclasses with their own `open_splits`, which may return other targets."""
        super().__init_subclass__(**options)
        if "open_splits" in vars(cls) and "target_shape" not in vars(cls):
            cls.target_shape = None

    def __init__(self, validation: float | int | None = None) -> None:
        require_fraction_or_count("validation", validation)
        self._validation_share = validation

    def __getattr__(self, name: str) -> Any:
        """Raise NotReadyError for attributes that `check` or `open` has yet to set."""
        if name in (*SPLITS, "sample_shape", "classes"):
            required_call = "open(grid)" if name in SPLITS else "check()"
            raise NotReadyError(f"dataset: {type(self).__name__} has no '{name}' yet; call its {required_call} first")
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    @property
    def splits(self) -> dict[str, Split]:
        """The existing splits by name: train, validation, test."""
        splits = {name: getattr(self, name) for name in SPLITS}
        return {name: split for name, split in splits.items() if split is not None}

    @property
    def selection_split(self) -> Split:
        """The split that selects settings: validation, or test if there is none, or else train."""
        return list(self.splits.values())[:2][-1]

    @property
    def fields(self) -> FieldMetadata | None:
        """Metadata of the targets, if they are physical fields; None otherwise."""
        return None

    def known_splits(self) -> Sequence[str] | None:
        """Return the names of the splits, available after `check`; None if they are known only when opened."""
        return None

    @abstractmethod
    def check(self) -> None:
        """Check the source quickly, without MPI, and set the attributes read from it; DataError if it is invalid."""

    @abstractmethod
    def open_splits(self, grid: ProcessGrid) -> tuple[Split, Split] | tuple[Split, Split | None, Split | None]:
        """Return the training and test splits, or the training, validation and test splits; None for a missing split.

        Each split contains this rank's tile, `tile_slices(grid, sample_shape)`. Implementations must not communicate.
        """

    def open(self, grid: ProcessGrid, checked: bool = False, augment: Sequence[Transform] = (), seed: int = 0) -> None:
        """Load this rank's part of all splits. Collective: if one rank fails, every rank raises.

        Parameters
        ----------
        grid : ProcessGrid
        checked : bool
            Whether every rank has already called `check` and the arguments have been compared between ranks.
        augment : sequence of Transform
            Random augmentations of the images of `train` and their label maps, redrawn in every `train.epoch`. All
            cells from which a tile may be computed are kept in memory.
        seed : int
            Seed of the augmentation.

        Raises
        ------
        DataError
            If the source is missing, damaged, too large or of an unexpected kind, on any rank.
        ConfigError
            If an augmentation does not apply to images of this shape.
        """
        settings = dict[str, object]()
        if not checked:
            settings["the data set"] = describe_object(self, self.arguments())
            settings["the augmentation"] = [describe_object(transform, transform.arguments()) for transform in augment]
            settings["its seed"] = seed if augment else None
        grid.check("open", settings)
        error: Exception | None = None
        try:
            if not checked:
                self.check()
            for transform in augment:
                transform.check_shape(self.sample_shape)
            tile = AugmentedTile(augment, seed, self.sample_shape, grid.tile_box(self.sample_shape[:-1]))
            input_partition = OverlappingPartition.of_box(self.sample_shape[:-1], tile.input_box) if augment else None
            splits = self.open_splits(grid.with_tiles(input_partition))
            splits = tuple(splits) if isinstance(splits, Iterator) else splits
            if not _are_splits(splits):
                raise ConfigError(
                    f"dataset: {type(self).__name__}.open_splits returns {type(splits).__name__}; expected a tuple of"
                    " the training and test splits, or the training, validation and test splits, each an nd.Split"
                    " (None for a missing one)"
                )
            self.train, *validation, self.test = splits
            self.validation = validation[0] if validation else None
            if self.validation is None and self._validation_share is not None:
                num_samples = len(self.train)
                num_training = num_samples - self.count_validation_samples(num_samples)
                self.validation = self.train.subset(num_training, num_samples)
                self.train = self.train.subset(0, num_training)
            for split in self.splits.values():
                split.has_vector_targets = self.has_vector_targets
            self._grid = grid
            if self._num_shards_and_index is not None:
                self._restrict_to_shard(*self._num_shards_and_index, grid)
            if self._batch_size_and_count is not None:
                self._restrict_to_batches(*self._batch_size_and_count)
            if augment:
                self._augment_splits(tile)
        except MemoryError as caught:
            detail = f" ({caught})" if str(caught) else ""
            error = DataError(
                f"dataset: a rank lacks the memory for its part of the data{detail}; use more ranks, or fewer samples"
            )
        except Exception as caught:
            error = caught
        raise_if_any_failed(grid.world, error)

    def shard(self: AnyDataset, num_shards: int, index: int) -> AnyDataset:
        """Return the data set restricted to one shard of the training samples; other splits stay whole.

        A shard has the samples `index`, `index + num_shards`, ... of those not held out for validation: shards are
        disjoint and together contain all these samples. Shuffling happens afterwards, within a shard. The ranks of a
        replica need the same shard; if each rank passes its own index, as `shard(task.num_workers, task.shard_index)`
        does in an MPI job, the shard of its replica is used. Collective if the data set is open.

        Parameters
        ----------
        num_shards : int
        index : int
            Index of the shard, from 0.

        Raises
        ------
        ConfigError
            If the shard does not exist, or the data set is already a shard; or, on all ranks when the data set is
            opened, if the ranks of a replica have different shards.
        DataError
            On all ranks when the data set is opened, if a shard is empty.
        """
        check_value("shard: num_shards", num_shards, Count)
        check_value("shard: index", index, Index)
        if index >= num_shards:
            raise ConfigError(f"shard: index: {index} is out of range; give 0 to {num_shards - 1}")
        if self._num_shards_and_index is not None:
            raise ConfigError("shard: the data set is already a shard; call shard once, with more shards")
        shard = copy(self)
        shard._num_shards_and_index = num_shards, index
        if self._grid is not None:
            error: Exception | None = None
            try:
                shard._restrict_to_shard(num_shards, index, self._grid)
            except UserError as problem:
                error = problem
            raise_if_any_failed(self._grid.world, error)
        return shard

    def _restrict_to_shard(self, num_shards: int, index: int, grid: ProcessGrid) -> None:
        """Keep one shard of the training samples. Collective over the tiles of a replica."""
        shards = grid.world.allgather((num_shards, index)) if grid.size > 1 else [(num_shards, index)]
        tiles = grid.shape.tiles
        if shards == [(grid.size, rank) for rank in range(grid.size)]:
            shards = [(grid.replicas, rank // tiles) for rank in range(grid.size)]
            num_shards, index = shards[grid.rank]
        if len(set(replica_shards := shards[grid.replica * tiles :][:tiles])) > 1:
            raise ConfigError(
                f"shard: the ranks of replica {grid.replica} hold tiles of the same samples, but have shards"
                f" {replica_shards}; give all of them the same shard: shard(grid.replicas, grid.replica)"
            )
        num_samples = len(self.train)
        if num_samples < num_shards:
            raise DataError(
                f"shard: {counted(num_samples, 'training sample')} cannot be divided into"
                f" {counted(num_shards, 'shard')}; give at most one shard per sample"
            )
        self.shard_of_replica, self.smallest_shard_size = shards[::tiles], num_samples // num_shards
        self.train = self.train.subset(index, num_samples, num_shards)

    def limit_batches(self, batch_size: int, num_batches: int) -> None:
        """Restrict every split to samples for `num_batches` batches when the data set is opened, for a short run.

        The samples are evenly spaced, so that they come from all files. If the last batch of a split is smaller than
        the others, a batch of its size is kept as well.
        """
        self._batch_size_and_count = batch_size, num_batches

    def _restrict_to_batches(self, batch_size: int, num_batches: int) -> None:
        for name, split in self.splits.items():
            num_kept = batch_size * num_batches + len(split) % batch_size
            if len(split) > num_kept:
                step = len(split) // num_kept
                setattr(self, name, split.subset(0, step * num_kept, step))

    def _augment_splits(self, tile: AugmentedTile) -> None:
        for split in self.splits.values() if tile.moves_cells else ():
            shape = tile_shape(split.labels)[: tile.box.ndim]
            extent = (self.target_shape or tile.shape)[: tile.box.ndim]
            fits = (shape, extent) == (tile.input_box.shape, tile.shape[:-1])
            if split.has_label_maps(tile.box.ndim) and not fits:
                raise DataError(
                    f"augment: label maps must be as large as the images, {tile.shape[:-1]}, to be moved with them;"
                    " leave out Flip, QuarterTurns, Shift and Elastic"
                )
        self.train = self.train.augment_with(tile)
        if tile.moves_cells:
            other_splits = (self.validation, self.test)
            tile = tile.without_augmentation()
            self.validation, self.test = (None if split is None else split.augment_with(tile) for split in other_splits)

    def count_validation_samples(self, num_samples: int) -> int:
        """Return the number of training samples held out for validation; DataError if none would remain."""
        with set_error_subject(self):
            return count_held_out("validation", self._validation_share or 0, num_samples)

    def properties_equal_on_all_ranks(self) -> list[str]:
        """Return the properties that must agree on all ranks once the data set is open, one per line."""
        ndim = len(self.sample_shape) - 1
        shards = self.shard_of_replica[self._grid.replica :][:1] if self._grid is not None else ()
        lines = [f"shard {index} of {num_shards}" for num_shards, index in shards]
        lines += [f"{name} split: {split.properties_equal_on_all_ranks(ndim)}" for name, split in self.splits.items()]
        return [*lines, *([f"data of hash {self.content_hash}"] if self.content_hash else [])]

    def close(self) -> None:
        """Close the files of all splits; later reads reopen them."""
        for split in self.splits.values():
            split.close()


def count_named_classes(classes: int | None, names: Sequence[str] | None) -> int | None:
    """Return the number of classes, by default the number of names; ConfigError if these differ or names repeat."""
    if names is None:
        return classes
    if not names or len({*names}) < len(names):
        raise ConfigError(f"class_names: {names!r} is invalid; expected distinct names, such as [background, vessel]")
    if classes not in (None, len(names)):
        raise ConfigError(f"class_names: {counted(len(names), 'name')} for classes: {classes}; give one name per class")
    return len(names)


def require_fraction_or_count(field: str, share: Any) -> None:
    """Raise ConfigError unless `share` is None, or a fraction or number of samples to hold out for another split."""
    is_count = isinstance(share, Integral) and not isinstance(share, bool)
    if share is not None and not (share > 0 if is_count else _is_fraction(share)):
        raise ConfigError(
            f"{field}: {share!r} is invalid; expected a fraction of the training samples, such as 0.1, or a number of"
            " samples"
        )


def count_held_out(field: str, share: float | int, num_samples: int) -> int:
    """Return the number of training samples held out for another split; DataError if none would remain."""
    max_count = num_samples - 1
    count = share if isinstance(share, Integral) else min(max(1, round(share * num_samples)), max_count)
    if not 0 < count <= max_count:
        raise DataError(
            f"{field}: holding out {share} of {counted(num_samples, 'training sample')} leaves none for"
            " training; hold out fewer"
        )
    return int(count)


def _are_splits(splits: object) -> bool:
    """Return whether these are two or three splits, of which only the first is required."""
    if not isinstance(splits, Sequence) or len(splits) not in (2, 3):
        return False
    return isinstance(splits[0], Split) and all(isinstance(split, Split | None) for split in splits)


def _is_fraction(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and 0 < float(value) < 1


def tile_slices(grid: ProcessGrid, sample_shape: Sequence[int]) -> tuple[slice, ...]:
    """Return the index of this rank's tile in one sample of global shape (*spatial, C); channels are never split."""
    return (*grid.tile_box(tuple(sample_shape[:-1])).slices, slice(0, sample_shape[-1]))
