"""Augmentation of whole images, tile by tile: compared with NumPy, map_coordinates of SciPy, grid_sample of PyTorch."""

import numpy as np
import pytest
import torch
from dataset_toys import whole
from hdf5_toys import small_hdf5
from scipy.ndimage import map_coordinates
from scipy.special import ndtri

import neondist as nd
from neondist.arrays import rng
from neondist.comm import loopback
from neondist.data import Dataset, Split
from neondist.data.base import tile_slices
from neondist.data.split import part_of
from neondist.errors import ConfigError, DataError

COUNT, SEED, EPOCH = 7, 5, 3
SHAPES = {1: (23, 2), 2: (13, 11, 3), 3: (6, 7, 5, 2)}
RANKS = (1, 2, 3, 4, 6)


def drawn(shape, low=0):
    """Images of values in whole steps, and maps, of `COUNT` samples."""
    draw = np.random.default_rng(0)
    return draw.normal(size=(COUNT, *shape)), draw.integers(low, 5, (COUNT, *shape[:-1]), dtype="i2")


class Counted:
    """Tiles of which cells are read, and counted."""

    def __init__(self, cells):
        self.cells, self.shape, self.read = cells, cells.shape, []

    def __len__(self):
        return len(self.cells)

    def __getitem__(self, numbers):
        return self.part(numbers, ())

    def part(self, numbers, cells):
        found = part_of(self.cells, numbers, cells)
        self.read += [one.size for one in found]
        return found


class Arrays(Dataset):
    """Images and labels in memory; this rank keeps what `open` asks for."""

    def __init__(self, images, labels, test=None):
        super().__init__()
        self.whole, self.sample_shape, self.classes = (images, labels), images.shape[1:], None
        self.maps = labels.ndim == images.ndim - 1

    def check(self):
        pass

    def load(self, grid):
        images, labels = self.whole
        cut = (slice(None), *tile_slices(grid, self.sample_shape))
        labels = labels[(slice(None), *grid.tile_box(labels.shape[1 : len(self.sample_shape)]).slices)]
        made = [Split(Counted(images[cut].copy()), labels, scale=1.0) for _ in range(2)]
        return made[0], made[1]


def grid_of(comm, ndim):
    planes = 2 if ndim == 3 and comm.size in (4, 6) else 1
    return nd.ProcessGrid(comm, planes=planes)


def seen(comm, steps, images, maps, numbers, epoch=EPOCH):
    """Return a rank's box, its tiles of augmented images and maps, of the test split's, and the cells that it read."""
    grid = grid_of(comm, images.ndim - 2)
    data = Arrays(images, maps)
    data.open(grid, augment=steps, seed=SEED)
    data.train.epoch = epoch
    x, y = data.train.images(numbers, "float64"), data.train.targets(numbers)
    return grid.tile_box(images.shape[1:-1]), x, y, data.test.images(numbers, "float64"), data.train.tiles.read


def numbers_of(step, place, count=COUNT, epoch=EPOCH):
    """The uniform numbers that a step has of each sample."""
    stream = rng.key(SEED, "augment", place, type(step).__name__, epoch)
    return rng.uniform(stream, np.arange(count)[:, None] * 4 + np.arange(4)), rng.key(stream, "cells")


def names_of(x, maps):
    return ["depth", "height", "width"][-(x.ndim - (not maps)) :]


def flip(step, x, u, maps, *_):
    names = names_of(x, maps)
    for axis, name in enumerate(names):
        if name in step.axes and u[1 + axis] < step.rate:
            x = np.take(x, range(x.shape[axis])[::-1], axis)
    return x


def turn(step, x, u, maps, *_):
    names = names_of(x, maps)
    first, second = (names.index(name) for name in step.axes)
    for _ in range(int(4 * u[1])):
        x = np.flip(np.swapaxes(x, first, second), first)
    return x


def shift(step, x, u, maps, *_):
    spatial = x.ndim - (not maps)
    pad = [(step.max, step.max)] * spatial + [(0, 0)] * (x.ndim - spatial)
    mode = {"reflect": "reflect", "replicate": "edge", "zeros": "constant"}[step.mode]
    first = [int(one * (2 * step.max + 1)) for one in u[1 : 1 + spatial]]
    cut = tuple(slice(lo, lo + n) for lo, n in zip(first, x.shape, strict=False))
    return np.pad(x, pad, mode=mode)[cut]


def brighten(step, x, u, maps, *_):
    return x if maps else x + step.amount * (2 * u[1] - 1)


def contrast(step, x, u, maps, *_):
    return x if maps else step.level + (x - step.level) * (1 - step.amount + 2 * step.amount * u[1])


def noise(step, x, u, maps, sample, stream):
    if maps or u[0] >= step.rate:
        return x
    level = np.floor(65536 * rng.uniform(stream, sample * x.size + np.arange(x.size)))
    return x + step.sigma * ndtri((level + 0.5) / 65536).reshape(x.shape)


def basis(t):
    """The cubic B-spline of unit knots around 0."""
    t = np.abs(t)
    return np.where(t < 1, 2 / 3 - t**2 + t**3 / 2, np.where(t < 2, (2 - t) ** 3 / 6, 0))


def displacement(step, extent, sample, stream):
    """Return the displacement of all cells, (axes, *extent), as a sum over all control points."""
    d = len(extent)
    points = [int((n - 1) / step.spacing) + 4 for n in extent]
    index = sample * d * np.prod(points) + np.arange(d * np.prod(points))
    field = step.displacement * (2 * rng.uniform(stream, index).reshape(d, *points) - 1)
    letters, cells = "uvw"[:d], "xyz"[:d]
    weights = [
        basis(np.arange(n)[:, None] / step.spacing - (np.arange(p) - 1)) for n, p in zip(extent, points, strict=True)
    ]
    pairs = ",".join(a + b for a, b in zip(cells, letters, strict=True))
    return np.einsum(f"d{letters},{pairs}->d{cells}", field, *weights)


def bend(step, x, u, maps, sample, stream):
    if u[0] >= step.rate:
        return x
    extent = x.shape if maps else x.shape[:-1]
    moved = displacement(step, extent, sample, stream)
    assert np.abs(moved).max() <= step.displacement
    places = np.stack(np.meshgrid(*map(np.arange, extent), indexing="ij")) + moved
    if maps:
        at = [np.clip(np.floor(one + 0.5).astype(int), 0, n - 1) for one, n in zip(places, extent, strict=True)]
        return x[tuple(at)]
    channels = [map_coordinates(x[..., c], places, order=1, mode="nearest") for c in range(x.shape[-1])]
    return np.stack(channels, -1)


ORACLES = {
    nd.Flip: flip,
    nd.QuarterTurns: turn,
    nd.Shift: shift,
    nd.Brightness: brighten,
    nd.Contrast: contrast,
    nd.Noise: noise,
    nd.Elastic: bend,
}


def expected(steps, samples, maps, epoch=EPOCH):
    """Return what whole images, or maps, become."""
    found = []
    for sample, x in enumerate(samples):
        for place, step in enumerate(steps):
            u, stream = numbers_of(step, place, len(samples), epoch)
            x = ORACLES[type(step)](step, x, u[sample], maps, sample, stream)
        found.append(x)
    return np.stack(found)


ALL = {
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
SQUARE = [nd.QuarterTurns(), nd.Shift(6, mode="zeros"), nd.QuarterTurns(["width", "height"]), nd.Elastic(9, 4)]
CASES = [
    *((steps, SHAPES[ndim]) for ndim, steps in ALL.items()),
    *(([step], SHAPES[ndim]) for ndim, steps in ALL.items() for step in steps if ndim > 1),
    (SQUARE, (9, 9, 2)),
    ([nd.QuarterTurns(["depth", "width"]), nd.Elastic(2, 4)], (5, 4, 5, 1)),
    ([nd.Shift(30, mode="replicate"), nd.Shift(40, mode="zeros")], (7, 3, 1)),
]


@pytest.mark.parametrize(("steps", "shape"), CASES)
def test_every_grid_has_the_whole_images_of_numpy_and_scipy(steps, shape):
    images, maps = drawn(shape)
    x, y = expected(steps, images, False), expected(steps, maps, True)
    assert not np.array_equal(x, images) or all(step.rate < 1 for step in steps)
    numbers = np.array([4, 0, 6, 2])
    for ranks in RANKS:
        found = loopback.run(ranks, lambda comm: seen(comm, steps, images, maps, numbers))
        boxes, tiles, labels, tests, _ = zip(*found, strict=True)
        np.testing.assert_allclose(whole(tiles, boxes, (4, *shape)), x[numbers], rtol=0, atol=1e-12)
        np.testing.assert_array_equal(whole(labels, boxes, (4, *shape[:-1])), y[numbers])
        np.testing.assert_array_equal(whole(tests, boxes, (4, *shape)), images[numbers])
        assert all(tile.flags.c_contiguous for tile in tiles)


def test_elastic_is_what_grid_sample_makes_of_the_same_field():
    step, images = nd.Elastic(4, 7), drawn((15, 12, 2))[0]
    _, x, *_ = loopback.run(1, lambda comm: seen(comm, [step], images, images[..., 0], np.arange(COUNT)))[0]
    fields = [displacement(step, (15, 12), n, numbers_of(step, 0)[1]) for n in range(COUNT)]
    places = [np.stack([np.arange(12) + f[1], np.arange(15)[:, None] + f[0]], -1) for f in fields]
    grid = torch.from_numpy(np.stack(places) / [5.5, 7] - 1)
    y = torch.nn.functional.grid_sample(
        torch.from_numpy(images).movedim(-1, 1), grid, padding_mode="border", align_corners=True
    )
    np.testing.assert_allclose(x, y.movedim(1, -1).numpy(), rtol=0, atol=1e-12)


def test_batches_and_orders_change_nothing_and_epochs_do():
    images, maps = drawn(SHAPES[2])
    data = Arrays(images, maps)
    data.open(nd.ProcessGrid.serial(), augment=ALL[2], seed=SEED)
    data.train.epoch = EPOCH
    x = data.train.images(np.arange(COUNT), "float64")
    parts = [[6], [2, 0], [], [5, 1, 4, 3]]
    for part, (some, labels) in zip(parts, data.train.batches(parts, "float64"), strict=True):
        np.testing.assert_array_equal(some, x[part].reshape(some.shape))
        assert len(labels) == len(part)
    lazy = data.train.lazily([3, 5], "float64")
    assert lazy.shape == (2, *SHAPES[2])
    np.testing.assert_array_equal(lazy[0:2, 2:9, 4:5], x[[3, 5], 2:9, 4:5])
    np.testing.assert_array_equal(data.train.plain().images([1], "float64"), images[[1]])
    data.train.epoch = EPOCH + 1
    assert not np.isclose(x, data.train.images(np.arange(COUNT), "float64")).all(axis=(1, 2, 3)).any()
    single = data.train.images([0], "float32")
    assert single.dtype == np.float32
    np.testing.assert_allclose(single, data.train.images([0], "float64"), atol=1e-5)


@pytest.mark.parametrize(
    ("steps", "most"),
    [
        ([nd.Flip(["height", "width"]), nd.Noise()], lambda h, w: h * w),
        ([nd.QuarterTurns()], lambda h, w: h * w),
        ([nd.Shift(4)], lambda h, w: h * w),
        ([nd.Elastic(3, 8), nd.Brightness()], lambda h, w: (h + 6) * (w + 6)),
        ([nd.Elastic(2.5, 8), nd.Flip(), nd.Elastic(1)], lambda h, w: (h + 8) * (w + 8)),
    ],
)
def test_a_tile_reads_no_more_than_its_part_needs(steps, most):
    images, maps = drawn((24, 24, 1))
    for ranks in (4, 6):
        for box, *_, read in loopback.run(ranks, lambda comm: seen(comm, steps, images, maps, np.arange(COUNT))):
            assert len(read) == COUNT
            assert max(read) <= most(*box.shape) < 24 * 24


def test_more_ranks_than_rows():
    images, maps = drawn((5, 3, 2))
    x = expected(ALL[2][3:], images, False)
    found = loopback.run(9, lambda comm: seen(comm, ALL[2][3:], images, maps, np.arange(COUNT)))
    boxes, tiles, *_ = zip(*found, strict=True)
    np.testing.assert_allclose(whole(tiles, boxes, x.shape), x, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("steps", "shape", "message"),
    [
        ([nd.QuarterTurns()], (8, 6, 1), r"QuarterTurns: images of shape \(8, 6, 1\) have 8 cells along height and 6"),
        ([nd.QuarterTurns()], (8, 1), r"QuarterTurns: axes: images of shape \(8, 1\) have no height; .* width$"),
        ([nd.Flip(["depth"])], (8, 8, 1), "Flip: axes: .* have no depth; choose from height, width"),
        ([nd.Shift(6)], (8, 6, 1), "Shift: max: .* less than 6, or mode: replicate"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(steps, shape, message):
    data = Arrays(*drawn(shape))
    with pytest.raises(ConfigError, match=message):
        data.open(nd.ProcessGrid.serial(), augment=steps)
    model = nd.Convnet([nd.ConvLayer(2, 1)])
    with pytest.raises(ConfigError, match=message):
        nd.FitExperiment(Arrays(*drawn(shape)), model, batch_size=2, augment=steps).validate()


def test_bad_arguments_and_maps_of_another_size():
    with pytest.raises(ConfigError, match="do not span a plane"):
        nd.QuarterTurns(["height", "height"])
    with pytest.raises(ConfigError, match="Flip: rate"):
        nd.Flip(rate=1.5)
    with pytest.raises(ConfigError, match=r"Shift: mode: expected .*'wrap'"):
        nd.Shift(mode="wrap")
    images, maps = drawn((8, 8, 1))
    for steps, fails in (([nd.Noise(), nd.Elastic()], True), ([nd.Noise()], False)):
        data = Arrays(images, maps[:, :6, :6])
        if fails:
            with pytest.raises(DataError, match=r"augment: label maps .* cannot be moved"):
                data.open(nd.ProcessGrid.serial(), augment=steps)
        else:
            data.open(nd.ProcessGrid.serial(), augment=steps)
            np.testing.assert_array_equal(data.train.targets([1, 2]), maps[[1, 2], :6, :6])


@pytest.mark.parametrize("ahead", [True, False])
def test_hdf5_reads_boxes_of_its_tiles(tmp_path, ahead):
    made = small_hdf5(tmp_path / "x.h5", (13, 10, 2), maps=(13, 10))
    steps = ALL[2]
    x, y = (expected(steps, made["train", name].astype(kind), name == "labels") for name, kind in
            (("images", "f8"), ("labels", "i4")))  # fmt: skip

    def rank(comm):
        data, grid = nd.HDF5Dataset(tmp_path / "x.h5", scale=1.0, ahead=ahead), grid_of(comm, 2)
        data.open(grid, augment=steps, seed=SEED)
        data.train.epoch = EPOCH
        batches = list(data.train.batches([[3, 9], [0]], "float64"))
        tests = data.test.images([1], "float64"), data.test.targets([1])
        data.close()
        return grid.tile_box((13, 10)).slices, batches, tests

    for cut, batches, tests in loopback.run(4, rank):
        for numbers, (images, labels) in zip(([3, 9], [0]), batches, strict=True):
            np.testing.assert_allclose(images, x[(numbers, *cut)], rtol=0, atol=1e-11)
            np.testing.assert_array_equal(labels, y[(numbers, *cut)])
        for found, kind in zip(tests, ("images", "labels"), strict=True):
            np.testing.assert_array_equal(found, made["test", kind][([1], *cut)])


def test_crops_of_files_are_augmented_too(tmp_path):
    draw = np.random.default_rng(0)
    for kind, channels in (("images", 2), ("masks", 1)):
        (tmp_path / kind).mkdir()
        for n in range(4):
            np.save(tmp_path / kind / f"{n}.npy", draw.integers(0, 5, (17 + n, 20 - n, channels), dtype="u1"))
    steps, numbers = [nd.QuarterTurns(), *ALL[2]], np.arange(3)

    def seen_in_files(comm, augment):
        grid = grid_of(comm, 2)
        patterns = [f"{tmp_path}/{kind}/*.npy" for kind in ("images", "masks")]
        data = nd.ImageFiles(*patterns, crop=[13, 13], validation=1, normalise="none")
        data.open(grid, augment=augment, seed=SEED)
        data.train.epoch = EPOCH
        batch = next(data.train.batches([numbers], "float64"))
        judged = data.validation.images([0], "float64"), data.validation.targets([0])
        data.close()
        return grid.tile_box((13, 13)), *batch, *judged

    _, images, maps, *tests = loopback.run(1, lambda comm: seen_in_files(comm, []))[0]
    x, y = expected(steps, images, False), expected(steps, maps, True)
    for ranks in RANKS:
        boxes, *found = zip(*loopback.run(ranks, lambda comm: seen_in_files(comm, steps)), strict=True)
        for tiles, made in zip(found, (x, y, *tests), strict=True):
            np.testing.assert_allclose(whole(tiles, boxes, made.shape), made, rtol=0, atol=1e-12)
