"""The pictures: that they are there, that they are whole, and that nothing is overlooked in them."""

import numpy as np
import pytest
from session_toys import experiment

from neondist.comm import ProcessGrid, loopback
from neondist.data import Synthetic
from neondist.geometry import Box
from neondist.layers import ConvLayerDist, FCLayerDist
from neondist.train import Hook
from neondist.train.callbacks import tiles_picture
from neondist.train.callbacks.tiles_picture import collect, framed, strips

matplotlib = pytest.importorskip("matplotlib")


def is_png(path):
    return path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(("ranks", "grid"), [(1, None), (6, {"replicas": 2, "rows": 1}), (10, {"rows": 5})])
@pytest.mark.long
def test_pictures_of_a_run(tmp_path, pictures, ranks, grid):
    def data():
        return Synthetic((4, 7, 3), classes=4, train=10, test=4)  # over 5 rows one tile of each column is empty

    def body(transport):
        made = experiment(1, lambda: [ConvLayerDist(2, 3, padding=1), FCLayerDist(4)], dataset=data, grid=grid)
        return made.run(made.open_grid(transport), tmp_path, hooks=[]).files

    files = loopback.run(ranks, body)[0]
    assert {tmp_path / "curves.png", tmp_path / "tiles.png"} <= set(files)
    assert is_png(tmp_path / "curves.png")
    assert is_png(tmp_path / "tiles.png")


def test_tiles_that_overlap(tmp_path, pictures):
    def body(transport):
        made = experiment(1, lambda: [ConvLayerDist(2, 3, padding=1, scheme="overlap_tile"), FCLayerDist(4)])
        return made.run(made.open_grid(transport), tmp_path, hooks=[]).files

    assert tmp_path / "tiles.png" in loopback.run(4, body)[0]


@pytest.mark.parametrize("shape", [(9, 2), (5, 6, 4, 1)])
def test_no_picture_of_what_is_no_image(tmp_path, pictures, shape):
    made = experiment(
        1,
        lambda: [ConvLayerDist(2, (3,) * (len(shape) - 1)), FCLayerDist(4)],
        dataset=lambda: Synthetic(shape, classes=4, train=10, test=4),
    )
    made.run(output=tmp_path, hooks=[])
    assert not (tmp_path / "tiles.png").exists()


def test_without_matplotlib_a_run_has_no_pictures(tmp_path):
    names = [path.name for path in experiment(1).run(output=tmp_path, hooks=[]).files]
    kinds = (
        "environment.json",
        "strategy.yaml",
        "metrics.jsonl",
        "checkpoint.h5",
        "ledger.jsonl",
        "complete.json",
        "worst.npz",
    )
    assert set(names) == set(kinds)


@pytest.mark.parametrize("ranks", [1, 4, 6])
@pytest.mark.parametrize("pixels", [512, 5, 1])
def test_the_image_is_put_together_from_the_tiles(ranks, pixels, monkeypatch):
    monkeypatch.setattr(tiles_picture, "PIXELS", pixels)
    data = Synthetic((13, 11, 2), classes=4, train=1, test=1)
    data.open(ProcessGrid.serial())
    whole = data.test.images([0], "float64")[0]
    step = -(-13 // pixels)

    def body(transport):
        grid = ProcessGrid(transport, replicas=2 if ranks > 1 else 1)
        mine = Synthetic((13, 11, 2), classes=4, train=1, test=1)
        mine.open(grid)
        return collect(mine, grid, np.dtype("float64"), grid.tile_box((13, 11)))

    for image in loopback.run(ranks, body):
        np.testing.assert_array_equal(image, whole[::step, ::step])


def test_the_layer_drawn_is_the_first_that_looks_at_neighbours():
    made = experiment()
    assert made.model.plan((13, 11, 2)).first_window.name == "conv1"
    pointwise = experiment(layers=lambda: [ConvLayerDist(2, 1), ConvLayerDist(2, 3, name="three"), FCLayerDist(4)])
    assert pointwise.model.plan((13, 11, 2)).first_window.name == "three"
    strided = experiment(layers=lambda: [ConvLayerDist(2, 1, stride=2), ConvLayerDist(2, 3), FCLayerDist(4)])
    assert strided.model.plan((13, 11, 2)).first_window is None
    assert experiment(layers=lambda: [FCLayerDist(4)]).model.plan((13, 11, 2)).first_window is None


def test_an_empty_tile_needs_no_room():
    tile, view = Box((1, 1), (3, 4)), Box((0, 0), (4, 5))
    assert framed(tile, view) == view
    assert framed(tile, Box((9, 9), (9, 12))) == tile
    assert framed(Box((4, 0), (4, 4)), view) == view
    assert framed(Box((4, 0), (4, 4)), Box((3, -1), (3, 5))).empty


@pytest.mark.parametrize(
    "inner",
    [Box((1, 1), (3, 4)), Box((0, 0), (5, 6)), Box((-2, 3), (9, 5)), Box((9, 9), (12, 12)), Box((2, 2), (2, 2))],
)
def test_strips_are_what_is_left(inner):
    outer, count = Box((0, 0), (5, 6)), np.zeros((5, 6), int)
    for strip in strips(outer, inner):
        count[strip.slices] += 1
    inside = outer.intersect(inner)
    if not inside.empty:
        count[inside.slices] += 1
    np.testing.assert_array_equal(count, 1)


@pytest.mark.long
def test_a_run_that_goes_on_draws_after_its_first_epoch(tmp_path, pictures):
    """Before the first step after a loss, nothing waits for matplotlib."""
    experiment(1).run(output=tmp_path, hooks=[])
    (tmp_path / "tiles.png").unlink()
    found = []

    class Look(Hook):
        def after_step(self, run):
            found.append((tmp_path / "tiles.png").exists())

    experiment(3).run(output=tmp_path, resume=True, hooks=[Look()])
    assert found == [False] * 5 + [True] * 5
    assert is_png(tmp_path / "tiles.png")
