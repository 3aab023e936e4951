"""Batches of a data set, tiled over the ranks."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
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
    RandomSampler,
    SequentialSampler,
    Subset,
    default_collate,
)

from ...arrays.rng import key
from ...comm import ProcessGrid
from ...errors import ConfigError, ShapeError
from ...geometry.partition import part_range
from ...terminal.console import counted
from ..capture.checks import checksum_of
from ..execution.tiling import mark_with_layout
from ..ir.layout import Layout, Mesh, local_shape, replicated

EpochAndIndex = tuple[int, int]
"""An epoch, and the index of a sample."""
_CHECKSUM_NAME = (
    "the checksum of the samples (do not divide the data set by rank, and draw random numbers in it with torch,"
    " numpy.random or random, which the loader seeds)"
)
T = TypeVar("T")


class Loader:
    """Iterable over this rank's parts of the batches of an epoch, as returned by `loader`.

    Attributes
    ----------
    epoch : int
        Number of epochs begun, which determines the order and the random numbers of the next epoch; set it to resume
        a run.
    grid : ProcessGrid
    """

    def __init__(self, source: _MapStyleSource | _IterableSource, grid: ProcessGrid) -> None:
        self.grid, self.epoch, self._source = grid, 0, source

    def __len__(self) -> int:
        """Return the number of batches of an epoch; TypeError if the data set has no length."""
        return len(self._source)

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's part of each batch. Collective."""
        epoch = self.epoch
        self.epoch += 1
        batch_parts = self._source.read_epoch(epoch)
        for number in count():
            part, error = None, None
            try:
                part = next(batch_parts, None)
            except Exception as problem:
                error = problem
            compared_values: dict[str, Any] = {"the epoch": epoch, "the batch": "missing"}
            if part is not None:
                tensor_shapes = [shape for shape in part.shapes if shape is not None]
                compared_values |= {
                    "the batch": number,
                    **part.compared_values,
                    "the list of sample shapes (pad to equal sizes in collate_fn)": tensor_shapes,
                }
            self.grid.check("loader", compared_values, error)
            if part is None:
                return
            yield self._mark_layouts(part)

    def _mark_layouts(self, part: _BatchPart) -> Any:
        """Return the tensors of a part, marked with the layout of the whole batch."""
        tile_comm = self.grid.tile_comm
        if tile_comm.size > 1:
            checksum_bounds = np.array([part.checksum, -part.checksum])
            tile_comm.allreduce(checksum_bounds, "max")
            if checksum_bounds[0] != -checksum_bounds[1]:
                raise ConfigError(
                    "loader: the ranks of a replica read different samples for the same index; draw random numbers in"
                    " the data set with torch, numpy.random or random, which the loader seeds for each sample, not with"
                    " a generator of your own"
                )
        mesh = Mesh.from_grid(self.grid.shape, part.spatial_ndim)
        place, num_samples = mesh.place(self.grid.rank), part.num_samples
        first_sample, end = self.grid.sample_range(num_samples)
        leaves, tree = pytree.tree_flatten(part.batch)
        for at, sample_shape in enumerate(part.shapes):
            if sample_shape is not None:
                leaves[at] = leaves[at][: end - first_sample]
                tiled_ndim = part.spatial_ndim if part.are_tiled[at] else 0
                layout = _batch_layout(mesh, (num_samples, *sample_shape), tiled_ndim)
                if tuple(leaves[at].shape) != (expected := local_shape(layout, place)):
                    raise ShapeError(
                        f"loader: a batch of {counted(num_samples, 'sample')} has a tensor of shape"
                        f" {tuple(leaves[at].shape)} on this rank, but {expected} was expected; make collate_fn return"
                        " one entry per sample"
                    )
                mark_with_layout(leaves[at], layout)
        return pytree.tree_unflatten(leaves, tree)


def loader(
    dataset: Any,
    batch_size: int = 1,
    shuffle: bool = False,
    seed: int = 0,
    num_workers: int = 0,
    drop_last: bool = False,
    *,
    grid: ProcessGrid | None = None,
    sampler: Iterable[int] | None = None,
    spatial: int | None = None,
    **options: Any,
) -> Loader:
    """Return a loader for a data set that yields each rank's tile of each batch.

    All ranks iterate over the same batches. A rank reads the samples of its replica (of an iterable data set, all
    samples) and keeps its tile of each image (C, *spatial); tensors with the same spatial extents, such as class labels
    (*spatial), are tiled in the same way; other tensors are kept whole. Pass the tensors directly to the model and to
    `model.loss`. For each sample the generators of torch, NumPy and Python are seeded with (seed, epoch, index), so
    augmentations are identical on every grid and for any number of workers. For an iterable data set, they are seeded
    for each batch or, if there are worker processes, for each worker, as by a DataLoader with
    `generator=torch.Generator().manual_seed(seed)`: augmentations are identical on every grid.

    Parameters
    ----------
    dataset : map-style or iterable data set
        Data set as for torch.utils.data.DataLoader; the first tensor of a sample is the image. An iterable data set
        must yield the same samples on every rank: do not divide them by rank. If a map-style data set has a method
        `read(index, box)` and an attribute `extent` (the spatial extents), only the cells of a neondist.Box are read
        instead of whole samples, also through Subset (`random_split`) and ConcatDataset.
    batch_size : int
        Number of samples in a global batch, over all ranks.
    shuffle : bool
        Reshuffle in every epoch, in the order of a DataLoader with `generator=torch.Generator().manual_seed(seed)`
        and the same options, provided that every epoch is read to its end.
    seed : int
    num_workers : int
        Worker processes per rank.
    drop_last : bool
        Drop a smaller last batch. If it is kept, the model is also captured for its size.
    grid : ProcessGrid, optional
        Grid of the model. Default: all ranks.
    sampler : iterable of int, optional
        A custom order, the same on every rank.
    spatial : int, optional
        As for `distribute`; 0 for samples other than images, such as sequences (length, features), which are kept
        whole.
    **options
        Further arguments of torch.utils.data.DataLoader, such as `collate_fn` and `pin_memory`.

    Returns
    -------
    Loader

    Raises
    ------
    ConfigError
        If arguments are unknown or contradictory, or ranks read different samples.
    """
    for name in ("batch_sampler", "generator"):
        if name in options:
            raise ConfigError(f"loader: {name} is not supported; use sampler, batch_size, drop_last and seed instead")
    is_iterable = isinstance(dataset, IterableDataset)
    if not is_iterable and not (hasattr(dataset, "__getitem__") or hasattr(dataset, "read")):
        raise ConfigError(
            "loader: expected a map-style data set, with __getitem__ and __len__, or an IterableDataset, got"
            f" {type(dataset).__name__}"
        )
    if sampler is not None and shuffle:
        raise ConfigError(
            "loader: sampler and shuffle are mutually exclusive; leave out shuffle, and shuffle in the sampler"
        )
    grid = ProcessGrid() if grid is None else grid
    collate = options.pop("collate_fn", None) or default_collate
    extent = None if is_iterable else _extent_if_read_in_boxes(dataset)
    tiling_collate = _TilingCollate(collate, grid, extent, spatial, slices_batches=is_iterable)
    options |= {"num_workers": num_workers, "collate_fn": tiling_collate}
    order_generator = torch.Generator()
    try:
        if is_iterable:
            options |= {"shuffle": shuffle, "sampler": sampler, "drop_last": drop_last}
            BatchSampler((), batch_size, drop_last)  # checks the batch size: a DataLoader accepts None
            return Loader(_IterableSource(dataset, batch_size, seed, **options), grid)
        if sampler is None:
            sampler = RandomSampler(dataset, generator=order_generator) if shuffle else SequentialSampler(dataset)
        batches = BatchSampler(sampler, batch_size, drop_last)
        seeded_dataset = _SeededDataset(dataset, seed, extent, grid)
        return Loader(_MapStyleSource(seeded_dataset, batches, order_generator, grid, **options), grid)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"loader: {error}") from error


class _MapStyleSource:
    """This rank's parts of the batches of a map-style data set, of which it reads its own samples."""

    def __init__(
        self, dataset: _SeededDataset, batches: BatchSampler, order: torch.Generator, grid: ProcessGrid, **options: Any
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

    def read_epoch(self, epoch: int) -> Iterator[_BatchPart]:
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


class _IterableSource:
    """This rank's parts of the batches of an iterable data set, of which it reads all samples."""

    def __init__(self, dataset: IterableDataset[Any], batch_size: int, seed: int, **options: Any) -> None:
        self._seed, self._generator = seed, torch.Generator()
        self._loader: DataLoader[Any] = DataLoader(dataset, batch_size, generator=self._generator, **options)

    def __len__(self) -> int:
        return len(self._loader)

    def read_epoch(self, epoch: int) -> Iterator[_BatchPart]:
        """Yield this rank's part of each batch."""
        self._generator.manual_seed(self._seed)
        for _ in range(epoch):  # draw the base seeds of the workers of earlier epochs
            torch.empty((), dtype=torch.int64).random_(generator=self._generator)
        batch_parts: Iterator[_BatchPart] | None = None
        for number in count():
            with _seeded_generators(key(self._seed, "batch", epoch, number)):
                batch_parts = iter(self._loader) if batch_parts is None else batch_parts
                part = next(batch_parts, None)
            if part is None:
                return
            yield part


class _BatchPart(NamedTuple):
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


class _SeededDataset(Dataset[Any]):
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


class _TilingCollate:
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

    def __call__(self, samples: list[Any]) -> _BatchPart:
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
        return _BatchPart(batch, spatial_ndim, shapes, are_images, checksum, num_samples, compared_values)


def _own_samples(batch: list[T], replicas: int, replica: int) -> list[T]:
    """Return the samples of a replica; one of another replica, to be discarded, if it has none."""
    return batch[slice(*part_range(len(batch), replicas, replica))] or batch[:1]


def _checksum_of_samples(samples: list[Any]) -> int:
    checksum = 0
    for leaf in pytree.tree_leaves(samples):
        if isinstance(leaf, torch.Tensor | np.ndarray):
            checksum = (checksum * 31 + checksum_of(torch.as_tensor(leaf))) % 2**32
    return checksum


def _extent_if_read_in_boxes(dataset: Any) -> tuple[int, ...] | None:
    """Return the spatial extents of the images of a data set that reads boxes; None if it reads whole images."""
    if type(dataset) is Subset:
        return _extent_if_read_in_boxes(dataset.dataset)
    if type(dataset) is ConcatDataset:
        extents = {_extent_if_read_in_boxes(part) for part in dataset.datasets}
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


def _batch_layout(mesh: Mesh, shape: tuple[int, ...], tiled_ndim: int) -> Layout:
    """Return the layout of a batch: the last `tiled_ndim` axes tiled, the first split over replicas."""
    first_tiled_dim = len(shape) - tiled_ndim
    tiled_dims = [(mesh.even_atom(n, axis),) for axis, n in enumerate(shape[first_tiled_dim:], 1)]
    return ((mesh.even_atom(shape[0], 0),), *replicated(shape[1:first_tiled_dim]), *tiled_dims)


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
