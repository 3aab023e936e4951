"""Pictures of pretrained stages: equal pixels on every grid."""

import numpy as np
import pytest
from common_checks import max_relative_difference
from gb_runs import build_gb, make_gb

import neondist as nd
from neondist.comm import loopback
from neondist.models import optimal_stimulus
from neondist.train.callbacks.stage_pictures import (
    PretrainingPictures,
    compute_optimal_stimuli,
    gather_filters,
    reconstruct_first_images,
    write_filter_blocks,
    write_picture_rows,
)


def collect_pictures(comm=None, replicas=1, kind="unshared"):
    data, grid = nd.Synthetic((12, 10, 1), classes=4, train=8, test=5), nd.ProcessGrid.serial()
    if comm is not None:
        grid = nd.ProcessGrid(comm, replicas=replicas)
    model = make_gb(kind, dist=True)
    data.open(grid)
    model.build(data.sample_shape, 8, grid)
    arrays = dict(zip(("input", "output", "error"), reconstruct_first_images(model.stages[0], data.test), strict=True))
    arrays |= {f"filters {name}": array for name, array in gather_filters(model.stages[0]).items()}
    return arrays | {
        f"stimuli {stage.stage_number}": compute_optimal_stimuli(stage, data.test) for stage in model.stages
    }, data


@pytest.mark.parametrize(("kind", "grids"), [("unshared", [(2, 1), (6, 2)]), ("blocks", [(6, 1)])])
@pytest.mark.long
def test_pictures_are_equal_on_all_grids(kind, grids):
    expected, data = collect_pictures(kind=kind)
    np.testing.assert_allclose(expected["input"], data.test.images(range(5), "float64"))
    for ranks, replicas in grids:
        for actual, _ in loopback.run(ranks, lambda c, r=replicas: collect_pictures(c, r, kind)):
            assert max_relative_difference(actual, expected) < 1e-9


def test_optimal_stimulus_of_a_linear_unit_is_its_filter():
    model, _ = build_gb("unshared")
    x, values = optimal_stimulus(model, 0, [(1, 2, 3), (4, 0, 0)], norm=2.0)
    for image, value, (row, col, channel) in zip(x, values, [(1, 2, 3), (4, 0, 0)], strict=True):
        kernel = model.layers[0].params["weights"][row, col, ..., channel]
        expected = np.zeros(image.shape)
        expected[2 * row : 2 * row + 3, 2 * col : 2 * col + 3] = 2 * kernel / np.linalg.norm(kernel)
        np.testing.assert_allclose(image, expected, atol=1e-6)
        assert value == pytest.approx(2 * np.linalg.norm(kernel))


@pytest.mark.long
def test_run_writes_pictures_of_its_stages(tmp_path, plotting):
    pytest.importorskip("matplotlib", reason="matplotlib draws the pictures")
    data = nd.Synthetic((12, 10, 1), classes=4, train=8, test=3)
    nd.FitExperiment(data, make_gb("unshared", dist=True), batch_size=8).run(output=tmp_path, hooks=[])
    names = {path.name for path in tmp_path.glob("*_?.png")}
    assert names == {"reconstructions_1.png", "filters_1.png", "stimuli_1.png", "stimuli_2.png"}


def test_no_pictures_of_volumes_and_series(tmp_path, plotting):
    data = nd.Synthetic((24, 2), classes=4, train=8, test=3)
    nd.FitExperiment(data, make_gb("series", dist=True), batch_size=8).run(output=tmp_path, hooks=[])
    assert not list(tmp_path.glob("*_?.png"))


@pytest.mark.long
def test_pictures_of_supervised_runs(tmp_path, plotting):
    pytest.importorskip("matplotlib", reason="matplotlib draws the pictures")
    data = nd.Synthetic((12, 10, 3), classes=4, train=8, test=3)
    model = make_gb("shared", dist=True, num_pretrain_epochs=0)
    nd.FitExperiment(data, model, batch_size=8).run(hooks=[PretrainingPictures(tmp_path)])
    assert (tmp_path / "filters_1.png").is_file()


@pytest.mark.parametrize("channels", [1, 3])
def test_picture_files_are_rgba(tmp_path, channels):
    image = pytest.importorskip("matplotlib.image", reason="matplotlib draws the pictures")
    rng = np.random.default_rng(0)
    write_picture_rows(tmp_path / "rows.png", list(rng.normal(size=(2, 3, 5, 4, channels))), "rows")
    write_filter_blocks(
        tmp_path / "blocks.png", {(r, c): rng.normal(size=(4, 4, channels, 5)) for r in (0, 3) for c in (1, 2)}, ""
    )
    assert {image.imread(path).shape[2] for path in tmp_path.glob("*.png")} == {4}
