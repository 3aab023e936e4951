import itertools

import numpy as np
import pytest
from small_datasets import GRIDS, assemble_image, make_grids

import neondist as nd
from neondist.comm import loopback
from neondist.data import Synthetic
from neondist.errors import ConfigError

SERIAL_GRID = make_grids(1, 1, 1)[0]


def open_synthetic(grid=SERIAL_GRID, **arguments):
    data = Synthetic(**arguments)
    data.open(grid)
    return data


@pytest.mark.parametrize("grid_shape", GRIDS)
@pytest.mark.parametrize("shape", [(13, 11, 3), (7, 40, 1), (700, 600, 2)])
@pytest.mark.long
def test_tiles_match_one_process_bitwise(grid_shape, shape):
    arguments = {"shape": shape, "classes": 3, "train": 6, "test": 3, "seed": 5}
    ranks = make_grids(*grid_shape)
    extent = shape[:-1]
    expected = open_synthetic(**arguments)
    for name, numbers in (("train", [4, 1]), ("test", [2])):
        tiles = [load_split(grid, name, arguments).images(numbers) for grid in ranks]
        images = assemble_image(tiles, [grid.tile_box(extent) for grid in ranks], (len(numbers), *shape))
        np.testing.assert_array_equal(images, getattr(expected, name).images(numbers))


def load_split(grid, name, arguments):
    return dict(zip(("train", "test"), Synthetic(**arguments).open_splits(grid), strict=True))[name]


@pytest.mark.parametrize("shape", [(50, 2), (6, 9, 10, 1)])
def test_other_numbers_of_axes(shape):
    data = open_synthetic(shape=shape, classes=5, train=10, test=5)
    assert data.sample_shape == shape
    x = data.train.images(range(10), "float64")
    assert x.shape == (10, *shape)
    assert np.isfinite(x).all()


def test_tiles_of_one_axis():
    class FixedTile:
        def tile_box(self, extent):
            from neondist.geometry import Box

            return Box((20,), (35,))

    split = Synthetic((50, 2), noise=0.3).open_splits(FixedTile())[0]
    np.testing.assert_array_equal(
        split.images([7]), open_synthetic(shape=(50, 2), noise=0.3).train.images([7])[:, 20:35]
    )


def test_labels_per_cell():
    arguments = {"shape": (5, 7, 1), "classes": 3, "train": 5, "test": 3, "per_cell": True}
    labels = load_split(make_grids(1, 2, 2)[1], "train", arguments).targets([4, 2])
    np.testing.assert_array_equal(labels, np.broadcast_to([[[1]], [[2]]], (2, 3, 3)))
    assert Synthetic(**arguments).target_shape == (5, 7)


def test_training_on_labels_per_cell_of_signals():
    def run(comm):
        data = Synthetic((9, 1), classes=2, train=4, test=2, per_cell=True)
        model = nd.ConvnetDist([nd.ConvLayerDist(2, 3, padding=1)], dtype="float64")
        return nd.FitExperiment(data, model, batch_size=2).run(nd.ProcessGrid(comm), hooks=[]).history[0]["test_loss"]

    (expected,) = loopback.run(1, run)
    assert loopback.run(2, run) == pytest.approx([expected] * 2, rel=1e-10)


def test_samples_do_not_depend_on_the_batch():
    train = open_synthetic(shape=(9, 8, 3)).train
    batch = train.images([7, 3, 250])
    for position, number in enumerate([7, 3, 250]):
        np.testing.assert_array_equal(train.images([number])[0], batch[position])
    np.testing.assert_array_equal(train.images([3], "float64"), batch[1:2])
    assert train.images([]).shape == (0, 9, 8, 3)
    assert train.images([], "float64").dtype == np.float64


def test_samples_splits_and_seeds_differ():
    datasets = [open_synthetic(shape=(8, 8, 1), noise=n, seed=s) for n, s in itertools.product((0, 0.5), (0, 1))]
    images = [split.images([i]) for data in datasets for split in (data.train, data.test) for i in (0, 4)]
    for a, b in itertools.combinations(images, 2):
        assert np.abs(a - b).max() > 1e-3


def test_samples_are_reproducible():
    x = open_synthetic(shape=(4, 4, 1), classes=2, train=4, test=2, seed=3).train.images([0, 3], "float64")
    np.testing.assert_array_equal(
        open_synthetic(shape=(4, 4, 1), classes=2, train=4, test=2, seed=3).train.images([0, 3]), x
    )
    # pinned values: samples must not change between versions
    np.testing.assert_allclose(x[:, 0, :2, 0], REFERENCE, atol=2e-6)


REFERENCE = [[-0.01809, -1.047649], [-0.361339, -0.102735]]


def test_balanced_classes_and_centred_noise():
    data = open_synthetic(shape=(64, 64, 2), classes=4, train=80, test=8)
    assert np.bincount(data.train.labels).tolist() == [20] * 4
    noiseless = open_synthetic(shape=(64, 64, 2), classes=4, train=80, test=8, noise=0)
    noise = data.train.images(range(8), "float64") - noiseless.train.images(range(8), "float64")
    assert abs(noise.mean()) < 0.01
    assert np.abs(noise).max() <= 1 + 1e-6
    assert abs(noise.std() - 1 / np.sqrt(3)) < 0.01
    # noise is uncorrelated between samples, pixels and channels
    for axis in range(4):
        a, b = np.delete(noise, 0, axis), np.delete(noise, -1, axis)
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.02


@pytest.mark.parametrize(("shape", "classes"), [((16, 16, 1), 4), ((40, 30, 3), 10), ((64, 1), 4), ((8, 8, 8, 1), 4)])
def test_linear_model_separates_the_classes(shape, classes):
    data = open_synthetic(shape=shape, classes=classes, train=400, test=200)
    x, t = data.train.images(range(400), "float64").reshape(400, -1), data.train.targets(range(400))
    means = np.stack([x[t == c].mean(0) for c in range(classes)])
    scores = data.test.images(range(200), "float64").reshape(200, -1) @ means.T - (means**2).sum(1) / 2
    error = (scores.argmax(1) != data.test.targets(range(200))).mean()
    assert error < 0.1, f"error {error}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shape": 5}, "shape: expected a list .*, got 5"),
        ({"shape": [8]}, "shape: .* is not a list of extents"),
        ({"shape": "88"}, "shape: expected a list .*, got the text '88'"),
        ({"shape": (8, 0, 1)}, r"shape\.1: expected an integer from 1 to \d+, got 0"),
        ({"shape": (8, 2.5, 1)}, r"shape\.1: expected an integer .*, got 2\.5"),
        ({"classes": 1}, r"classes: expected an integer from 2 to \d+, got 1"),
        ({"train": 0}, r"train: expected an integer from 1 to \d+, got 0"),
        ({"test": "many"}, "test: expected an integer .*, got the text 'many'"),
        ({"seed": -1}, "seed: expected an integer of at least 0, got -1"),
        ({"seed": True}, "seed: expected an integer .*, got True"),
        ({"noise": -1}, "noise: expected a number of at least 0, got -1"),
        ({"noise": float("nan")}, "noise: expected a number of at least 0, got nan"),
        ({"noise": "loud"}, "noise: expected a number .*, got the text 'loud'"),
    ],
)
def test_invalid_arguments(arguments, message):
    with pytest.raises(ConfigError, match=message):
        Synthetic(**arguments)


def test_shape_as_list():
    assert Synthetic([8, 9, 1]).sample_shape == (8, 9, 1)
