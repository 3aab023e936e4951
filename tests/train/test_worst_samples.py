"""worst.npz: the samples with the largest losses, equal on all grids, and their pictures in the report."""

import io

import numpy as np
import pytest

import neondist as nd
from neondist.cli import main
from neondist.comm import loopback
from neondist.train.html_elements import encode_png

IGNORE_INDEX = 7


class CellLabels(nd.Synthetic):
    """Synthetic images with a label for each cell: whether it is positive, or ignored."""

    def open_splits(self, grid):
        splits = super().open_splits(grid)
        images = [split.images(range(len(split)), "float64") for split in splits]
        return tuple(nd.Split(x, np.where(x > 1, IGNORE_INDEX, x > 0)[..., 0].astype("u1"), scale=1.0) for x in images)


def make_experiment(dense, shape, **fields):
    data = (CellLabels if dense else nd.Synthetic)(shape, classes=3, train=4, test=9)
    layers = [nd.ConvLayerDist(3, 3, padding=1), *([] if dense else [nd.FCLayerDist(3)])]
    cost = nd.CrossEntropy(ignore_index=IGNORE_INDEX if dense else None, class_weights=[1, 2, 3])
    model = nd.ConvnetDist(layers, cost=cost, dtype="float64", backend="numpy", optimizer=nd.SGD(1e-3), **fields)
    return nd.FitExperiment(data, model, batch_size=4)


@pytest.mark.parametrize(
    ("dense", "shape", "fields"),
    [
        (False, (100, 7, 1), {}),
        (True, (100, 7, 1), {}),
        (True, (4, 100, 7, 1), {}),
        (True, (100, 7, 1), {"memory": "1TiB", "strips": 30}),
    ],
    ids=["classes", "cells", "volumes", "streamed"],
)
@pytest.mark.long
def test_worst_samples_are_equal_on_all_grids(tmp_path, dense, shape, fields):
    archives, axis = {}, "planes" if len(shape) > 3 else "rows"
    reduced = (slice(None), *(slice(2, 3) for _ in shape[:-3]), slice(None, None, 2), slice(None, None, 2))
    for replicas, tiles in ((1, 1), (1, 3), (2, 2)):

        def job(comm, grid=(replicas, tiles)):
            experiment = make_experiment(dense, shape, **fields)
            grid = nd.ProcessGrid(comm, replicas=grid[0], **{"rows": 1, "cols": 1, axis: grid[1]})
            folder = tmp_path / f"{grid.replicas}{grid.size}"
            experiment.run(grid, output=folder, hooks=[])
            model, split = experiment.model, experiment.dataset.test
            box = slice(None), *model.input.own.slices
            tiles_data = grid.world.allgather((box, split.images(range(9), "float64"), split.targets(range(9))))
            x, labels = np.zeros((9, *shape)), np.zeros((9, *shape[:-1]), int) if dense else tiles_data[0][2]
            for cells, *parts in tiles_data:
                x[cells] = parts[0]
                labels[cells if dense else ...] = parts[1]
            return folder, x, labels, model.state(), model.is_streamed

        folder, x, labels, state, streams = loopback.run(replicas * tiles, job)[0]
        with np.load(folder / "worst.npz") as file:
            archives[folder] = dict(file)
    assert streams == bool(fields)
    serial_model = make_experiment(dense, shape).model
    serial_model.build(shape, 1, nd.ProcessGrid.serial())
    serial_model.load_state(state)
    losses = []
    for i in range(9):
        y = serial_model.fprop(x[i : i + 1], training=False)
        weight = serial_model.cost.local_denominator(y.shape, labels[i : i + 1])
        losses.append(float(serial_model.cost.local_sum(y, labels[i : i + 1])) / weight)
    order = np.argsort(losses)[::-1][:4]
    for arrays in archives.values():
        assert arrays["sample"].tolist() == order.tolist()
        np.testing.assert_allclose(arrays["loss"], np.array(losses)[order], rtol=1e-10)
        assert arrays["image"].shape == (4, 50, 4, 1)
        expected = x[order][reduced].reshape(4, 50, 4, 1)
        low, high = (reduce(expected, axis=(1, 2, 3), keepdims=True) for reduce in (np.min, np.max))
        assert np.abs(arrays["image"] - 255 * (expected - low) / (high - low)).max() <= 1
        np.testing.assert_array_equal(
            arrays["label"], labels[order][reduced].reshape(4, 50, 4) if dense else labels[order]
        )
        predicted = serial_model.fprop(x[order], training=False).argmax(-1) if dense else None
        if dense:
            np.testing.assert_array_equal(arrays["prediction"], predicted[reduced].reshape(4, 50, 4))
    assert main(["report", str(folder)]) == 0
    page = (folder / "report.html").read_text()
    shown = page[page.index("largest losses") : page.index("Time and bytes")]
    assert shown.count("<img") == (12 if dense else 4)
    assert f"<figcaption>sample {order[0]}" in shown
    (folder / "worst.npz").write_bytes(b"PK")
    assert main(["report", str(folder)]) == 2


class Numbers(nd.Synthetic):
    """Synthetic images with numbers per sample, those of the first of which look like probabilities."""

    target_shape = (2,)

    def open_splits(self, grid):
        targets = np.array([[0.0, 1.0], [3.0, -2.0], [2.0, 5.0]])
        splits = super().open_splits(grid)
        return tuple(nd.Split(split.images(range(len(split))), targets[: len(split)], scale=1.0) for split in splits)


@pytest.mark.parametrize("test", [1, 2, 3])
def test_numbers_that_look_like_probabilities_on_one_replica(tmp_path, test):
    def job(comm):
        data = Numbers((7, 6, 1), classes=2, train=3, test=test)
        model = nd.ConvnetDist([nd.FCLayerDist(2)], cost=nd.MSE(), backend="numpy")
        grid = nd.ProcessGrid(comm, replicas=comm.size)
        nd.FitExperiment(data, model, batch_size=3).run(grid, output=tmp_path / f"{comm.size}", hooks=[])

    for replicas in (1, 2):
        loopback.run(replicas, job)
    with np.load(tmp_path / "1" / "worst.npz") as expected, np.load(tmp_path / "2" / "worst.npz") as actual:
        for name in expected:
            np.testing.assert_allclose(actual[name], expected[name], rtol=1e-4)


@pytest.mark.parametrize("shape", [(3, 5), (4, 3, 1), (2, 7, 3)])
def test_encoded_png_has_the_pixels(shape):
    image = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(1).integers(0, 256, shape, dtype="u1")
    with image.open(io.BytesIO(encode_png(pixels))) as decoded:
        np.testing.assert_array_equal(np.asarray(decoded), pixels.reshape(np.asarray(decoded).shape))
