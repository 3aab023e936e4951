"""A rank's parts of the batches of a data set, read by a DataLoader: of its own samples, or of a stream of all."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch.utils import _pytree as pytree
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
)

from ...arrays.rng import key
from ...comm import ProcessGrid
from ...errors import ConfigError
from ...geometry.partition import part_range
from ..capture.checks import checksum_of
from ..ir.layout import Mesh

EpochAndIndex = tuple[int, int]
"""An epoch, and the index of a sample."""
_CHECKSUM_NAME = (
    "the checksum of the samples (do not divide the data set by rank, and draw random numbers in it with torch,"
    " numpy.random or random, which the loader seeds)"
)
T = TypeVar("T")


class MapStyleSource:
    """This rank's parts of the batches of a map-style data set, of which it reads its own samples."""

    def __init__(
        self, dataset: SeededDataset, batches: BatchSampler, order: torch.Generator, grid: ProcessGrid, **options: Any
    ) -> None:
        self._batch_sampler, self._order_generator, self._grid = batches, order, grid
        self._seed, self._last_epoch = dataset.seed, -1
        self._preset_sampler = _PresetBatchSampler()
        # by default, a DataLoader draws from the global generator
        self._loader: DataLoader[Any] = DataLoader(
            dataset, batch_sampler=self._preset_sampler, generator=torch.Generator(), **options
        )

    def __len__(self) -> int:
        return len(self._batch_sampler)

    def read_epoch(self, epoch: int) -> Iterator[BatchPart]:
        """Yield this rank's part of each batch."""
        batches = self._draw_batches(epoch)
        self._preset_sampler.batches = [
            [(epoch, index) for index in _own_samples(batch, self._grid.replicas, self._grid.replica)]
            for batch in batches
        ]
        for batch, part in zip(batches, self._loader, strict=True):
            values = {"the number of batches": len(batches), "the list of samples": batch}
            yield part._replace(num_samples=len(batch), compared_values=values)

    def _draw_batches(self, epoch: int) -> list[list[int]]:
        """Return the batches of an epoch, in the order in which a DataLoader would draw them."""
        batches: list[list[int]] = []
        if epoch <= self._last_epoch or self._last_epoch < 0:
            self._order_generator.manual_seed(self._seed)
            self._last_epoch = -1
        while self._last_epoch < epoch:
            if self._last_epoch < 0 or not self._loader.persistent_workers:
                # base seed of a DataLoader's workers
                torch.empty((), dtype=torch.int64).random_(generator=self._order_generator)
            batches = [list(map(int, batch)) for batch in self._batch_sampler]
            self._last_epoch += 1
        return batches


class IterableSource:
    """This rank's parts of the batches of an iterable data set, of which it reads all samples."""

    def __init__(self, dataset: IterableDataset[Any], batch_size: int, seed: int, **options: Any) -> None:
        self._seed, self._generator = seed, torch.Generator()
        self._loader: DataLoader[Any] = DataLoader(dataset, batch_size, generator=self._generator, **options)

    def __len__(self) -> int:
        return len(self._loader)

    def read_epoch(self, epoch: int) -> Iterator[BatchPart]:
        """Yield this rank's part of each batch."""
        self._generator.manual_seed(self._seed)
        for _ in range(epoch):  # draw the base seeds of the workers of earlier epochs
            torch.empty((), dtype=torch.int64).random_(generator=self._generator)
        batch_parts: Iterator[BatchPart] | None = None
        for number in count():
            with _seeded_generators(key(self._seed, "batch", epoch, number)):
                batch_parts = iter(self._loader) if batch_parts is None else batch_parts
                part = next(batch_parts, None)
            if part is None:
                return
            yield part


class BatchPart(NamedTuple):
    """A rank's part of a batch, as read by a worker.

    Attributes
    ----------
    batch : collated samples, with tiled images
    spatial_ndim : int
        Number of the images' spatial axes.
    shapes, are_tiled
        For each leaf, its whole shape without the batch (None if it is not a tensor), and whether it is tiled.
    checksum : int
        Checksum of all tensors before tiling; 0 if only boxes were read.
    num_samples : int
        Number of samples of the whole batch.
    compared_values : dict
        Values, by description, that must be equal on all ranks.
    """

    batch: Any
    spatial_ndim: int
    shapes: list[tuple[int, ...] | None]
    are_tiled: list[bool]
    checksum: int
    num_samples: int
    compared_values: dict[str, Any]


class _PresetBatchSampler:
    def __init__(self) -> None:
        self.batches: Sequence[list[EpochAndIndex]] = ()

    def __iter__(self) -> Iterator[list[EpochAndIndex]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class SeededDataset(Dataset[Any]):
    """A data set that seeds random generators before it reads a sample.

    Attributes
    ----------
    extent : tuple of int or None
        Whole extents of the images, if the data set reads boxes.
    """

    def __init__(self, dataset: Any, seed: int, extent: tuple[int, ...] | None, grid: ProcessGrid) -> None:
        self.dataset, self.seed, self.extent = dataset, seed, extent
        self._box = None if extent is None else grid.tile_box(extent)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, position: EpochAndIndex) -> Any:
        epoch, index = position
        with _seeded_generators(key(self.seed, "sample", epoch, index)):
            if self._box is None:
                return self.dataset[index]
            dataset, index = _underlying_sample(self.dataset, index)
            return dataset.read(index, self._box)


class TilingCollate:
    """Collation of samples into a batch, reduced to this rank's tile."""

    def __init__(
        self,
        collate: Callable[[list[Any]], Any],
        grid: ProcessGrid,
        extent: tuple[int, ...] | None,
        spatial: int | None,
        slices_batches: bool,
    ) -> None:
        self.collate, self.extent, self.spatial, self.slices_batches = collate, extent, spatial, slices_batches
        self.shape, self.rank, self.replica = grid.shape, grid.rank, grid.replica

    def __call__(self, samples: list[Any]) -> BatchPart:
        """Return this rank's part of a batch."""
        num_samples, compared_values = len(samples), dict[str, Any]()
        if self.slices_batches:
            compared_values = {
                "the number of samples": num_samples,
                _CHECKSUM_NAME: f"{_checksum_of_samples(samples):08x}",
            }
            samples = _own_samples(samples, self.shape.replicas, self.replica)
        leaves, tree = pytree.tree_flatten(self.collate(samples))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if not tensors:
            raise ConfigError("loader: samples contain no tensor; return the image as the first tensor")
        spatial_ndim = max(0, tensors[0].dim() - 2) if self.spatial is None else self.spatial
        mesh = Mesh.from_grid(self.shape, spatial_ndim)
        place = mesh.place(self.rank)
        image_extent = tuple(tensors[0].shape[2:])
        extent = self.extent or image_extent
        checksum = 0
        shapes = list[tuple[int, ...] | None]()
        are_images = []
        for at, leaf in enumerate(leaves):
            is_tensor = isinstance(leaf, torch.Tensor) and leaf.dim() > 0
            is_image = is_tensor and 0 < spatial_ndim < leaf.dim() and leaf.shape[-spatial_ndim:] == image_extent
            are_images.append(is_image)
            if not is_tensor:
                shapes.append(None)
                continue
            shapes.append((*leaf.shape[1:-spatial_ndim], *extent) if is_image else tuple(leaf.shape[1:]))
            if self.extent is None:
                checksum = (checksum * 31 + checksum_of(leaf)) % 2**32
                if is_image:
                    for axis, dim in enumerate(range(leaf.dim() - spatial_ndim, leaf.dim()), 1):
                        lo, hi = mesh.even_atom(leaf.shape[dim], axis).range(place)
                        leaf = leaf.narrow(dim, lo, hi - lo)
                    leaves[at] = leaf.contiguous()
        batch = pytree.tree_unflatten(leaves, tree)
        return BatchPart(batch, spatial_ndim, shapes, are_images, checksum, num_samples, compared_values)


def _own_samples(batch: list[T], replicas: int, replica: int) -> list[T]:
    """Return the samples of a replica; one of another replica, to be discarded, if it has none."""
    return batch[slice(*part_range(len(batch), replicas, replica))] or batch[:1]


def _checksum_of_samples(samples: list[Any]) -> int:
    checksum = 0
    for leaf in pytree.tree_leaves(samples):
        if isinstance(leaf, torch.Tensor | np.ndarray):
            checksum = (checksum * 31 + checksum_of(torch.as_tensor(leaf))) % 2**32
    return checksum


def extent_if_read_in_boxes(dataset: Any) -> tuple[int, ...] | None:
    """Return the spatial extents of the images of a data set that reads boxes; None if it reads whole images."""
    if type(dataset) is Subset:
        return extent_if_read_in_boxes(dataset.dataset)
    if type(dataset) is ConcatDataset:
        extents = {extent_if_read_in_boxes(part) for part in dataset.datasets}
        return extents.pop() if len(extents) == 1 else None
    if not hasattr(dataset, "read"):
        return None
    try:
        return tuple(int(n) for n in dataset.extent)
    except (AttributeError, TypeError):
        raise ConfigError(
            f"loader: {type(dataset).__name__} has read(index, box), but no attribute extent; set extent to the spatial"
            " extents of the images, such as (height, width)"
        ) from None


def _underlying_sample(dataset: Any, index: int) -> tuple[Any, int]:
    """Return the data set from which a Subset or ConcatDataset takes a sample, and the sample's index there.

    Subclasses are not followed: they may change samples.
    """
    while True:
        if type(dataset) is Subset:
            dataset, index = dataset.dataset, int(dataset.indices[index])
        elif type(dataset) is ConcatDataset:
            dataset_index = bisect_right(dataset.cumulative_sizes, index)
            first_index = dataset.cumulative_sizes[dataset_index - 1] if dataset_index else 0
            dataset, index = dataset.datasets[dataset_index], index - first_index
        else:
            return dataset, index


@contextmanager
def _seeded_generators(seed: int) -> Iterator[None]:
    """Context that seeds the generators of torch, NumPy and Python, and restores them."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed >> 1)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)
