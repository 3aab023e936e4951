"""The seam meter measures what it says."""

import numpy as np
import pytest
from scheme_runs import on_ranks

import neondist as nd
from neondist.bench.seams import seam_distance, seam_error


def measured(scheme, ranks=4):
    """Two convolutions of radius 1 on 16 x 16 images."""

    def job(comm):
        grid, models = nd.ProcessGrid(comm), []
        for each in ("halo", scheme):
            layers = [nd.ConvLayerDist(3, 3, padding=1), nd.ConvLayerDist(2, 3, padding=1), nd.FCLayerDist(3)]
            models.append(nd.ConvnetDist(layers, scheme=each, dtype="float64", backend="numpy"))
            models[-1].build((16, 16, 2), 4, grid)
        batches = [models[0].scatter(np.random.default_rng(i).normal(size=(4, 16, 16, 2))) for i in range(2)]
        return seam_error(*models, batches)

    found = on_ranks(ranks, job)
    assert all(each == found[0] for each in found)
    return found[0]


@pytest.mark.parametrize("scheme", ["tower", "stale", "quantised(bits=8)"])
def test_outputs_are_wrong_as_far_as_the_radius_reaches(scheme):
    found = measured(scheme)
    assert list(found) == ["conv1", "conv2", "fc1"]
    for name, radius in (("conv1", 1), ("conv2", 2)):
        errors = found[name]["output"]
        assert len(errors) == 8
        assert min(errors[:radius]) > 1e-4
        assert max(errors[radius:]) < 1e-12


def test_gradients_are_wrong_as_far_as_the_layers_above_reach():
    found = measured("halo_oneway")
    assert max(found["conv1"]["output"] + found["conv2"]["output"]) < 1e-12
    assert min(found["conv1"]["gradient"][:2]) > 1e-3
    assert max(found["conv1"]["gradient"][2:]) < 1e-12
    assert max(found["conv2"]["gradient"][1:]) < 1e-12 < found["conv2"]["gradient"][0]
    assert max(found["fc1"]["gradient"]) < 1e-12


def test_distance():
    partition = nd.GridShape(1, 2, 2).partition((4, 5))
    np.testing.assert_array_equal(seam_distance(partition, 0), [[1, 1, 0], [0, 0, 0]])
    np.testing.assert_array_equal(seam_distance(nd.GridShape(1, 3, 1).partition((7, 2)), 1), [[0, 0], [0, 0]])
    assert seam_distance(nd.GridShape().partition((3, 3)), 0).max() == 0
