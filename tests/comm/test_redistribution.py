"""Redistribution of arrays over virtual ranks."""

from functools import partial

import numpy as np
import pytest
from common_checks import check_redistribution
from hypothesis import given, settings
from hypothesis import strategies as st

from neondist.comm import ProcessGrid, Redistribution, Reductions, loopback
from neondist.geometry import Box
from neondist.geometry.partition import factorisations


@st.composite
def draw_layouts(draw):
    """Draw ranks, a shape, layouts before and after (tiles, one axis, replicated, on one rank), and leading axes."""
    ranks, ndim = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    shape = tuple(draw(st.integers(0, 7)) for _ in range(ndim))
    used = draw(st.integers(1, ranks))
    layouts = st.sampled_from([*factorisations(used, ndim), *factorisations(ranks, ndim), "whole", "first"])
    return ranks, shape, draw(layouts), draw(layouts), draw(st.sampled_from([(), (2,), (2, 3), (0,)]))


@settings(max_examples=150, deadline=None)
@given(draw_layouts())
@pytest.mark.long
def test_forward_backward_and_adjoint(case):
    ranks, *layouts = case
    loopback.run(ranks, lambda comm: check_redistribution(ProcessGrid(comm), *layouts))


def test_cells_without_an_owner_are_zero():
    loopback.run(3, lambda comm: check_redistribution(ProcessGrid(comm), (4, 5), "none", (3, 1)))


def test_replicated_arrays_need_no_messages():
    def run_rank(comm):
        plan = check_redistribution(ProcessGrid(comm), (6, 5), "whole", (2, 2)).plan
        return len(plan.sends), len(plan.receives)

    assert loopback.run(4, run_rank) == [(0, 0)] * 4


def test_owners_of_the_same_cells_share_the_messages():
    """Replicate an array of two ranks on four: each owner sends to one other rank."""

    def run_rank(comm):
        full, empty = Box.of((5,)), Box((0,), (0,))
        log, owned = Reductions(ProcessGrid(comm)), [full, full, empty, empty]
        moves = Redistribution(partial(log.all_to_all, "world"), comm.rank, owned, [full] * 4)
        x = np.arange(5.0) if comm.rank < 2 else np.empty(0)
        np.testing.assert_array_equal(moves.forward(x), np.arange(5.0))
        return [piece.peer for piece in moves.plan.sends], log.bytes_reduced

    assert loopback.run(4, run_rank) == [([2], 40), ([3], 40), ([], 0), ([], 0)]


def test_allgather_and_reduce_scatter():
    """Gather shards, and sum partial results into shards in the order of the ranks."""

    def run_rank(comm):
        shards = [Box((lo,), (hi,)) for lo, hi in ((0, 3), (3, 5), (5, 7))]
        moves = Redistribution(comm.all_to_all, comm.rank, shards, [Box.of((7,))] * 3)
        array = np.arange(14.0).reshape(2, 7)
        np.testing.assert_array_equal(moves.forward(array[(..., *shards[comm.rank].slices)]), array)
        return moves.adjoint(array * 0.1 ** np.float64(comm.rank))

    parts = np.concatenate(loopback.run(3, run_rank), axis=1)
    array = np.arange(14.0).reshape(2, 7)
    np.testing.assert_array_equal(parts, array * 0.1**0 + array * 0.1 ** np.float64(1) + array * 0.1 ** np.float64(2))
