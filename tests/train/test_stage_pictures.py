"""The pictures of what a stage has learned: the same pixels on every grid, each from its tiles."""

import numpy as np
import pytest
from gb_runs import built, gb_of
from support import worst

import neondist as nd
from neondist.comm import loopback
from neondist.models import optimal_stimulus
from neondist.train.callbacks.stage_pictures import (
    StagePictures,
    draw_blocks,
    draw_rows,
    filters,
    reconstructions,
    stimuli,
)


def collected(comm=None, replicas=1, kind="unshared"):
    data, grid = nd.Synthetic((12, 10, 1), classes=4, train=8, test=5), nd.ProcessGrid.serial()
    if comm is not None:
        grid = nd.ProcessGrid(comm, replicas=replicas)
    model = gb_of(kind, dist=True)
    data.open(grid)
    model.build(data.sample_shape, 8, grid)
    found = dict(zip(("input", "output", "error"), reconstructions(model.stages[0], data.test), strict=True))
    found |= {f"filters {place}": array for place, array in filters(model.stages[0]).items()}
    return found | {f"stimuli {stage.number}": stimuli(stage, data.test) for stage in model.stages}, data


@pytest.mark.parametrize(("kind", "grids"), [("unshared", [(2, 1), (6, 2)]), ("blocks", [(6, 1)])])
@pytest.mark.long
def test_each_picture_is_put_together_once(kind, grids):
    expected, data = collected(kind=kind)
    np.testing.assert_allclose(expected["input"], data.test.images(range(5), "float64"))
    for ranks, replicas in grids:
        for found, _ in loopback.run(ranks, lambda c, r=replicas: collected(c, r, kind)):
            assert worst(found, expected) < 1e-9


def test_a_linear_unit_answers_most_to_its_own_filter():
    model, _ = built("unshared")
    x, values = optimal_stimulus(model, 0, [(1, 2, 3), (4, 0, 0)], norm=2.0)
    for image, value, (row, col, channel) in zip(x, values, [(1, 2, 3), (4, 0, 0)], strict=True):
        own = model.layers[0].params["weights"][row, col, ..., channel]
        expected = np.zeros(image.shape)
        expected[2 * row : 2 * row + 3, 2 * col : 2 * col + 3] = 2 * own / np.linalg.norm(own)
        np.testing.assert_allclose(image, expected, atol=1e-6)
        assert value == pytest.approx(2 * np.linalg.norm(own))


@pytest.mark.long
def test_a_run_draws_its_stages(tmp_path, pictures):
    pytest.importorskip("matplotlib", reason="matplotlib draws the pictures")
    data = nd.Synthetic((12, 10, 1), classes=4, train=8, test=3)
    nd.FitExperiment(data, gb_of("unshared", dist=True), batch_size=8).run(output=tmp_path, hooks=[])
    names = {path.name for path in tmp_path.glob("*_?.png")}
    assert names == {"reconstructions_1.png", "filters_1.png", "stimuli_1.png", "stimuli_2.png"}


def test_pictures_of_volumes_and_series_are_left_out(tmp_path, pictures):
    data = nd.Synthetic((24, 2), classes=4, train=8, test=3)
    nd.FitExperiment(data, gb_of("series", dist=True), batch_size=8).run(output=tmp_path, hooks=[])
    assert not list(tmp_path.glob("*_?.png"))


@pytest.mark.long
def test_the_hook_is_for_supervised_runs_too(tmp_path, pictures):
    pytest.importorskip("matplotlib", reason="matplotlib draws the pictures")
    data = nd.Synthetic((12, 10, 3), classes=4, train=8, test=3)
    model = gb_of("shared", dist=True, num_pretrain_epochs=0)
    nd.FitExperiment(data, model, batch_size=8).run(hooks=[StagePictures(tmp_path)])
    assert (tmp_path / "filters_1.png").is_file()


@pytest.mark.parametrize("channels", [1, 3])
def test_drawing(tmp_path, channels):
    image = pytest.importorskip("matplotlib.image", reason="matplotlib draws the pictures")
    rng = np.random.default_rng(0)
    draw_rows(tmp_path / "rows.png", list(rng.normal(size=(2, 3, 5, 4, channels))), "rows")
    draw_blocks(
        tmp_path / "blocks.png", {(r, c): rng.normal(size=(4, 4, channels, 5)) for r in (0, 3) for c in (1, 2)}, ""
    )
    assert {image.imread(path).shape[2] for path in tmp_path.glob("*.png")} == {4}
