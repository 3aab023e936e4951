"""Predictions and evaluation from a checkpoint, on any grid."""

import numpy as np
import pytest
from checkpoint_runs import make_experiment
from predict_runs import LabelledCells

import neondist as nd
from neondist.comm import ProcessGrid, loopback
from neondist.errors import ConfigError, DataError, GridError, OutputError
from neondist.io.checkpoint import pieces
from neondist.train import evaluate_checkpoint, predict


def make_segmentation_layers():
    return [nd.ConvLayerDist(3, 3, padding=1, activation=nd.ReLU()), nd.BatchNormLayerDist(), nd.ConvLayerDist(4, 1)]


def build_experiment(layers=None, data=nd.Synthetic, epochs=1):
    experiment = make_experiment(epochs) if layers is None else make_experiment(epochs, layers=layers)
    experiment.dataset = data((7, 6, 2), classes=4, train=25, test=5)
    return experiment


LAYOUTS = [(1, {}), (4, {}), (6, {"replicas": 3})]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(pieces, "MAX_TRANSFER_BYTES", 200)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two trained networks, raw images, and the outputs of a plain pass over them."""
    folder = tmp_path_factory.mktemp("trained")
    raw = np.random.default_rng(3).normal(size=(13, 7, 6, 2))
    np.save(folder / "raw.npy", raw)
    for name, layers, data in (("classes", None, nd.Synthetic), ("cells", make_segmentation_layers, LabelledCells)):
        experiment = build_experiment(layers, data)
        experiment.run(output=folder / name, hooks=[])
        x = raw if name == "classes" else (raw / 2 - 0.5)
        np.save(folder / f"{name}.npy", experiment.model.fprop(x, training=False, batch_size=13))
    return folder


@pytest.mark.parametrize(("ranks", "grid"), LAYOUTS)
@pytest.mark.parametrize("name", ["classes", "cells"])
@pytest.mark.long
def test_predictions(folder, tmp_path, name, ranks, grid):
    layers, data = (None, nd.Synthetic) if name == "classes" else (make_segmentation_layers, LabelledCells)
    expected = np.load(folder / f"{name}.npy")

    def body(world):
        process_grid = ProcessGrid(world, **grid)
        paths = folder / name / "checkpoint.h5", folder / "raw.npy"
        predict(build_experiment(layers, data), *paths, tmp_path / "y.npy", process_grid)
        predict(build_experiment(layers, data), *paths, tmp_path / "y.h5", process_grid)
        return predict(build_experiment(layers, data), *paths, tmp_path / "classes.npy", process_grid, classes=True)

    assert set(loopback.run(ranks, body)) == {expected.shape[:-1]}
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), expected, rtol=1e-10, atol=1e-12)
    classes = np.load(tmp_path / "classes.npy")
    np.testing.assert_array_equal(classes, expected.argmax(axis=-1))
    assert classes.dtype == np.uint8
    import h5py

    with h5py.File(tmp_path / "y.h5") as file:
        np.testing.assert_array_equal(file["predictions"], np.load(tmp_path / "y.npy"))
    assert len(list(tmp_path.iterdir())) == 3


def test_images_of_another_size(folder, tmp_path):
    x = np.random.default_rng(0).normal(size=(2, 11, 4, 2))
    np.save(tmp_path / "x.npy", x)
    checkpoint = folder / "cells" / "checkpoint.h5"
    experiment = build_experiment(make_segmentation_layers, LabelledCells)
    assert predict(experiment, checkpoint, tmp_path / "x.npy", tmp_path / "y.npy") == (2, 11, 4, 4)
    with pytest.raises(DataError, match=r"shape mismatch: local_filtering1/weights"):
        predict(build_experiment(), folder / "classes" / "checkpoint.h5", tmp_path / "x.npy", tmp_path / "z.npy")
    assert not (tmp_path / "z.npy").exists()


@pytest.mark.parametrize(("ranks", "grid"), LAYOUTS)
@pytest.mark.long
def test_evaluation_matches_the_run(folder, ranks, grid):
    history = build_experiment().run(hooks=[]).history

    def body(world):
        return [
            evaluate_checkpoint(
                build_experiment(), folder / "classes" / "checkpoint.h5", ProcessGrid(world, **grid), split
            )
            for split in ("test", "train")
        ]

    (test, train), *others = loopback.run(ranks, body)
    assert all(results == [test, train] for results in others)
    assert (test["samples"], train["samples"]) == (5, 25)
    assert test["loss"] == pytest.approx(history[0]["test_loss"], rel=1e-10)
    assert test["error"] == history[0]["test_error"]


def test_overlapping_tiles(tmp_path):
    """Training, evaluation and predictions with label maps, which are split like the images."""
    x = np.random.default_rng(3).normal(size=(3, 7, 6, 2))
    np.save(tmp_path / "x.npy", x)

    def body(world, scheme):
        def make():
            experiment = build_experiment(make_segmentation_layers, LabelledCells)
            experiment.model = nd.ConvnetDist(
                make_segmentation_layers(), dtype="float64", backend="numpy", scheme=scheme
            )
            return experiment

        out, grid = tmp_path / scheme, ProcessGrid(world, rows=2)
        history = make().run(grid, output=out, hooks=[]).history
        evaluation = evaluate_checkpoint(make(), out / "checkpoint.h5", grid)
        predict(make(), out / "checkpoint.h5", tmp_path / "x.npy", tmp_path / f"{scheme}.npy", grid)
        assert evaluation["loss"] == pytest.approx(history[0]["test_loss"], rel=1e-10)
        assert evaluation["error"] == history[0]["test_error"]
        return history[0]["train_loss"], history[0]["test_loss"], evaluation["error"]

    names = "halo", "overlap_tile(statistics=global)"
    expected, actual = (loopback.run(4, lambda world, s=scheme: body(world, s))[0] for scheme in names)
    assert actual == pytest.approx(expected, rel=1e-10)
    expected, actual = (np.load(tmp_path / f"{scheme}.npy") for scheme in names)
    np.testing.assert_allclose(actual, expected, rtol=1e-10)


def make_array(*shape):
    return np.arange(np.prod(shape), dtype=np.uint8).reshape(shape)


def test_input_formats(tmp_path):
    import h5py

    from neondist.train.inference.images import open_images

    def save_array(name, values):
        np.save(tmp_path / name, values)
        return tmp_path / name

    images = make_array(5, 4, 6, 1)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["other"], file["images"] = np.zeros(3), images
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file["x"] = images[..., 0]
    with h5py.File(tmp_path / "c.h5", "w") as file:
        file["x"], file["y"] = images, images
    for path in (
        save_array("a.npy", images),
        save_array("b.npy", images[..., 0]),
        tmp_path / "a.h5",
        tmp_path / "b.h5",
        f"{tmp_path}/c.h5:y",
    ):
        source = open_images(path, (4, 6, 1))
        assert source.shape == images.shape
        np.testing.assert_array_equal(source.read_raw(range(1, 3), (slice(1, 3), slice(2, 5))), images[1:3, 1:3, 2:5])
        assert source.read_raw(range(2, 2), (slice(1, 3), slice(2, 2))).shape == (0, 2, 0, 1)
    for single_image in (images[0], images[0, ..., 0]):
        np.testing.assert_array_equal(
            open_images(save_array("c.npy", single_image), (4, 6, 1)).read_raw(range(1), (slice(0, 4), slice(0, 6))),
            images[:1],
        )
    with pytest.raises(DataError, match=r"contains several arrays; specify one of .*c\.h5:x, .*c\.h5:y"):
        open_images(tmp_path / "c.h5", (4, 6, 1))


def test_image_files(tmp_path):
    image = pytest.importorskip("PIL.Image", reason="needs Pillow")
    from neondist.train.inference.images import open_images

    images = make_array(3, 8, 5, 3)
    for index, cells in enumerate(images):
        image.fromarray(cells).save(tmp_path / f"{index}.png")
    source = open_images(tmp_path, (8, 5, 3))
    np.testing.assert_array_equal(source.read_raw(range(1, 3), (slice(2, 4), slice(1, 5))), images[1:, 2:4, 1:5])
    np.testing.assert_array_equal(
        open_images(tmp_path / "1.png", (8, 5, 3)).read_raw(range(1), (slice(0, 8), slice(0, 5))), images[1:2]
    )
    with pytest.raises(DataError, match=r"shape \[3, 8, 5, 3\] \(NYXC\); the model takes \(N, H, W, 1\)"):
        open_images(tmp_path, (8, 5, 1))
    image.fromarray(images[0, 1:]).save(tmp_path / "3.png")
    with pytest.raises(DataError, match=r"3\.png: has shape \[7, 5, 3\]"):
        open_images(tmp_path, (8, 5, 3)).read_raw(range(4), (slice(0, 8), slice(0, 5)))
    (tmp_path / "3.png").unlink()
    (tmp_path / "0.png").write_bytes((tmp_path / "0.png").read_bytes()[:45])
    with pytest.raises(DataError, match=r"0\.png: cannot be read as an image"):
        open_images(tmp_path, (8, 5, 3)).read_raw(range(3), (slice(0, 8), slice(0, 5)))


def save_object_array(path):
    np.save(path, np.array([{}, None], object), allow_pickle=True)


def write_invalid_inputs(tmp_path):
    (tmp_path / "text.npy").write_text("no array")
    (tmp_path / "text.h5").write_text("no array")
    (tmp_path / "text.csv").write_text("1,2")
    (tmp_path / "empty").mkdir()
    (tmp_path / "nested" / "cats").mkdir(parents=True)
    (tmp_path / "nested" / "cats" / "1.png").touch()
    save_object_array(tmp_path / "objects.npy")
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
        "empty": "has no images .*; give a folder with images",
        "nested": r"has no images .*; give a subfolder or, .* '.*/nested/\*/\*\.png'",
        "objects.npy": "not numbers",
        "words.npy": "not numbers",
        "axes.npy": r"shape \[3, 4\]; the model takes \(N, H, W, 2\)",
        "none.npy": "is empty",
    }


def test_invalid_inputs(folder, tmp_path):
    checkpoint = folder / "classes" / "checkpoint.h5"
    for name, message in write_invalid_inputs(tmp_path).items():
        with pytest.raises(DataError, match=f"{name}: .*{message}") as caught:
            predict(build_experiment(), checkpoint, tmp_path / name, tmp_path / "y.npy")
        assert "\n" not in str(caught.value)
    raw = folder / "raw.npy"
    for target in (tmp_path / "y.txt", tmp_path / "text.csv" / "y.npy"):
        with pytest.raises((ConfigError, OutputError), match="y"):
            predict(build_experiment(), checkpoint, raw, target)
    with pytest.raises(ConfigError, match="split"):
        evaluate_checkpoint(build_experiment(), checkpoint, split="valid")
    serial = build_experiment()
    serial.dist_flag = False
    with pytest.raises(GridError, match="dist_flag"):
        loopback.run(2, lambda world: predict(serial, checkpoint, raw, tmp_path / "y.npy", ProcessGrid(world)))
    for call in (
        lambda path: predict(build_experiment(), path, raw, tmp_path / "y.npy"),
        lambda path: evaluate_checkpoint(build_experiment(), path),
    ):
        with pytest.raises(DataError, match="no such file"):
            call(tmp_path / "none.h5")
    assert not (tmp_path / "y.npy").exists()
