"""worst.npz: the samples whose loss alone is largest, the same on any grid, and their pictures in the report."""

import io

import numpy as np
import pytest

import neondist as nd
from neondist.cli import main
from neondist.comm import loopback
from neondist.train.page import png

IGNORED = 7


class Cells(nd.Synthetic):
    """The label of a cell says whether it is above 0; some do not count."""

    def load(self, grid):
        splits = super().load(grid)
        images = [split.images(range(len(split)), "float64") for split in splits]
        return tuple(nd.Split(x, np.where(x > 1, IGNORED, x > 0)[..., 0].astype("u1"), scale=1.0) for x in images)


def experiment(dense, shape, **more):
    data = (Cells if dense else nd.Synthetic)(shape, classes=3, train=4, test=9)
    layers = [nd.ConvLayerDist(3, 3, padding=1), *([] if dense else [nd.FCLayerDist(3)])]
    cost = nd.CrossEntropy(ignore_index=IGNORED if dense else None, class_weights=[1, 2, 3])
    model = nd.ConvnetDist(layers, cost=cost, dtype="float64", backend="numpy", optimizer=nd.SGD(1e-3), **more)
    return nd.FitExperiment(data, model, batch_size=4)


@pytest.mark.parametrize(
    ("dense", "shape", "more"),
    [
        (False, (100, 7, 1), {}),
        (True, (100, 7, 1), {}),
        (True, (4, 100, 7, 1), {}),
        (True, (100, 7, 1), {"memory": "1TiB", "strips": 30}),
    ],
    ids=["classes", "cells", "volumes", "streamed"],
)
@pytest.mark.long
def test_they_are_the_same_on_any_grid(tmp_path, dense, shape, more):
    found, cut = {}, "planes" if len(shape) > 3 else "rows"
    small = (slice(None), *(slice(2, 3) for _ in shape[:-3]), slice(None, None, 2), slice(None, None, 2))
    for replicas, tiles in ((1, 1), (1, 3), (2, 2)):

        def job(comm, grid=(replicas, tiles)):
            made = experiment(dense, shape, **more)
            grid = nd.ProcessGrid(comm, replicas=grid[0], **{"rows": 1, "cols": 1, cut: grid[1]})
            folder = tmp_path / f"{grid.replicas}{grid.size}"
            made.run(grid, output=folder, hooks=[])
            model, split = made.model, made.dataset.test
            own = slice(None), *model.input.own.slices
            pieces = grid.world.allgather((own, split.images(range(9), "float64"), split.targets(range(9))))
            x, labels = np.zeros((9, *shape)), np.zeros((9, *shape[:-1]), int) if dense else pieces[0][2]
            for cells, *of in pieces:
                x[cells] = of[0]
                labels[cells if dense else ...] = of[1]
            return folder, x, labels, model.state(), model.streams

        folder, x, labels, state, made_streams = loopback.run(replicas * tiles, job)[0]
        with np.load(folder / "worst.npz") as file:
            found[folder] = dict(file)
    assert made_streams == bool(more)
    alone = experiment(dense, shape).model
    alone.build(shape, 1, nd.ProcessGrid.serial())
    alone.load_state(state)
    losses = []
    for at in range(9):
        y = alone.fprop(x[at : at + 1], training=False)
        weight = alone.cost.weight(y.shape, labels[at : at + 1])
        losses.append(float(alone.cost.value(y, labels[at : at + 1])) / weight)
    worst = np.argsort(losses)[::-1][:4]
    for one in found.values():
        assert one["sample"].tolist() == worst.tolist()
        np.testing.assert_allclose(one["loss"], np.array(losses)[worst], rtol=1e-10)
        assert one["image"].shape == (4, 50, 4, 1)
        expected = x[worst][small].reshape(4, 50, 4, 1)
        low, high = (of(expected, axis=(1, 2, 3), keepdims=True) for of in (np.min, np.max))
        assert np.abs(one["image"] - 255 * (expected - low) / (high - low)).max() <= 1
        np.testing.assert_array_equal(one["label"], labels[worst][small].reshape(4, 50, 4) if dense else labels[worst])
        said = alone.fprop(x[worst], training=False).argmax(-1) if dense else None
        if dense:
            np.testing.assert_array_equal(one["said"], said[small].reshape(4, 50, 4))
    assert main(["report", str(folder)]) == 0
    page = (folder / "report.html").read_text()
    shown = page[page.index("largest losses") : page.index("Time and bytes")]
    assert shown.count("<img") == (12 if dense else 4)
    assert f"<figcaption>sample {worst[0]}" in shown
    (folder / "worst.npz").write_bytes(b"PK")
    assert main(["report", str(folder)]) == 2


@pytest.mark.parametrize("shape", [(3, 5), (4, 3, 1), (2, 7, 3)])
def test_png(shape):
    image = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(1).integers(0, 256, shape, dtype="u1")
    with image.open(io.BytesIO(png(pixels))) as found:
        np.testing.assert_array_equal(np.asarray(found), pixels.reshape(np.asarray(found).shape))
