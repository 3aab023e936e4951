"""Predictions and evaluation from a checkpoint, on any grid."""

import numpy as np
import pytest
from checkpoint_toys import experiment

import neondist as nd
from neondist.comm import ProcessGrid, loopback
from neondist.errors import ConfigError, DataError, GridError, OutputError
from neondist.io.checkpoint import pieces
from neondist.train import evaluate_checkpoint, predict


def segmentation():
    return [nd.ConvLayerDist(3, 3, padding=1, activation=nd.ReLU()), nd.BatchNormLayerDist(), nd.ConvLayerDist(4, 1)]


class Cells(nd.Synthetic):
    """Every cell is labelled; raw values are 2 x + 1 of what is trained on."""

    def load(self, grid):
        return tuple(
            nd.Split(
                2 * split.images(range(len(split)), "float64") + 1, self._labels(split, grid), mean=0.5, std=1, scale=2
            )
            for split in super().load(grid)
        )

    def _labels(self, split, grid):
        tile = grid.tile_box(self.sample_shape[:-1]).shape
        return np.broadcast_to(split.labels[:, None, None], (len(split), *tile))


def made(layers=None, data=nd.Synthetic, epochs=1):
    found = experiment(epochs) if layers is None else experiment(epochs, layers=layers)
    found.dataset = data((7, 6, 2), classes=4, train=25, test=5)
    return found


LAYOUTS = [(1, {}), (4, {}), (6, {"replicas": 3})]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(pieces, "BLOCK", 200)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two trained networks, raw images for them, and what the networks say of these, by a plain pass."""
    folder = tmp_path_factory.mktemp("trained")
    raw = np.random.default_rng(3).normal(size=(13, 7, 6, 2))
    np.save(folder / "raw.npy", raw)
    for name, layers, data in (("classes", None, nd.Synthetic), ("cells", segmentation, Cells)):
        trained = made(layers, data)
        trained.run(output=folder / name, hooks=[])
        x = raw if name == "classes" else (raw / 2 - 0.5)
        np.save(folder / f"{name}.npy", trained.model.fprop(x, training=False, batch_size=13))
    return folder


@pytest.mark.parametrize(("ranks", "grid"), LAYOUTS)
@pytest.mark.parametrize("name", ["classes", "cells"])
@pytest.mark.long
def test_predictions(folder, tmp_path, name, ranks, grid):
    layers, data = (None, nd.Synthetic) if name == "classes" else (segmentation, Cells)
    expected = np.load(folder / f"{name}.npy")

    def body(world):
        each = ProcessGrid(world, **grid)
        paths = folder / name / "checkpoint.h5", folder / "raw.npy"
        predict(made(layers, data), *paths, tmp_path / "y.npy", each)
        predict(made(layers, data), *paths, tmp_path / "y.h5", each)
        return predict(made(layers, data), *paths, tmp_path / "classes.npy", each, classes=True)

    assert set(loopback.run(ranks, body)) == {expected.shape[:-1]}
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), expected, rtol=1e-10, atol=1e-12)
    classes = np.load(tmp_path / "classes.npy")
    np.testing.assert_array_equal(classes, expected.argmax(axis=-1))
    assert classes.dtype == np.uint8
    import h5py

    with h5py.File(tmp_path / "y.h5") as file:
        np.testing.assert_array_equal(file["predictions"], np.load(tmp_path / "y.npy"))
    assert len(list(tmp_path.iterdir())) == 3


def test_images_of_another_size_where_the_weights_fit(folder, tmp_path):
    x = np.random.default_rng(0).normal(size=(2, 11, 4, 2))
    np.save(tmp_path / "x.npy", x)
    checkpoint = folder / "cells" / "checkpoint.h5"
    assert predict(made(segmentation, Cells), checkpoint, tmp_path / "x.npy", tmp_path / "y.npy") == (2, 11, 4, 4)
    with pytest.raises(DataError, match=r"of another shape: local_filtering1/weights"):
        predict(made(), folder / "classes" / "checkpoint.h5", tmp_path / "x.npy", tmp_path / "z.npy")
    assert not (tmp_path / "z.npy").exists()


@pytest.mark.parametrize(("ranks", "grid"), LAYOUTS)
@pytest.mark.long
def test_evaluation_says_what_the_run_said(folder, ranks, grid):
    history = made().run(hooks=[]).history

    def body(world):
        found = [
            evaluate_checkpoint(made(), folder / "classes" / "checkpoint.h5", ProcessGrid(world, **grid), split)
            for split in ("test", "train")
        ]
        return found

    (test, train), *others = loopback.run(ranks, body)
    assert all(each == [test, train] for each in others)
    assert (test["samples"], train["samples"]) == (5, 25)
    assert test["loss"] == pytest.approx(history[0]["test_loss"], rel=1e-10)
    assert test["error"] == history[0]["test_error"]


def test_tiles_that_overlap(tmp_path):
    """Maps as large as the image, which the data set cuts as it does the image: training, evaluation, predictions."""
    x = np.random.default_rng(3).normal(size=(3, 7, 6, 2))
    np.save(tmp_path / "x.npy", x)

    def body(world, scheme):
        def fresh():
            found = made(segmentation, Cells)
            found.model = nd.ConvnetDist(segmentation(), dtype="float64", backend="numpy", scheme=scheme)
            return found

        out, grid = tmp_path / scheme, ProcessGrid(world, rows=2)
        history = fresh().run(grid, output=out, hooks=[]).history
        told = evaluate_checkpoint(fresh(), out / "checkpoint.h5", grid)
        predict(fresh(), out / "checkpoint.h5", tmp_path / "x.npy", tmp_path / f"{scheme}.npy", grid)
        assert told["loss"] == pytest.approx(history[0]["test_loss"], rel=1e-10)
        assert told["error"] == history[0]["test_error"]
        return history[0]["train_loss"], history[0]["test_loss"], told["error"]

    names = "halo", "overlap_tile(statistics=global)"
    expected, found = (loopback.run(4, lambda world, s=scheme: body(world, s))[0] for scheme in names)
    assert found == pytest.approx(expected, rel=1e-10)
    expected, found = (np.load(tmp_path / f"{scheme}.npy") for scheme in names)
    np.testing.assert_allclose(found, expected, rtol=1e-10)


def array(*shape):
    return np.arange(np.prod(shape), dtype=np.uint8).reshape(shape)


def test_kinds_of_input(tmp_path):
    import h5py

    from neondist.train.inference.images import open_images

    def save(name, values):
        np.save(tmp_path / name, values)
        return tmp_path / name

    whole = array(5, 4, 6, 1)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["other"], file["images"] = np.zeros(3), whole
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file["x"] = whole[..., 0]
    with h5py.File(tmp_path / "c.h5", "w") as file:
        file["x"], file["y"] = whole, whole
    for path in (
        save("a.npy", whole),
        save("b.npy", whole[..., 0]),
        tmp_path / "a.h5",
        tmp_path / "b.h5",
        f"{tmp_path}/c.h5:y",
    ):
        source = open_images(path, (4, 6, 1))
        assert source.shape == whole.shape
        np.testing.assert_array_equal(source.raw(range(1, 3), (slice(1, 3), slice(2, 5))), whole[1:3, 1:3, 2:5])
        assert source.raw(range(2, 2), (slice(1, 3), slice(2, 2))).shape == (0, 2, 0, 1)
    for one in (whole[0], whole[0, ..., 0]):
        np.testing.assert_array_equal(
            open_images(save("c.npy", one), (4, 6, 1)).raw(range(1), (slice(0, 4), slice(0, 6))), whole[:1]
        )
    with pytest.raises(DataError, match=r"no unique data set; name one: .*c\.h5:x, .*c\.h5:y"):
        open_images(tmp_path / "c.h5", (4, 6, 1))


def test_pictures(tmp_path):
    image = pytest.importorskip("PIL.Image", reason="needs Pillow")
    from neondist.train.inference.images import open_images

    whole = array(3, 8, 5, 3)
    for at, cells in enumerate(whole):
        image.fromarray(cells).save(tmp_path / f"{at}.png")
    source = open_images(tmp_path, (8, 5, 3))
    np.testing.assert_array_equal(source.raw(range(1, 3), (slice(2, 4), slice(1, 5))), whole[1:, 2:4, 1:5])
    np.testing.assert_array_equal(
        open_images(tmp_path / "1.png", (8, 5, 3)).raw(range(1), (slice(0, 8), slice(0, 5))), whole[1:2]
    )
    with pytest.raises(DataError, match=r"shape \[3, 8, 5, 3\] \(NYXC\); the model takes \(N, H, W, 1\)"):
        open_images(tmp_path, (8, 5, 1))
    image.fromarray(whole[0, 1:]).save(tmp_path / "3.png")
    with pytest.raises(DataError, match=r"3\.png: has shape \[7, 5, 3\]"):
        open_images(tmp_path, (8, 5, 3)).raw(range(4), (slice(0, 8), slice(0, 5)))
    (tmp_path / "0.png").write_bytes((tmp_path / "0.png").read_bytes()[:45])
    with pytest.raises(DataError, match=r"0\.png: cannot be read as an image"):
        open_images(tmp_path, (8, 5, 3))


def objects(path):
    np.save(path, np.array([{}, None], object), allow_pickle=True)


def bad_input(tmp_path):
    (tmp_path / "text.npy").write_text("no array")
    (tmp_path / "text.h5").write_text("no array")
    (tmp_path / "text.csv").write_text("1,2")
    (tmp_path / "empty").mkdir()
    objects(tmp_path / "objects.npy")
    np.save(tmp_path / "words.npy", np.array(["a"]))
    np.save(tmp_path / "axes.npy", np.zeros((3, 4)))
    np.save(tmp_path / "none.npy", np.zeros((0, 7, 6, 2)))
    return {
        "missing.npy": "no such file",
        "missing.h5": "no such file",
        "missing": "no such file",
        "text.npy": "damaged, or of another file type",
        "text.h5": "not an HDF5 file",
        "text.csv": "unknown file type",
        "empty": "has no images",
        "objects.npy": "not numbers",
        "words.npy": "not numbers",
        "axes.npy": r"shape \[3, 4\]; the model takes \(N, H, W, 2\)",
        "none.npy": "is empty",
    }


def test_bad_input(folder, tmp_path):
    checkpoint = folder / "classes" / "checkpoint.h5"
    for name, message in bad_input(tmp_path).items():
        with pytest.raises(DataError, match=f"{name}: .*{message}") as caught:
            predict(made(), checkpoint, tmp_path / name, tmp_path / "y.npy")
        assert "\n" not in str(caught.value)
    raw = folder / "raw.npy"
    for target in (tmp_path / "y.txt", tmp_path / "text.csv" / "y.npy"):
        with pytest.raises((ConfigError, OutputError), match="y"):
            predict(made(), checkpoint, raw, target)
    with pytest.raises(ConfigError, match="split"):
        evaluate_checkpoint(made(), checkpoint, split="valid")
    serial = made()
    serial.dist_flag = False
    with pytest.raises(GridError, match="dist_flag"):
        loopback.run(2, lambda world: predict(serial, checkpoint, raw, tmp_path / "y.npy", ProcessGrid(world)))
    for call in (
        lambda path: predict(made(), path, raw, tmp_path / "y.npy"),
        lambda path: evaluate_checkpoint(made(), path),
    ):
        with pytest.raises(DataError, match="no such file"):
            call(tmp_path / "none.h5")
    assert not (tmp_path / "y.npy").exists()
