"""The planner: the cheapest cut, and the same numbers as one process."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheme_runs import on_ranks
from support import worst
from test_runs import NETWORKS, passes

import neondist as nd
from neondist.errors import ConfigError
from neondist.plan.planner import best_cuts, segment_seconds
from neondist.plan.segments import place_layers
from neondist.system.machine import Figures


def runs(scheme, layers=5):
    """The numbers of layers that exchange once together, on a 3 x 3 grid."""
    made = [nd.ConvLayerDist(8, 3, padding=1) for _ in range(layers)]
    plans = nd.ConvnetDist(made, scheme=scheme).plan((48, 48, 8), nd.GridShape(1, 3, 3))
    starts = [index for index, plan in enumerate(plans) if plan.halo_cells[4]]
    return [b - a for a, b in pairwise([*starts, layers])]


def test_dear_messages_make_long_runs_and_dear_computing_short_ones():
    assert runs(nd.schemes.Auto(latency=1.0)) == [5]
    assert runs(nd.schemes.Auto(latency=1e-9, bandwidth=1e15, speed=1e6)) == [1, 1, 1, 1, 1]
    between = runs(nd.schemes.Auto(latency=1e-4, speed=2e10))
    assert 1 < len(between) < 5


@given(st.integers(0, 6), st.randoms(use_true_random=False))
def test_no_cut_is_cheaper(count, random):
    costs = {(a, b): random.random() for a in range(count) for b in range(a, count)}

    def cheapest(start):
        return min((costs[start, end] + cheapest(end + 1) for end in range(start, count)), default=0.0)

    cuts = best_cuts(lambda a, b: costs[a, b], count)
    assert sum(costs[cut] for cut in cuts) == pytest.approx(cheapest(0))
    assert [cell for a, b in cuts for cell in range(a, b + 1)] == list(range(count))


@pytest.mark.parametrize("name", ["strides", "normalised"])
def test_everything_is_what_one_process_computes(name):
    shape, layers = NETWORKS[name]
    expected = on_ranks(1, lambda comm: passes(comm, layers, shape, "halo"))[0]
    for found in on_ranks(6, lambda comm: passes(comm, layers, shape, nd.schemes.Auto(latency=1e-4))):
        assert worst(found, expected) < 1e-10


def test_a_layer_that_cannot_be_in_a_run_is_left_alone():
    layers = [nd.ConvLayerDist(2, 3), nd.LCNLayerDist(3), nd.ConvLayerDist(2, 3), nd.ConvLayerDist(2, 3)]
    plans = nd.ConvnetDist(layers, scheme=nd.schemes.Auto(latency=1.0)).plan((20, 20, 2), nd.GridShape(1, 2, 2))
    assert [plan.halo_cells[0] > 0 for plan in plans] == [True, True, True, False]


def test_what_is_computed_twice_is_that_of_the_fullest_tile():
    """7 pooled rows on 2 tiles, 4 and 3: the first computes 8 rows of the convolution instead of 7, the second none."""
    layers = [nd.ConvLayerDist(2, 3, padding=1), nd.MaxPoolingLayerDist(2)]
    model = nd.ConvnetDist(layers, scheme=nd.schemes.DeepHalo())
    links, grid = list(model.chain.inputs((14, 14, 2))), nd.GridShape(1, 2, 1)
    figures = Figures(bandwidth=1e30, latency=1e-30, samples=3, cell_seconds={"conv1": 1.0})
    assert segment_seconds(figures, place_layers(links, grid), grid) == pytest.approx([14 * 3, 0])


def test_mistakes():
    with pytest.raises(ConfigError, match="Auto: speed: expected a number above 0 or null, got 0"):
        nd.schemes.Auto(speed=0)
