"""What is sent is what the formula says, for every scheme, layer and grid."""

import numpy as np
import pytest
from scheme_runs import GRIDS, LAYERS, SCHEMES, build, noise, on_ranks, step

import neondist as nd
from neondist.geometry import grid_shape

UNEVEN = [(7, 7)]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("layer", LAYERS)
def test_bytes_are_those_of_the_formula(layer, scheme):
    shape, make = LAYERS[layer]
    for ranks, rows in GRIDS if scheme == "halo" else UNEVEN:

        def job(comm, rows=rows):
            model = build(comm, make(scheme=scheme), shape, rows)
            x, dy = noise(model)
            for number in range(2):  # the first steps of a scheme with a memory are others
                step(model, number, x, dy)
            before = model.bytes_sent
            for number in range(2, 4):
                step(model, number, x, dy)
            return model.bytes_sent - before

        plan = nd.ConvnetDist(make(scheme=scheme)).plan(shape, grid_shape(ranks, rows=rows))[0]
        expected = [2 * sent for sent in plan.sent_bytes(samples=3, itemsize=8)]
        assert on_ranks(ranks, job) == expected, (ranks, rows)


def test_the_formula_of_an_inner_tile():
    """H = n c (2 O (h + w) + 4 O²) numbers, here n = 2, c = 3, O = 2, h x w = 5 x 7."""
    model = nd.ConvnetDist([nd.ConvLayerDist(1, 5, padding=2)])
    plan = model.plan((15, 21, 3), nd.GridShape(rows=3, cols=3))[0]
    assert 2 * plan.sent_words[4] == 2 * 3 * (2 * 2 * (5 + 7) + 4 * 2**2)


def test_a_tower_sends_nothing_until_the_towers_meet():
    def job(comm):
        layers = [
            nd.ConvLayerDist(4, 5, padding=2),
            nd.MaxPoolingLayerDist(3, 2),
            nd.ConvLayerDist(4, 3, scheme=nd.Tower(merge=True)),
            nd.ConvLayerDist(4, 3),
            nd.FCLayerDist(10),
        ]
        model = build(comm, layers, (20, 19, 3), scheme="tower")
        model.train_batch(model.scatter(noise(model)[0]), np.zeros(3, int))
        return [layer.bytes_sent > 0 for layer in model.leaves]

    assert on_ranks(6, job) == [[False, False, True, False, False]] * 6
