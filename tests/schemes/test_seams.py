"""Measurement of errors at tile boundaries."""

import numpy as np
import pytest
from scheme_runs import run_on_ranks

import neondist as nd
from neondist.bench.seams import measure_seam_errors, seam_distances


def seam_errors_of_scheme(scheme, ranks=4):
    """Measure two convolutions of radius 1 on 16 x 16 images."""

    def job(comm):
        grid, models = nd.ProcessGrid(comm), []
        for model_scheme in ("halo", scheme):
            layers = [nd.ConvLayerDist(3, 3, padding=1), nd.ConvLayerDist(2, 3, padding=1), nd.FCLayerDist(3)]
            models.append(nd.ConvnetDist(layers, scheme=model_scheme, dtype="float64", backend="numpy"))
            models[-1].build((16, 16, 2), 4, grid)
        batches = [models[0].scatter(np.random.default_rng(i).normal(size=(4, 16, 16, 2))) for i in range(2)]
        return measure_seam_errors(*models, batches)

    reports = run_on_ranks(ranks, job)
    assert all(report == reports[0] for report in reports)
    return reports[0]


@pytest.mark.parametrize("scheme", ["tower", "stale", "quantised(bits=8)"])
def test_output_errors_stay_within_the_radius(scheme):
    report = seam_errors_of_scheme(scheme)
    assert list(report) == ["conv1", "conv2", "fc1"]
    for name, radius in (("conv1", 1), ("conv2", 2)):
        errors = report[name]["output"]
        assert len(errors) == 8
        assert min(errors[:radius]) > 1e-4
        assert max(errors[radius:]) < 1e-12


def test_gradient_errors_stay_within_the_radius_of_later_layers():
    report = seam_errors_of_scheme("halo_oneway")
    assert max(report["conv1"]["output"] + report["conv2"]["output"]) < 1e-12
    assert min(report["conv1"]["gradient"][:2]) > 1e-3
    assert max(report["conv1"]["gradient"][2:]) < 1e-12
    assert max(report["conv2"]["gradient"][1:]) < 1e-12 < report["conv2"]["gradient"][0]
    assert max(report["fc1"]["gradient"]) < 1e-12


def test_seam_distance():
    partition = nd.GridShape(1, 2, 2).partition((4, 5))
    np.testing.assert_array_equal(seam_distances(partition, 0), [[1, 1, 0], [0, 0, 0]])
    np.testing.assert_array_equal(seam_distances(nd.GridShape(1, 3, 1).partition((7, 2)), 1), [[0, 0], [0, 0]])
    assert seam_distances(nd.GridShape().partition((3, 3)), 0).max() == 0
