"""Pictures of a run: existence, completeness and layout."""

import gc
import weakref

import numpy as np
import pytest
from toy_training import make_experiment

from neondist.comm import ProcessGrid, loopback
from neondist.data import Synthetic
from neondist.geometry import Box
from neondist.io.files import write_figure
from neondist.layers import ConvLayerDist, FCLayerDist
from neondist.train import Hook
from neondist.train.callbacks import tiles_picture
from neondist.train.callbacks.tiles_picture import gather_first_image, hull_of_tile_and_view, split_outside_box

matplotlib = pytest.importorskip("matplotlib")


def is_png(path):
    return path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(("ranks", "grid"), [(1, None), (6, {"replicas": 2, "rows": 1}), (10, {"rows": 5})])
@pytest.mark.long
def test_pictures_of_a_run(tmp_path, plotting, ranks, grid):
    def data():
        return Synthetic((4, 7, 3), classes=4, train=10, test=4)  # over 5 rows one tile of each column is empty

    def body(transport):
        experiment = make_experiment(
            1, lambda: [ConvLayerDist(2, 3, padding=1), FCLayerDist(4)], dataset=data, grid=grid
        )
        return experiment.run(experiment.open_grid(transport), tmp_path, hooks=[]).files

    files = loopback.run(ranks, body)[0]
    assert {tmp_path / "curves.png", tmp_path / "tiles.png"} <= set(files)
    assert is_png(tmp_path / "curves.png")
    assert is_png(tmp_path / "tiles.png")


def test_picture_of_overlapping_tiles(tmp_path, plotting):
    def body(transport):
        experiment = make_experiment(1, lambda: [ConvLayerDist(2, 3, padding=1, scheme="overlap_tile"), FCLayerDist(4)])
        return experiment.run(experiment.open_grid(transport), tmp_path, hooks=[]).files

    assert tmp_path / "tiles.png" in loopback.run(4, body)[0]


@pytest.mark.parametrize("shape", [(9, 2), (5, 6, 4, 1)])
def test_tile_picture_needs_two_dimensions(tmp_path, plotting, shape):
    experiment = make_experiment(
        1,
        lambda: [ConvLayerDist(2, (3,) * (len(shape) - 1)), FCLayerDist(4)],
        dataset=lambda: Synthetic(shape, classes=4, train=10, test=4),
    )
    experiment.run(output=tmp_path, hooks=[])
    assert not (tmp_path / "tiles.png").exists()


def test_no_pictures_without_matplotlib(tmp_path):
    names = [path.name for path in make_experiment(1).run(output=tmp_path, hooks=[]).files]
    expected = (
        "environment.json",
        "strategy.yaml",
        "metrics.jsonl",
        "checkpoint.h5",
        "ledger.jsonl",
        "complete.json",
        "worst.npz",
    )
    assert set(names) == set(expected)


@pytest.mark.parametrize("ranks", [1, 4, 6])
@pytest.mark.parametrize("pixels", [512, 5, 1])
def test_image_is_assembled_from_tiles(ranks, pixels, monkeypatch):
    monkeypatch.setattr(tiles_picture, "MAX_PICTURE_EXTENT", pixels)
    data = Synthetic((13, 11, 2), classes=4, train=1, test=1)
    data.open(ProcessGrid.serial())
    full_image = data.test.images([0], "float64")[0]
    step = -(-13 // pixels)

    def body(transport):
        grid = ProcessGrid(transport, replicas=2 if ranks > 1 else 1)
        tile_data = Synthetic((13, 11, 2), classes=4, train=1, test=1)
        tile_data.open(grid)
        return gather_first_image(tile_data, grid, np.dtype("float64"), grid.tile_box((13, 11)))

    for image in loopback.run(ranks, body):
        np.testing.assert_array_equal(image, full_image[::step, ::step])


def test_drawn_layer_is_the_first_with_a_window():
    experiment = make_experiment()
    assert experiment.model.plan((13, 11, 2)).first_windowed_layer.name == "conv1"
    pointwise = make_experiment(layers=lambda: [ConvLayerDist(2, 1), ConvLayerDist(2, 3, name="three"), FCLayerDist(4)])
    assert pointwise.model.plan((13, 11, 2)).first_windowed_layer.name == "three"
    strided = make_experiment(layers=lambda: [ConvLayerDist(2, 1, stride=2), ConvLayerDist(2, 3), FCLayerDist(4)])
    assert strided.model.plan((13, 11, 2)).first_windowed_layer is None
    assert make_experiment(layers=lambda: [FCLayerDist(4)]).model.plan((13, 11, 2)).first_windowed_layer is None


def test_frame_of_an_empty_tile():
    tile, view = Box((1, 1), (3, 4)), Box((0, 0), (4, 5))
    assert hull_of_tile_and_view(tile, view) == view
    assert hull_of_tile_and_view(tile, Box((9, 9), (9, 12))) == tile
    assert hull_of_tile_and_view(Box((4, 0), (4, 4)), view) == view
    assert hull_of_tile_and_view(Box((4, 0), (4, 4)), Box((3, -1), (3, 5))).empty


@pytest.mark.parametrize(
    "inner",
    [Box((1, 1), (3, 4)), Box((0, 0), (5, 6)), Box((-2, 3), (9, 5)), Box((9, 9), (12, 12)), Box((2, 2), (2, 2))],
)
def test_strips_cover_the_remainder(inner):
    outer, count = Box((0, 0), (5, 6)), np.zeros((5, 6), int)
    for strip in split_outside_box(outer, inner):
        count[strip.slices] += 1
    overlap = outer.intersect(inner)
    if not overlap.empty:
        count[overlap.slices] += 1
    np.testing.assert_array_equal(count, 1)


@pytest.mark.long
def test_resumed_run_draws_after_its_first_epoch(tmp_path, plotting):
    """The first step after a restart does not wait for matplotlib."""
    make_experiment(1).run(output=tmp_path, hooks=[])
    (tmp_path / "tiles.png").unlink()
    exists = []

    class PictureCheck(Hook):
        def after_step(self, run):
            exists.append((tmp_path / "tiles.png").exists())

    make_experiment(3).run(output=tmp_path, resume=True, hooks=[PictureCheck()])
    assert exists == [False] * 5 + [True] * 5
    assert is_png(tmp_path / "tiles.png")


def test_written_figure_holds_no_images(tmp_path):
    figure_module = pytest.importorskip("matplotlib.figure")
    figure = figure_module.Figure()
    image = figure.subfigures(1, 2)[0].subplots().imshow(np.ones((5, 4)))
    pixels = weakref.ref(image.get_array())
    del image
    gc.collect()
    gc.disable()
    try:
        write_figure(tmp_path / "a.png", figure)
        assert pixels() is None
    finally:
        gc.enable()
    assert is_png(tmp_path / "a.png")
