"""Functions of a folder and of constructor arguments that create small datasets with 20 training samples."""

import numpy as np
import pytest
from small_cifar10 import draw_batches, write_folder
from small_datasets import write_mnist
from small_hdf5 import write_hdf5

import neondist as nd


def make_photographs(path, **options):
    Image = pytest.importorskip("PIL.Image", reason="Pillow reads the photographs")
    for name in [] if list(path.iterdir()) else "ab":
        pixels = np.random.default_rng(ord(name)).integers(0, 256, (30, 28), np.uint8)
        Image.fromarray(pixels).save(path / f"{name}.png")
    return nd.Photographs(path, crop=(12, 11), train=20, test=4, **options)


def make_mnist(path, **options):
    if not (path / "mnist").exists():
        write_mnist(path / "mnist", counts=(20, 5))
    return nd.MNIST(path / "mnist", serialized_path=path / "cache_{rank}.h5", **options)


def make_cifar10(path, **options):
    if not (path / "cifar").exists():
        write_folder(path / "cifar", draw_batches())
    return nd.CIFAR10(path / "cifar", **options)


def make_synthetic(path, **options):
    return nd.Synthetic((9, 7, 2), train=20, test=4, **options)


def make_hdf5(path, **options):
    if not (path / "x.h5").exists():
        write_hdf5(path / "x.h5")
    return nd.HDF5Dataset(path / "x.h5", scale=1, **options)


class CustomDataset(nd.Dataset):
    """Dataset without a constructor, which inherits the argument `validation`."""

    def check(self):
        self.sample_shape, self.classes = (4, 4, 1), 3

    def open_splits(self, grid):
        tile = (slice(None), *grid.tile_box((4, 4)).slices)
        images = np.arange(28 * 16, dtype=float).reshape(28, 4, 4, 1)
        return tuple(nd.Split(images[part][tile], np.arange(28)[part] % 3) for part in (slice(20), slice(20, 28)))


def make_custom(path, **options):
    return CustomDataset(**options)


DATASET_FACTORIES = [make_mnist, make_cifar10, make_synthetic, make_photographs, make_custom]
"""datasets whose validation samples are the last training samples; HDF5Dataset draws them at random"""


def open_dataset(data, grid=None):
    """Open a dataset on a grid, by default of one process, and return it."""
    data.open(grid or nd.ProcessGrid.serial())
    return data


def read_raw_cells(split):
    """Return the raw values of all samples of a split."""
    return split.tiles[np.arange(len(split))]
