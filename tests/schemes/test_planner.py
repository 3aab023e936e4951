"""Planner: the cheapest division into segments, with the results of one process."""

from itertools import pairwise

import pytest
from common_checks import max_relative_difference
from hypothesis import given
from hypothesis import strategies as st
from scheme_runs import run_on_ranks
from test_segments import NETWORKS, run_passes

import neondist as nd
from neondist.errors import ConfigError
from neondist.plan.planner import cheapest_ranges, overhead_seconds
from neondist.plan.segments import layers_with_regions
from neondist.system.machine import MachineProfile


def list_segment_lengths(scheme, layers=5):
    """Return the number of layers of each segment on a 3 x 3 grid."""
    convolutions = [nd.ConvLayerDist(8, 3, padding=1) for _ in range(layers)]
    plans = nd.ConvnetDist(convolutions, scheme=scheme).plan((48, 48, 8), nd.GridShape(1, 3, 3))
    starts = [index for index, plan in enumerate(plans) if plan.halo_cells_by_tile[4]]
    return [stop - start for start, stop in pairwise([*starts, layers])]


def test_segment_length_follows_message_cost():
    assert list_segment_lengths(nd.schemes.Auto(latency=1.0)) == [5]
    assert list_segment_lengths(nd.schemes.Auto(latency=1e-9, bandwidth=1e15, speed=1e6)) == [1, 1, 1, 1, 1]
    moderate = list_segment_lengths(nd.schemes.Auto(latency=1e-4, speed=2e10))
    assert 1 < len(moderate) < 5


@given(st.integers(0, 6), st.randoms(use_true_random=False))
def test_cuts_are_optimal(count, random):
    costs = {(a, b): random.random() for a in range(count) for b in range(a, count)}

    def find_cheapest(start):
        return min((costs[start, end] + find_cheapest(end + 1) for end in range(start, count)), default=0.0)

    cuts = cheapest_ranges(lambda a, b: costs[a, b], count)
    assert sum(costs[cut] for cut in cuts) == pytest.approx(find_cheapest(0))
    assert [cell for a, b in cuts for cell in range(a, b + 1)] == list(range(count))


@pytest.mark.parametrize("name", ["strides", "normalised"])
def test_results_match_one_process(name):
    shape, layers = NETWORKS[name]
    expected = run_on_ranks(1, lambda comm: run_passes(comm, layers, shape, "halo"))[0]
    for actual in run_on_ranks(6, lambda comm: run_passes(comm, layers, shape, nd.schemes.Auto(latency=1e-4))):
        assert max_relative_difference(actual, expected) < 1e-10


def test_unsupported_layers_join_no_segment():
    layers = [nd.ConvLayerDist(2, 3), nd.LCNLayerDist(3), nd.ConvLayerDist(2, 3), nd.ConvLayerDist(2, 3)]
    plans = nd.ConvnetDist(layers, scheme=nd.schemes.Auto(latency=1.0)).plan((20, 20, 2), nd.GridShape(1, 2, 2))
    assert [plan.halo_cells_by_tile[0] > 0 for plan in plans] == [True, True, True, False]


def test_redundant_time_of_the_largest_tile():
    """Of 7 pooled rows on 2 tiles, the first needs 8 convolution rows instead of 7, the second no more."""
    layers = [nd.ConvLayerDist(2, 3, padding=1), nd.MaxPoolingLayerDist(2)]
    model = nd.ConvnetDist(layers, scheme=nd.schemes.DeepHalo())
    links, grid = list(model.chain.members_with_input_shapes((14, 14, 2))), nd.GridShape(1, 2, 1)
    profile = MachineProfile(bandwidth=1e30, latency=1e-30, samples_per_replica=3, seconds_per_cell={"conv1": 1.0})
    assert overhead_seconds(profile, layers_with_regions(links, grid), grid) == pytest.approx([14 * 3, 0])


def test_error_messages():
    with pytest.raises(ConfigError, match="Auto: speed: expected a number above 0 or null, got 0"):
        nd.schemes.Auto(speed=0)
