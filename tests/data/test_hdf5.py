"""HDF5 datasets: tiles of all ranks, prefetching, normalisation, and damaged files."""

import threading
from functools import partial

import h5py
import numpy as np
import pytest
from small_datasets import GRIDS, assemble_image, make_grids
from small_hdf5 import write_hdf5

import neondist as nd
from neondist.comm import loopback
from neondist.data.datasets import hdf5_tiles
from neondist.data.datasets.hdf5_tiles import contiguous_runs
from neondist.errors import ConfigError, DataError

SERIAL = nd.ProcessGrid.serial()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "x.h5"


@pytest.mark.parametrize("shape", GRIDS)
@pytest.mark.parametrize("chunks", [True, False])
@pytest.mark.long
def test_tiles_cover_the_images(path, shape, chunks):
    arrays = write_hdf5(path, chunks=chunks)
    order = np.random.default_rng(1).permutation(20)
    tiles, boxes = [], []
    for grid in make_grids(*shape):
        data = nd.HDF5Dataset(path, mean=[0.1, 0.2], std=0.5)
        train, _, test = data.open_splits(grid)
        assert (data.sample_shape, data.classes) == ((13, 10, 2), 3)
        tiles.append(train.images(order, "float64"))
        boxes.append(grid.tile_box((13, 10)))
        np.testing.assert_array_equal(test.targets([5, 0]), arrays["test", "labels"][[5, 0]])
    expected = (arrays["train", "images"][order] / 255 - [0.1, 0.2]) / 0.5
    np.testing.assert_allclose(assemble_image(tiles, boxes, expected.shape), expected, atol=1e-12)


def test_volumes_and_maps(path):
    arrays = write_hdf5(path, (5, 6, 7, 1), maps=(5, 6, 7), dtype="f4")
    for grid in loopback.run(8, lambda t: nd.ProcessGrid(t, replicas=1, rows=2, cols=2, planes=2)):
        data = nd.HDF5Dataset(path)
        train, *_ = data.open_splits(grid)
        assert data.classes is None
        index = grid.tile_box((5, 6, 7)).slices
        batches = list(train.batches([[3, 4, 5], [], [19]], "float64"))
        for numbers, (x, y) in zip(([3, 4, 5], [], [19]), batches, strict=True):
            np.testing.assert_array_equal(x, arrays["train", "images"][(numbers, *index)] if numbers else x[:0])
            np.testing.assert_array_equal(y, arrays["train", "labels"][(numbers, *index)] if numbers else y[:0])


def build_model(distributed, seed=3):
    conv, fc, model_class = (
        (nd.ConvLayerDist, nd.FCLayerDist, nd.ConvnetDist) if distributed else (nd.ConvLayer, nd.FCLayer, nd.Convnet)
    )
    return model_class(
        [conv(3, 3, padding=1, activation=nd.Tanh()), fc(3)], dtype="float64", seed=seed, backend="numpy"
    )


def train_losses(path, comm=None, ahead=True, replicas=1, hooks=()):
    grid = SERIAL if comm is None else nd.ProcessGrid(comm, replicas=replicas)
    experiment = nd.FitExperiment(
        nd.HDF5Dataset(path, ahead=ahead), build_model(comm is not None), batch_size=6, epochs=2
    )
    history = experiment.run(grid, hooks=hooks).history
    return [record[key] for record in history for key in ("train_loss", "test_loss")]


def test_losses_are_independent_of_prefetching_and_grid(path):
    write_hdf5(path)
    expected = train_losses(path, ahead=False)
    assert train_losses(path) == expected
    for ranks, replicas in ((4, 1), (3, 1), (4, 2)):
        for losses in loopback.run(ranks, lambda comm, r=replicas: train_losses(path, comm, replicas=r)):
            assert losses == pytest.approx(expected, rel=1e-10)


def test_training_on_label_maps(path):
    write_hdf5(path, (8, 9, 1), maps=(8, 9))

    def run(comm=None, replicas=1):
        grid = SERIAL if comm is None else nd.ProcessGrid(comm, replicas=replicas)
        model_class, conv = (nd.Convnet, nd.ConvLayer) if comm is None else (nd.ConvnetDist, nd.ConvLayerDist)
        model = model_class([conv(3, 3, padding=1)], cost=nd.SoftmaxCrossEntropy(), dtype="float64", backend="numpy")
        return nd.FitExperiment(nd.HDF5Dataset(path), model, batch_size=5).run(grid, hooks=[]).history[0]["test_loss"]

    expected = run()
    for loss in [*loopback.run(4, run), *loopback.run(4, lambda comm: run(comm, 2))]:
        assert loss == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize(("maps", "extent"), [(False, 2), (False, 8), (False, 16), (True, 2), (True, 8), (True, 16)])
def test_two_axes_of_signal_labels(path, maps, extent):
    """Compare (N, K) with vectors, or with outputs along the signal; 8 is that of a layer of stride 2."""
    rng = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        for part in ("train", "test"):
            file[f"{part}/images"], file[f"{part}/labels"] = rng.normal(size=(5, 16, 1)), rng.normal(size=(5, extent))

    def run(comm):
        layers = [nd.ConvLayerDist(1, 3, stride=16 // extent, padding=1)] if maps else [nd.FCLayerDist(extent)]
        model = nd.ConvnetDist(layers, cost=nd.MSE(), dtype="float64", backend="numpy")
        experiment = nd.FitExperiment(nd.HDF5Dataset(path), model, batch_size=3)
        return experiment.run(nd.ProcessGrid(comm), hooks=[]).history[0]["test_loss"]

    (expected,) = loopback.run(1, run)
    for ranks in (2, 3, 4):
        assert loopback.run(ranks, run) == pytest.approx([expected] * ranks, rel=1e-10)


@pytest.mark.parametrize("count", [2, 4])
def test_numbers_of_signals_are_not_moved_as_maps(path, count):
    rng = np.random.default_rng(0)
    signals, numbers = rng.normal(size=(5, 4, 1)), rng.normal(size=(5, count))

    def run(comm, augment=None):
        model = nd.ConvnetDist([nd.FCLayerDist(count)], cost=nd.MSE(), dtype="float64")
        experiment = nd.FitExperiment(nd.HDF5Dataset(path, validation=None), model, batch_size=2, augment=augment)
        return experiment.run(nd.ProcessGrid(comm), hooks=[]).history[0]["train_loss"]

    losses = []
    for images, augment in ((signals[:, ::-1], None), (signals, [nd.Flip(rate=1.0)])):
        with h5py.File(path, "w") as file:
            file["train/images"], file["train/labels"] = images, numbers
        losses += [loss for ranks in (1, 2) for loss in loopback.run(ranks, partial(run, augment=augment))]
    assert losses == pytest.approx(losses[:1] * len(losses), rel=1e-10)


def test_next_batch_is_prefetched(path, monkeypatch):
    write_hdf5(path)
    data, second_batch_read = nd.HDF5Dataset(path), threading.Event()
    data.open(SERIAL)
    read = hdf5_tiles.HDF5Array.__getitem__

    def observed_read(tiles, numbers):
        assert threading.current_thread() is not threading.main_thread()
        if 2 in numbers:
            second_batch_read.set()
        return read(tiles, numbers)

    monkeypatch.setattr(hdf5_tiles.HDF5Array, "__getitem__", observed_read)
    batches = data.train.batches([[0, 1], [2, 3], [4, 5]])
    next(batches)
    assert second_batch_read.wait(60), "the second batch is not prefetched"


def test_reader_errors_end_the_run(path):
    write_hdf5(path)

    class InvalidNumbers(nd.Hook):
        def before_run(self, run):
            run.dataset.train.tiles.sample_numbers = (
                run.dataset.train.tiles.sample_numbers + 15
            )  # beyond the file's last sample

    with pytest.raises(DataError, match=r"x\.h5: damaged"):
        train_losses(path, hooks=[InvalidNumbers()])


def test_changed_file_is_detected(path):
    write_hdf5(path)
    data = nd.HDF5Dataset(path)
    data.open(SERIAL)
    write_hdf5(path, (5, 10, 2))
    with pytest.raises(DataError, match="train/images has changed since the run began"):
        data.train.images([0])


def test_run_resumes_inside_an_epoch(path, tmp_path):
    write_hdf5(path)
    expected = train_losses(path)

    class StopAtStep2(nd.Hook):
        def after_step(self, run):
            if run.step == 2:
                from neondist.train.state import Stop

                run.stop = Stop("enough")

    def experiment():
        return nd.FitExperiment(nd.HDF5Dataset(path), build_model(False), batch_size=6, epochs=2)

    experiment().run(SERIAL, output=tmp_path / "out", hooks=[StopAtStep2()])
    history = experiment().run(SERIAL, output=tmp_path / "out", resume=True, hooks=[]).history
    assert [record[key] for record in history for key in ("train_loss", "test_loss")] == expected


def test_test_share(path):
    with h5py.File(path, "w") as file:
        file["x"] = np.arange(40, dtype="u1").reshape(40, 1, 1, 1)
        file["y"] = np.arange(40) % 4
    data = nd.HDF5Dataset(path, images="x", labels="y", train="/", test_share=0.25, scale=1)
    data.open(SERIAL)
    values = [split.images(np.arange(len(split))).astype(int).ravel().tolist() for split in (data.train, data.test)]
    assert (len(values[0]), len(values[1])) == (30, 10)
    assert sorted(values[0] + values[1]) == list(range(40))
    assert sorted(values[1]) != list(range(30, 40))
    for split, numbers in zip((data.train, data.test), values, strict=True):
        assert split.targets(np.arange(len(split))).tolist() == [n % 4 for n in numbers]


def test_normalisation_attributes(path):
    arrays = write_hdf5(path, (4, 4, 2), dtype="u2")
    with h5py.File(path, "r+") as file:
        file["train/images"].attrs.update(mean=[1.0, 2.0], std=[2.0, 4.0], scale=10.0, classes=[7])
        file["train/labels"].attrs["classes"] = 5
    data = nd.HDF5Dataset(path)
    data.open(SERIAL)
    expected = (arrays["test", "images"] / 10 - [1, 2]) / [2, 4]
    np.testing.assert_allclose(data.test.images(np.arange(7), "float64"), expected)
    assert data.classes == 5
    data = nd.HDF5Dataset(path, mean=0, std=1, scale=1, classes=9)
    data.open(SERIAL)
    np.testing.assert_array_equal(data.test.images(np.arange(7)), arrays["test", "images"])
    assert data.classes == 9


def test_contiguous_runs():
    assert list(contiguous_runs(np.array([4, 5, 6, 2, 1, 2, 9]))) == [(0, 4, 3), (3, 2, 1), (4, 1, 2), (6, 9, 1)]


def write_damaged(path, change):
    write_hdf5(path)
    with h5py.File(path, "r+") as file:
        change(file)


def replace(name, value):
    def change(file):
        del file[name]
        if value is not None:
            file[name] = value

    return change


def set_attributes(name, **values):
    return lambda file: file[name].attrs.update(values)


FAULTS = {
    "no images": (replace("train/images", None), r"has no array 'train/images'; choose one of test/images, test/la"),
    "no labels": (replace("test/labels", None), "has no array 'test/labels'"),
    "no group": (replace("train", None), "has no group 'train'"),
    "flat": (replace("train/images", np.zeros((20, 5))), r"shape \(20, 5\); images are"),
    "group": (lambda file: (file.__delitem__("test/images"), file.create_group("test/images")), "is not an array of"),
    "text": (replace("train/labels", ["a"] * 20), "'train/labels' is not an array of numbers"),
    "labels": (replace("train/labels", np.zeros(19, int)), "has 20 samples, train/labels has 19"),
    "negative": (replace("train/labels", np.full(20, -1)), "of sample 0 is -1; expected a class from 0, below"),
    "empty": (replace("test/images", np.zeros((0, 13, 10, 2))), r"is empty: its shape is \(0,"),
    "truth": (replace("train/images", np.zeros((20, 13, 10, 2), bool)), "store them as uint8"),
    "shapes": (replace("test/images", np.zeros((7, 13, 11, 2))), r"test/images \(7, 13, 11, 2\) and its"),
    "kinds": (replace("test/labels", np.zeros((7, 13, 10), int)), "differ in shape from"),
    "dtypes": (replace("test/images", np.zeros((7, 13, 10, 2))), r"test/images is float64, but train/images is uint8"),
    "NaN": (replace("test/labels", np.array([0, 1, 0, np.nan, 1, 0, 1])), "test/labels of sample 3 is not finite"),
    "infinite": (
        replace("train/labels", np.where(np.arange(20) == 4, np.inf, 1.0)),
        "train/labels of sample 4 is not finite",
    ),
    "scale": (set_attributes("train/images", scale=0.0), r"scale: 0\.0 is invalid; expected positive numbers"),
    "mean": (set_attributes("train/images", mean=[1.0, 2.0, 3.0]), r"shape \(3,\) do not fit the 2 channels"),
    "classes": (set_attributes("train/labels", classes=2), "is 2; expected a class from 0, below 2"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_damaged_files_are_reported(path, fault):
    write_damaged(path, FAULTS[fault][0])
    with pytest.raises((DataError, ConfigError), match=FAULTS[fault][1]):
        nd.HDF5Dataset(path).check()


def test_a_single_sample_is_only_trained_on(path):
    def keep_one(file):
        for name in ("train/images", "train/labels"):
            replace(name, file[name][:1])(file)
        del file["test"]

    write_damaged(path, keep_one)
    dataset = nd.HDF5Dataset(path)
    dataset.open(nd.ProcessGrid.serial())
    assert {name: len(split) for name, split in dataset.splits.items()} == {"train": 1}
    dataset.close()
    with pytest.raises(DataError, match="one sample cannot be split into training and test; leave out test_share"):
        nd.HDF5Dataset(path, test_share=0.5).check()


def test_invalid_files(path, tmp_path):
    with pytest.raises(DataError, match="no such file"):
        nd.HDF5Dataset(path).check()
    with pytest.raises(DataError, match="is a folder"):
        nd.HDF5Dataset(tmp_path).check()
    path.write_text("hello")
    with pytest.raises(DataError, match="not an HDF5 file; create one with: neondist data convert"):
        nd.HDF5Dataset(path).check()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"path": ""}, "path: '' is not a path"),
        ({"images": ""}, "images: '' is not the name"),
        ({"test_share": 1.0}, "test_share: expected a number above 0 and below 1 or null, got 1.0"),
        ({"classes": 0}, "classes: expected an integer of at least 1 or null, got 0"),
        ({"std": [1.0, 0.0]}, r"std\.1: expected a number above 0, got 0\.0"),
        ({"mean": float("nan")}, "mean: expected a number that is finite, .*got nan"),
    ],
)
def test_invalid_arguments(arguments, message):
    with pytest.raises(ConfigError, match=message):
        nd.HDF5Dataset(**{"path": "x.h5"} | arguments)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("ahead", [True, False])
def test_nonfinite_label_maps_are_located(path, value, ahead):
    write_hdf5(path, maps=(13, 10))
    with h5py.File(path, "a") as file:
        maps = file["train/labels"][...].astype("f4")
        maps[4, 12, 0] = value
        del file["train/labels"]
        file["train/labels"] = maps
    for ranks, failing in ((1, 1), (2, 1)):
        errors = []
        for grid in make_grids(1, ranks, 1):
            train, *_ = nd.HDF5Dataset(path, ahead=ahead).open_splits(grid)
            next(train.batches([[3, 5]]))
            try:
                list(train.batches([[3, 5], [6, 4]]))
            except DataError as error:
                errors.append(str(error))
        assert errors == [f"{path}: train/labels of sample 4 is not finite; correct it"] * failing


@pytest.mark.parametrize("maps", [False, True])
def test_boolean_labels_are_classes(path, maps):
    rng = np.random.default_rng(0)
    images = rng.normal(size=(6, 5, 4, 1))
    labels = images[..., 0] > 0 if maps else np.arange(6) % 2 == 0
    layers = [nd.ConvLayerDist(2, 3, padding=1)] if maps else [nd.FCLayerDist(2)]
    losses = []
    for dtype in ("?", "u1"):
        with h5py.File(path, "w") as file:
            file["train/images"], file["train/labels"] = images, labels.astype(dtype)
        experiment = nd.FitExperiment(nd.HDF5Dataset(path), nd.ConvnetDist(layers, dtype="float64"), batch_size=2)
        losses.append(experiment.run(nd.ProcessGrid.serial(), hooks=[]).history[0]["train_loss"])
    assert losses[0] == losses[1]
