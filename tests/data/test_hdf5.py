"""HDF5 files: every rank reads its tile, ahead of the batch that trains; what is wrong with a file is told."""

import threading

import h5py
import numpy as np
import pytest
from dataset_toys import GRIDS, grids, whole
from hdf5_toys import small_hdf5

import neondist as nd
from neondist.comm import loopback
from neondist.data.datasets import hdf5_tiles
from neondist.data.datasets.hdf5_tiles import runs
from neondist.errors import ConfigError, DataError

SERIAL = nd.ProcessGrid.serial()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "x.h5"


@pytest.mark.parametrize("shape", GRIDS)
@pytest.mark.parametrize("chunks", [True, False])
@pytest.mark.long
def test_tiles_give_the_whole(path, shape, chunks):
    made = small_hdf5(path, chunks=chunks)
    order = np.random.default_rng(1).permutation(20)
    tiles, boxes = [], []
    for grid in grids(*shape):
        data = nd.HDF5Dataset(path, mean=[0.1, 0.2], std=0.5)
        train, _, test = data.load(grid)
        assert (data.sample_shape, data.classes) == ((13, 10, 2), 3)
        tiles.append(train.images(order, "float64"))
        boxes.append(grid.tile_box((13, 10)))
        np.testing.assert_array_equal(test.targets([5, 0]), made["test", "labels"][[5, 0]])
    expected = (made["train", "images"][order] / 255 - [0.1, 0.2]) / 0.5
    np.testing.assert_allclose(whole(tiles, boxes, expected.shape), expected, atol=1e-12)


def test_volumes_and_maps(path):
    made = small_hdf5(path, (5, 6, 7, 1), maps=(5, 6, 7), dtype="f4")
    for grid in loopback.run(8, lambda t: nd.ProcessGrid(t, replicas=1, rows=2, cols=2, planes=2)):
        data = nd.HDF5Dataset(path)
        train, *_ = data.load(grid)
        assert data.classes is None
        cut = grid.tile_box((5, 6, 7)).slices
        batches = list(train.batches([[3, 4, 5], [], [19]], "float64"))
        for numbers, (x, y) in zip(([3, 4, 5], [], [19]), batches, strict=True):
            np.testing.assert_array_equal(x, made["train", "images"][(numbers, *cut)] if numbers else x[:0])
            np.testing.assert_array_equal(y, made["train", "labels"][(numbers, *cut)] if numbers else y[:0])


def model(dist, seed=3):
    conv, fc, kind = (
        (nd.ConvLayerDist, nd.FCLayerDist, nd.ConvnetDist) if dist else (nd.ConvLayer, nd.FCLayer, nd.Convnet)
    )
    return kind([conv(3, 3, padding=1, activation=nd.Tanh()), fc(3)], dtype="float64", seed=seed, backend="numpy")


def losses(path, comm=None, ahead=True, replicas=1, hooks=()):
    grid = SERIAL if comm is None else nd.ProcessGrid(comm, replicas=replicas)
    experiment = nd.FitExperiment(nd.HDF5Dataset(path, ahead=ahead), model(comm is not None), batch_size=6, epochs=2)
    history = experiment.run(grid, hooks=hooks).history
    return [record[key] for record in history for key in ("train_loss", "test_loss")]


def test_training_is_the_same_read_ahead_or_not_and_on_any_grid(path):
    small_hdf5(path)
    expected = losses(path, ahead=False)
    assert losses(path) == expected
    for ranks, replicas in ((4, 1), (3, 1), (4, 2)):
        for found in loopback.run(ranks, lambda comm, r=replicas: losses(path, comm, replicas=r)):
            assert found == pytest.approx(expected, rel=1e-10)


def test_maps_train_on_tiles(path):
    small_hdf5(path, (8, 9, 1), maps=(8, 9))

    def run(comm=None, replicas=1):
        grid = SERIAL if comm is None else nd.ProcessGrid(comm, replicas=replicas)
        kind, conv = (nd.Convnet, nd.ConvLayer) if comm is None else (nd.ConvnetDist, nd.ConvLayerDist)
        one = kind([conv(3, 3, padding=1)], cost=nd.SoftmaxCrossEntropy(), dtype="float64", backend="numpy")
        return nd.FitExperiment(nd.HDF5Dataset(path), one, batch_size=5).run(grid, hooks=[]).history[0]["test_loss"]

    expected = run()
    for found in [*loopback.run(4, run), *loopback.run(4, lambda comm: run(comm, 2))]:
        assert found == pytest.approx(expected, rel=1e-10)


def test_the_next_batch_is_read_while_this_one_trains(path, monkeypatch):
    small_hdf5(path)
    data, began = nd.HDF5Dataset(path), threading.Event()
    data.open(SERIAL)
    read = hdf5_tiles.HDF5Tiles.__getitem__

    def noted(tiles, numbers):
        assert threading.current_thread() is not threading.main_thread()
        if 2 in numbers:
            began.set()
        return read(tiles, numbers)

    monkeypatch.setattr(hdf5_tiles.HDF5Tiles, "__getitem__", noted)
    batches = data.train.batches([[0, 1], [2, 3], [4, 5]])
    next(batches)
    assert began.wait(60), "nobody has asked for the second batch, yet it is read"


def test_an_error_of_the_thread_ends_the_run(path):
    small_hdf5(path)

    class Harm(nd.Hook):
        def before_run(self, run):
            run.dataset.train.tiles.numbers = run.dataset.train.tiles.numbers + 15  # beyond the file's last sample

    with pytest.raises(DataError, match=r"x\.h5: damaged"):
        losses(path, hooks=[Harm()])


def test_a_file_that_has_changed(path):
    small_hdf5(path)
    data = nd.HDF5Dataset(path)
    data.open(SERIAL)
    small_hdf5(path, (5, 10, 2))
    with pytest.raises(DataError, match="train/images has changed since the run began"):
        data.train.images([0])


def test_a_run_stopped_inside_an_epoch_goes_on_at_the_next_sample(path, tmp_path):
    small_hdf5(path)
    expected = losses(path)

    class Stops(nd.Hook):
        def after_step(self, run):
            if run.step == 2:
                from neondist.train.state import Stop

                run.stop = Stop("enough")

    def experiment():
        return nd.FitExperiment(nd.HDF5Dataset(path), model(False), batch_size=6, epochs=2)

    experiment().run(SERIAL, output=tmp_path / "out", hooks=[Stops()])
    history = experiment().run(SERIAL, output=tmp_path / "out", resume=True, hooks=[]).history
    assert [record[key] for record in history for key in ("train_loss", "test_loss")] == expected


def test_a_share_is_kept_for_testing(path):
    with h5py.File(path, "w") as file:
        file["x"] = np.arange(40, dtype="u1").reshape(40, 1, 1, 1)
        file["y"] = np.arange(40) % 4
    data = nd.HDF5Dataset(path, images="x", labels="y", train="/", test_share=0.25, scale=1)
    data.open(SERIAL)
    seen = [split.images(np.arange(len(split))).astype(int).ravel().tolist() for split in (data.train, data.test)]
    assert (len(seen[0]), len(seen[1])) == (30, 10)
    assert sorted(seen[0] + seen[1]) == list(range(40))
    assert sorted(seen[1]) != list(range(30, 40))
    for split, numbers in zip((data.train, data.test), seen, strict=True):
        assert split.targets(np.arange(len(split))).tolist() == [n % 4 for n in numbers]


def test_attributes_normalise(path):
    made = small_hdf5(path, (4, 4, 2), dtype="u2")
    with h5py.File(path, "r+") as file:
        file["train/images"].attrs.update(mean=[1.0, 2.0], std=[2.0, 4.0], scale=10.0, classes=[7])
        file["train/labels"].attrs["classes"] = 5
    data = nd.HDF5Dataset(path)
    data.open(SERIAL)
    expected = (made["test", "images"] / 10 - [1, 2]) / [2, 4]
    np.testing.assert_allclose(data.test.images(np.arange(7), "float64"), expected)
    assert data.classes == 5
    data = nd.HDF5Dataset(path, mean=0, std=1, scale=1, classes=9)
    data.open(SERIAL)
    np.testing.assert_array_equal(data.test.images(np.arange(7)), made["test", "images"])
    assert data.classes == 9


def test_runs():
    assert list(runs(np.array([4, 5, 6, 2, 1, 2, 9]))) == [(0, 4, 3), (3, 2, 1), (4, 1, 2), (6, 9, 1)]


def broken(path, change):
    small_hdf5(path)
    with h5py.File(path, "r+") as file:
        change(file)


def replace(name, value):
    def change(file):
        del file[name]
        if value is not None:
            file[name] = value

    return change


def attribute(name, **values):
    return lambda file: file[name].attrs.update(values)


FAULTS = {
    "no images": (replace("train/images", None), r"has no array 'train/images'; it has test/images, test/labels, tr"),
    "no labels": (replace("test/labels", None), "has no array 'test/labels'"),
    "no group": (replace("train", None), "has no group 'train'"),
    "flat": (replace("train/images", np.zeros((20, 5))), r"shape \(20, 5\); images are"),
    "group": (lambda file: (file.__delitem__("test/images"), file.create_group("test/images")), "is not an array of"),
    "text": (replace("train/labels", ["a"] * 20), "'train/labels' is not an array of numbers"),
    "labels": (replace("train/labels", np.zeros(19, int)), "has 20 samples, train/labels has 19"),
    "negative": (replace("train/labels", np.full(20, -1)), "of sample 0 is -1, not below"),
    "empty": (replace("test/images", np.zeros((0, 13, 10, 2))), r"is empty: its shape is \(0,"),
    "truth": (replace("train/images", np.zeros((20, 13, 10, 2), bool)), "store them as uint8"),
    "shapes": (replace("test/images", np.zeros((7, 13, 11, 2))), r"test/images \(7, 13, 11, 2\) and its"),
    "kinds": (replace("test/labels", np.zeros((7, 13, 10), int)), "differ in shape from"),
    "scale": (attribute("train/images", scale=0.0), r"scale: 0\.0 is invalid; expected positive numbers"),
    "mean": (attribute("train/images", mean=[1.0, 2.0, 3.0]), "3.* numbers do not fit the 2 channels"),
    "classes": (attribute("train/labels", classes=2), "is 2, not below 2"),
    "one sample": (
        lambda file: [replace(n, file[n][:1])(file) for n in ("train/images", "train/labels")] + [file.pop("test")],
        "one sample cannot be split",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_told(path, fault):
    broken(path, FAULTS[fault][0])
    with pytest.raises((DataError, ConfigError), match=FAULTS[fault][1]):
        nd.HDF5Dataset(path).check()


def test_files_that_are_none(path, tmp_path):
    with pytest.raises(DataError, match="no such file"):
        nd.HDF5Dataset(path).check()
    with pytest.raises(DataError, match="is a folder"):
        nd.HDF5Dataset(tmp_path).check()
    path.write_text("hello")
    with pytest.raises(DataError, match="not an HDF5 file; create one with: neondist data convert"):
        nd.HDF5Dataset(path).check()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"path": ""}, "path: '' is not a path"),
        ({"images": ""}, "images: '' is not the name"),
        ({"test_share": 1.0}, "test_share: expected a number above 0 and below 1 or null, got 1.0"),
        ({"classes": 0}, "classes: expected an integer of at least 1 or null, got 0"),
        ({"std": [1.0, 0.0]}, r"std: \[1.0, 0.0\] is invalid; expected positive"),
        ({"mean": float("nan")}, "mean: nan is invalid"),
    ],
)
def test_arguments_that_cannot_work(arguments, says):
    with pytest.raises(ConfigError, match=says):
        nd.HDF5Dataset(**{"path": "x.h5"} | arguments)
