"""Batches of a data set, tiled over the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree
from torch.utils.data import (
    BatchSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from ...comm import ProcessGrid
from ...errors import ConfigError, ShapeError
from ...terminal.console import counted
from ..execution.tiling import mark_with_layout
from ..ir.layout import Layout, Mesh, local_shape, replicated
from .batch_sources import (
    BatchPart,
    IterableSource,
    MapStyleSource,
    SeededDataset,
    TilingCollate,
    extent_if_read_in_boxes,
)


class Loader:
    """Iterable over this rank's parts of the batches of an epoch, as returned by `loader`.

    Attributes
    ----------
    epoch : int
        Number of epochs begun, which determines the order and the random numbers of the next epoch; set it to resume
        a run.
    grid : ProcessGrid
    """

    def __init__(self, source: MapStyleSource | IterableSource, grid: ProcessGrid) -> None:
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

    def _mark_layouts(self, part: BatchPart) -> Any:
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
    extent = None if is_iterable else extent_if_read_in_boxes(dataset)
    tiling_collate = TilingCollate(collate, grid, extent, spatial, slices_batches=is_iterable)
    options |= {"num_workers": num_workers, "collate_fn": tiling_collate}
    order_generator = torch.Generator()
    try:
        if is_iterable:
            options |= {"shuffle": shuffle, "sampler": sampler, "drop_last": drop_last}
            BatchSampler((), batch_size, drop_last)  # checks the batch size: a DataLoader accepts None
            return Loader(IterableSource(dataset, batch_size, seed, **options), grid)
        if sampler is None:
            sampler = RandomSampler(dataset, generator=order_generator) if shuffle else SequentialSampler(dataset)
        batches = BatchSampler(sampler, batch_size, drop_last)
        seeded_dataset = SeededDataset(dataset, seed, extent, grid)
        return Loader(MapStyleSource(seeded_dataset, batches, order_generator, grid, **options), grid)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"loader: {error}") from error


def _batch_layout(mesh: Mesh, shape: tuple[int, ...], tiled_ndim: int) -> Layout:
    """Return the layout of a batch: the last `tiled_ndim` axes tiled, the first split over replicas."""
    first_tiled_dim = len(shape) - tiled_ndim
    tiled_dims = [(mesh.even_atom(n, axis),) for axis, n in enumerate(shape[first_tiled_dim:], 1)]
    return ((mesh.even_atom(shape[0], 0),), *replicated(shape[1:first_tiled_dim]), *tiled_dims)
