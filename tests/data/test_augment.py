"""Augmentation tile by tile, compared with NumPy, `map_coordinates` of SciPy and `grid_sample` of PyTorch."""

import numpy as np
import pytest
import torch
from scipy.ndimage import map_coordinates
from scipy.special import ndtri
from small_datasets import assemble_image
from small_hdf5 import write_hdf5

import neondist as nd
from neondist.arrays import rng
from neondist.comm import loopback
from neondist.data import Dataset, Split
from neondist.data.base import tile_slices
from neondist.data.split import read_cells
from neondist.errors import ConfigError, DataError

COUNT, SEED, EPOCH = 7, 5, 3
SHAPES = {1: (23, 2), 2: (13, 11, 3), 3: (6, 7, 5, 2)}
RANKS = (1, 2, 3, 4, 6)


def random_samples(shape, low=0):
    """Return random images and label maps of `COUNT` samples."""
    generator = np.random.default_rng(0)
    return generator.normal(size=(COUNT, *shape)), generator.integers(low, 5, (COUNT, *shape[:-1]), dtype="i2")


class CountingTiles:
    """Tiles that record the number of cells read."""

    def __init__(self, cells):
        self.cells, self.shape, self.cells_read = cells, cells.shape, []

    def __len__(self):
        return len(self.cells)

    def __getitem__(self, numbers):
        return self.read_cells(numbers, ())

    def read_cells(self, numbers, cells):
        arrays = read_cells(self.cells, numbers, cells)
        self.cells_read += [array.size for array in arrays]
        return arrays


class ArrayDataset(Dataset):
    """Images and labels in memory, of which `open_splits` keeps the tile of this rank."""

    def __init__(self, images, labels, test=None):
        super().__init__()
        self.arrays, self.sample_shape, self.classes = (images, labels), images.shape[1:], None
        self.maps = labels.ndim == images.ndim - 1

    def check(self):
        pass

    def open_splits(self, grid):
        images, labels = self.arrays
        index = (slice(None), *tile_slices(grid, self.sample_shape))
        labels = labels[(slice(None), *grid.tile_box(labels.shape[1 : len(self.sample_shape)]).slices)]
        splits = [Split(CountingTiles(images[index].copy()), labels, scale=1.0) for _ in range(2)]
        return splits[0], splits[1]


def make_grid(comm, ndim):
    planes = 2 if ndim == 3 and comm.size in (4, 6) else 1
    return nd.ProcessGrid(comm, planes=planes)


def load_samples(comm, steps, images, maps, numbers, epoch=EPOCH):
    """Return the box of a rank, its tiles of images, label maps and test images, and the counts of cells read."""
    grid = make_grid(comm, images.ndim - 2)
    data = ArrayDataset(images, maps)
    data.open(grid, augment=steps, seed=SEED)
    data.train.epoch = epoch
    x, y = data.train.images(numbers, "float64"), data.train.targets(numbers)
    return grid.tile_box(images.shape[1:-1]), x, y, data.test.images(numbers, "float64"), data.train.tiles.cells_read


def random_numbers(step, position, count=COUNT, epoch=EPOCH):
    """Return the uniform random numbers of a step for each sample, and the key of its noise stream."""
    stream = rng.key(SEED, "augment", position, type(step).__name__, epoch)
    return rng.uniform(stream, np.arange(count)[:, None] * 4 + np.arange(4)), rng.key(stream, "cells")


def axis_names(x, maps):
    return ["depth", "height", "width"][-(x.ndim - (not maps)) :]


def flip(step, x, u, maps, *_):
    names = axis_names(x, maps)
    for axis, name in enumerate(names):
        if name in step.axes and u[1 + axis] < step.rate:
            x = np.take(x, range(x.shape[axis])[::-1], axis)
    return x


def rotate(step, x, u, maps, *_):
    names = axis_names(x, maps)
    first, second = (names.index(name) for name in step.axes)
    for _ in range(int(4 * u[1])):
        x = np.flip(np.swapaxes(x, first, second), first)
    return x


def shift(step, x, u, maps, *_):
    spatial = x.ndim - (not maps)
    pad = [(step.max, step.max)] * spatial + [(0, 0)] * (x.ndim - spatial)
    mode = {"reflect": "reflect", "replicate": "edge", "zeros": "constant"}[step.mode]
    first = [int(value * (2 * step.max + 1)) for value in u[1 : 1 + spatial]]
    index = tuple(slice(lo, lo + n) for lo, n in zip(first, x.shape, strict=False))
    return np.pad(x, pad, mode=mode)[index]


def brighten(step, x, u, maps, *_):
    return x if maps else x + step.amount * (2 * u[1] - 1)


def contrast(step, x, u, maps, *_):
    return x if maps else step.level + (x - step.level) * (1 - step.amount + 2 * step.amount * u[1])


def noise(step, x, u, maps, sample, stream):
    if maps or u[0] >= step.rate:
        return x
    level = np.floor(65536 * rng.uniform(stream, sample * x.size + np.arange(x.size)))
    return x + step.sigma * ndtri((level + 0.5) / 65536).reshape(x.shape)


def bspline(t):
    """Return the cubic B-spline with unit knot spacing centred on 0."""
    t = np.abs(t)
    return np.where(t < 1, 2 / 3 - t**2 + t**3 / 2, np.where(t < 2, (2 - t) ** 3 / 6, 0))


def displacement(step, extent, sample, stream):
    """Return the displacement of all cells, of shape (axes, *extent), as a sum over all control points."""
    d = len(extent)
    points = [int((n - 1) / step.spacing) + 4 for n in extent]
    index = sample * d * np.prod(points) + np.arange(d * np.prod(points))
    field = step.displacement * (2 * rng.uniform(stream, index).reshape(d, *points) - 1)
    letters, cells = "uvw"[:d], "xyz"[:d]
    weights = [
        bspline(np.arange(n)[:, None] / step.spacing - (np.arange(p) - 1)) for n, p in zip(extent, points, strict=True)
    ]
    pairs = ",".join(a + b for a, b in zip(cells, letters, strict=True))
    return np.einsum(f"d{letters},{pairs}->d{cells}", field, *weights)


def deform(step, x, u, maps, sample, stream):
    if u[0] >= step.rate:
        return x
    extent = x.shape if maps else x.shape[:-1]
    offsets = displacement(step, extent, sample, stream)
    assert np.abs(offsets).max() <= step.displacement
    positions = np.stack(np.meshgrid(*map(np.arange, extent), indexing="ij")) + offsets
    if maps:
        indices = [
            np.clip(np.floor(coordinate + 0.5).astype(int), 0, n - 1)
            for coordinate, n in zip(positions, extent, strict=True)
        ]
        return x[tuple(indices)]
    channels = [map_coordinates(x[..., c], positions, order=1, mode="nearest") for c in range(x.shape[-1])]
    return np.stack(channels, -1)


ORACLES = {
    nd.Flip: flip,
    nd.QuarterTurns: rotate,
    nd.Shift: shift,
    nd.Brightness: brighten,
    nd.Contrast: contrast,
    nd.Noise: noise,
    nd.Elastic: deform,
}


def augment_reference(steps, samples, maps, epoch=EPOCH):
    """Return full images, or label maps, after all steps."""
    augmented = []
    for sample, x in enumerate(samples):
        for position, step in enumerate(steps):
            u, stream = random_numbers(step, position, len(samples), epoch)
            x = ORACLES[type(step)](step, x, u[sample], maps, sample, stream)
        augmented.append(x)
    return np.stack(augmented)


STEPS = {
    1: [nd.Shift(5), nd.Flip(), nd.Elastic(2.5, 6), nd.Contrast(0.5, level=0.3), nd.Noise(0.2), nd.Brightness(0.4)],
    2: [
        nd.Flip(["height", "width"]),
        nd.Noise(0.3, rate=0.6),
        nd.Shift(4),
        nd.Brightness(0.4),
        nd.Elastic(3, 5),
        nd.Contrast(0.5, level=-0.2),
        nd.Flip(rate=1.0),
        nd.Noise(0.2),
    ],
    3: [nd.Elastic(1.5, 3.5, rate=0.7), nd.Flip(["depth", "width"]), nd.Shift(3, mode="zeros"), nd.Noise(0.1)],
}
SQUARE_STEPS = [nd.QuarterTurns(), nd.Shift(6, mode="zeros"), nd.QuarterTurns(["width", "height"]), nd.Elastic(9, 4)]
CASES = [
    *((steps, SHAPES[ndim]) for ndim, steps in STEPS.items()),
    *(([step], SHAPES[ndim]) for ndim, steps in STEPS.items() for step in steps if ndim > 1),
    (SQUARE_STEPS, (9, 9, 2)),
    ([nd.QuarterTurns(["depth", "width"]), nd.Elastic(2, 4)], (5, 4, 5, 1)),
    ([nd.Shift(30, mode="replicate"), nd.Shift(40, mode="zeros")], (7, 3, 1)),
]


@pytest.mark.parametrize(("steps", "shape"), CASES)
def test_tiles_match_numpy_and_scipy(steps, shape):
    images, maps = random_samples(shape)
    x, y = augment_reference(steps, images, False), augment_reference(steps, maps, True)
    assert not np.array_equal(x, images) or all(step.rate < 1 for step in steps)
    numbers = np.array([4, 0, 6, 2])
    for ranks in RANKS:
        results = loopback.run(ranks, lambda comm: load_samples(comm, steps, images, maps, numbers))
        boxes, tiles, labels, tests, _ = zip(*results, strict=True)
        np.testing.assert_allclose(assemble_image(tiles, boxes, (4, *shape)), x[numbers], rtol=0, atol=1e-12)
        np.testing.assert_array_equal(assemble_image(labels, boxes, (4, *shape[:-1])), y[numbers])
        np.testing.assert_array_equal(assemble_image(tests, boxes, (4, *shape)), images[numbers])
        assert all(tile.flags.c_contiguous for tile in tiles)


def test_elastic_matches_grid_sample():
    step, images = nd.Elastic(4, 7), random_samples((15, 12, 2))[0]
    _, x, *_ = loopback.run(1, lambda comm: load_samples(comm, [step], images, images[..., 0], np.arange(COUNT)))[0]
    fields = [displacement(step, (15, 12), n, random_numbers(step, 0)[1]) for n in range(COUNT)]
    positions = [np.stack([np.arange(12) + f[1], np.arange(15)[:, None] + f[0]], -1) for f in fields]
    grid = torch.from_numpy(np.stack(positions) / [5.5, 7] - 1)
    y = torch.nn.functional.grid_sample(
        torch.from_numpy(images).movedim(-1, 1), grid, padding_mode="border", align_corners=True
    )
    np.testing.assert_allclose(x, y.movedim(1, -1).numpy(), rtol=0, atol=1e-12)


def test_samples_depend_on_the_epoch_but_not_on_batches():
    images, maps = random_samples(SHAPES[2])
    data = ArrayDataset(images, maps)
    data.open(nd.ProcessGrid.serial(), augment=STEPS[2], seed=SEED)
    data.train.epoch = EPOCH
    x = data.train.images(np.arange(COUNT), "float64")
    batches = [[6], [2, 0], [], [5, 1, 4, 3]]
    for numbers, (images_of_batch, labels) in zip(batches, data.train.batches(batches, "float64"), strict=True):
        np.testing.assert_array_equal(images_of_batch, x[numbers].reshape(images_of_batch.shape))
        assert len(labels) == len(numbers)
    lazy = data.train.lazy_images([3, 5], "float64")
    assert lazy.shape == (2, *SHAPES[2])
    np.testing.assert_array_equal(lazy[0:2, 2:9, 4:5], x[[3, 5], 2:9, 4:5])
    np.testing.assert_array_equal(data.train.without_augmentation().images([1], "float64"), images[[1]])
    data.train.epoch = EPOCH + 1
    assert not np.isclose(x, data.train.images(np.arange(COUNT), "float64")).all(axis=(1, 2, 3)).any()
    single = data.train.images([0], "float32")
    assert single.dtype == np.float32
    np.testing.assert_allclose(single, data.train.images([0], "float64"), atol=1e-5)


@pytest.mark.parametrize(
    ("steps", "limit"),
    [
        ([nd.Flip(["height", "width"]), nd.Noise()], lambda h, w: h * w),
        ([nd.QuarterTurns()], lambda h, w: h * w),
        ([nd.Shift(4)], lambda h, w: h * w),
        ([nd.Elastic(3, 8), nd.Brightness()], lambda h, w: (h + 6) * (w + 6)),
        ([nd.Elastic(2.5, 8), nd.Flip(), nd.Elastic(1)], lambda h, w: (h + 8) * (w + 8)),
    ],
)
def test_tiles_read_only_the_cells_they_need(steps, limit):
    images, maps = random_samples((24, 24, 1))
    for ranks in (4, 6):
        for box, *_, read in loopback.run(
            ranks, lambda comm: load_samples(comm, steps, images, maps, np.arange(COUNT))
        ):
            assert len(read) == COUNT
            assert max(read) <= limit(*box.shape) < 24 * 24


def test_more_ranks_than_rows():
    images, maps = random_samples((5, 3, 2))
    x = augment_reference(STEPS[2][3:], images, False)
    results = loopback.run(9, lambda comm: load_samples(comm, STEPS[2][3:], images, maps, np.arange(COUNT)))
    boxes, tiles, *_ = zip(*results, strict=True)
    np.testing.assert_allclose(assemble_image(tiles, boxes, x.shape), x, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("steps", "shape", "message"),
    [
        ([nd.QuarterTurns()], (8, 6, 1), r"QuarterTurns: images of shape \(8, 6, 1\) have 8 cells along height and 6"),
        ([nd.QuarterTurns()], (8, 1), r"QuarterTurns: axes: images of shape \(8, 1\) have no height; .* width$"),
        ([nd.Flip(["depth"])], (8, 8, 1), "Flip: axes: .* have no depth; choose from height, width"),
        ([nd.Shift(6)], (8, 6, 1), "Shift: max: .* less than 6, or mode: replicate"),
    ],
)
def test_incompatible_image_shapes(steps, shape, message):
    data = ArrayDataset(*random_samples(shape))
    with pytest.raises(ConfigError, match=message):
        data.open(nd.ProcessGrid.serial(), augment=steps)
    model = nd.Convnet([nd.ConvLayer(2, 1)])
    with pytest.raises(ConfigError, match=message):
        nd.FitExperiment(ArrayDataset(*random_samples(shape)), model, batch_size=2, augment=steps).validate()


def test_invalid_arguments_and_label_maps():
    with pytest.raises(ConfigError, match="do not span a plane"):
        nd.QuarterTurns(["height", "height"])
    with pytest.raises(ConfigError, match="Flip: rate"):
        nd.Flip(rate=1.5)
    with pytest.raises(ConfigError, match=r"Shift: mode: expected .*'wrap'"):
        nd.Shift(mode="wrap")
    images, maps = random_samples((8, 8, 1))
    for steps, invalid in (([nd.Noise(), nd.Elastic()], True), ([nd.Noise()], False)):
        data = ArrayDataset(images, maps[:, :6, :6])
        if invalid:
            with pytest.raises(DataError, match=r"augment: label maps must be as large as the images"):
                data.open(nd.ProcessGrid.serial(), augment=steps)
        else:
            data.open(nd.ProcessGrid.serial(), augment=steps)
            np.testing.assert_array_equal(data.train.targets([1, 2]), maps[[1, 2], :6, :6])


@pytest.mark.parametrize("ahead", [True, False])
def test_hdf5_tiles_are_augmented(tmp_path, ahead):
    arrays = write_hdf5(tmp_path / "x.h5", (13, 10, 2), maps=(13, 10))
    steps = STEPS[2]
    x, y = (augment_reference(steps, arrays["train", name].astype(dtype), name == "labels") for name, dtype in
            (("images", "f8"), ("labels", "i4")))  # fmt: skip

    def load(comm):
        data, grid = nd.HDF5Dataset(tmp_path / "x.h5", scale=1.0, ahead=ahead), make_grid(comm, 2)
        data.open(grid, augment=steps, seed=SEED)
        data.train.epoch = EPOCH
        batches = list(data.train.batches([[3, 9], [0]], "float64"))
        tests = data.test.images([1], "float64"), data.test.targets([1])
        data.close()
        return grid.tile_box((13, 10)).slices, batches, tests

    for index, batches, tests in loopback.run(4, load):
        for numbers, (images, labels) in zip(([3, 9], [0]), batches, strict=True):
            np.testing.assert_allclose(images, x[(numbers, *index)], rtol=0, atol=1e-11)
            np.testing.assert_array_equal(labels, y[(numbers, *index)])
        for array, name in zip(tests, ("images", "labels"), strict=True):
            np.testing.assert_array_equal(array, arrays["test", name][([1], *index)])


def test_file_crops_are_augmented(tmp_path):
    generator = np.random.default_rng(0)
    for kind, channels in (("images", 2), ("masks", 1)):
        (tmp_path / kind).mkdir()
        for n in range(4):
            np.save(tmp_path / kind / f"{n}.npy", generator.integers(0, 5, (17 + n, 20 - n, channels), dtype="u1"))
    steps, numbers = [nd.QuarterTurns(), *STEPS[2]], np.arange(3)

    def load_crops(comm, augment):
        grid = make_grid(comm, 2)
        patterns = [f"{tmp_path}/{kind}/*.npy" for kind in ("images", "masks")]
        data = nd.ImageFiles(*patterns, crop=[13, 13], validation=1, normalise="none")
        data.open(grid, augment=augment, seed=SEED)
        data.train.epoch = EPOCH
        batch = next(data.train.batches([numbers], "float64"))
        validation = data.validation.images([0], "float64"), data.validation.targets([0])
        data.close()
        return grid.tile_box((13, 13)), *batch, *validation

    _, images, maps, *unchanged = loopback.run(1, lambda comm: load_crops(comm, []))[0]
    x, y = augment_reference(steps, images, False), augment_reference(steps, maps, True)
    for ranks in RANKS:
        boxes, *arrays = zip(*loopback.run(ranks, lambda comm: load_crops(comm, steps)), strict=True)
        for tiles, expected in zip(arrays, (x, y, *unchanged), strict=True):
            np.testing.assert_allclose(assemble_image(tiles, boxes, expected.shape), expected, rtol=0, atol=1e-12)
