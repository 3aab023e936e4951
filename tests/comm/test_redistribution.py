"""Arrays that are cut anew, over virtual ranks."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import check_redistribution

from neondist.comm import ProcessGrid, Redistribution, Reductions, loopback
from neondist.geometry import Box
from neondist.geometry.split import factorisations


@st.composite
def cuts(draw):
    """Ranks, an array, how it is cut before and after - tiles, one axis, whole, on one rank - and axes in front."""
    ranks, ndim = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    shape = tuple(draw(st.integers(0, 7)) for _ in range(ndim))
    used = draw(st.integers(1, ranks))
    ways = st.sampled_from([*factorisations(used, ndim), *factorisations(ranks, ndim), "whole", "first"])
    return ranks, shape, draw(ways), draw(ways), draw(st.sampled_from([(), (2,), (2, 3), (0,)]))


@settings(max_examples=150, deadline=None)
@given(cuts())
@pytest.mark.long
def test_cells_arrive_and_come_back_and_the_adjoint_adds(drawn):
    ranks, *how = drawn
    loopback.run(ranks, lambda comm: check_redistribution(ProcessGrid(comm), *how))


def test_what_nobody_holds_is_zero():
    loopback.run(3, lambda comm: check_redistribution(ProcessGrid(comm), (4, 5), "none", (3, 1)))


def test_a_whole_array_comes_from_no_other_rank():
    def body(comm):
        plan = check_redistribution(ProcessGrid(comm), (6, 5), "whole", (2, 2)).plan
        return len(plan.sends), len(plan.receives)

    assert loopback.run(4, body) == [(0, 0)] * 4


def test_those_who_hold_the_same_share_the_work():
    """Two hold all, four need all: each of the two sends to one of the others."""

    def body(comm):
        everything, nothing = Box.of((5,)), Box((0,), (0,))
        log, held = Reductions(ProcessGrid(comm)), [everything, everything, nothing, nothing]
        moves = Redistribution(partial(log.all_to_all, "world"), comm.rank, held, [everything] * 4)
        x = np.arange(5.0) if comm.rank < 2 else np.empty(0)
        np.testing.assert_array_equal(moves.forward(x), np.arange(5.0))
        return [piece.peer for piece in moves.plan.sends], log.bytes_reduced

    assert loopback.run(4, body) == [([2], 40), ([3], 40), ([], 0), ([], 0)]


def test_shards_become_whole_and_partial_sums_become_shards():
    """An allgather, and its adjoint, a reduce-scatter, in the order of the ranks."""

    def body(comm):
        shards = [Box((lo,), (hi,)) for lo, hi in ((0, 3), (3, 5), (5, 7))]
        moves = Redistribution(comm.all_to_all, comm.rank, shards, [Box.of((7,))] * 3)
        whole = np.arange(14.0).reshape(2, 7)
        np.testing.assert_array_equal(moves.forward(whole[(..., *shards[comm.rank].slices)]), whole)
        return moves.adjoint(whole * 0.1 ** np.float64(comm.rank))

    parts = np.concatenate(loopback.run(3, body), axis=1)
    whole = np.arange(14.0).reshape(2, 7)
    np.testing.assert_array_equal(parts, whole * 0.1**0 + whole * 0.1 ** np.float64(1) + whole * 0.1 ** np.float64(2))
