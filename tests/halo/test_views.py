"""Views and their adjoint on virtual ranks, for random windows."""

from copy import copy

import numpy as np
import pytest
from common_checks import check_views, window_fits
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from window_strategies import windows

import neondist as nd
from neondist.comm import loopback
from neondist.errors import ConfigError, ShapeError
from neondist.geometry import HaloPlan


def check_on_ranks(extent, window, parts):
    rows, cols, planes = parts

    def job(comm):
        return check_views(nd.ProcessGrid(comm, rows=rows, cols=cols, planes=planes), extent, window)

    return loopback.run(rows * cols * planes, job)


@given(windows(), st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 2)))
@settings(max_examples=60, deadline=None)
@pytest.mark.long
def test_views_and_dot_test(case, parts):
    extent, window = case
    assume(window_fits(extent, window))
    check_on_ranks(extent, window, parts)


HARD_CASES = {
    "halo wider than a tile": ((9, 9), nd.Window(7, padding=3), (4, 2, 1)),
    "fewer cells than ranks": ((3, 2), nd.Window(3, padding=1), (4, 3, 1)),
    "even kernel": ((8, 7), nd.Window((2, 4), padding=((1, 0), (2, 1))), (3, 2, 1)),
    "stride out of phase": ((28, 28), nd.Window(3, stride=2, padding=1), (3, 2, 1)),
    "asymmetric padding": ((7, 7), nd.Window(3, padding=((0, 2), (2, 0))), (4, 1, 1)),
    "stride larger than the kernel": ((11, 10), nd.Window(1, stride=3, padding=0), (3, 3, 1)),
    "reflect": ((9, 8), nd.Window(5, padding=4, mode="reflect"), (4, 2, 1)),
    "replicate": ((5, 4), nd.Window(5, padding=4, mode="replicate"), (3, 2, 1)),
    "repeated wrap": ((3, 2), nd.Window(3, padding=7, mode="wrap"), (2, 2, 1)),
    "zeros on rows, wrap on columns": ((6, 7), nd.Window(5, padding=3, mode=("zeros", "wrap")), (3, 2, 1)),
    "mixed modes": ((5, 4, 6), nd.Window(3, padding=2, mode=("wrap", "zeros", "reflect")), (2, 2, 2)),
    "tiles of padding only": ((8, 4), nd.Window(3, padding=((1, 1), (6, 6))), (1, 7, 1)),
    "volume": ((4, 5, 6), nd.Window(3, padding=1, ndim=3), (2, 3, 2)),
    "one axis": ((9,), nd.Window(3, padding=1, ndim=1), (2, 2, 1)),
}


@pytest.mark.parametrize("case", HARD_CASES.values(), ids=HARD_CASES.keys())
def test_hard_cases(case):
    arrays = check_on_ranks(*case)
    assert sum(ga.bytes_sent for ga in arrays) == 4 * sum(
        cells * 2 * 2 * 8 for ga in arrays for cells in [ga.plan.sent_cells]
    )  # two rounds, two directions; 2 samples, 2 channels, 8 bytes


@pytest.mark.parametrize("case", HARD_CASES.values(), ids=HARD_CASES.keys())
def test_outside_counts_padding_cells(case):
    extent, window, parts = case
    names = ("rows", "cols", "planes")

    def check(comm):
        grid = nd.ProcessGrid(comm, **dict(zip(names, parts, strict=True)))
        ga = nd.GlobalArray(grid, (1, *extent, 1), window)
        if window.mode != "zeros":
            assert ga.zero_padding_cells is None
            return
        image = ga.get_fprop_view(np.ones(ga.local_shape, "float32")) != 0
        assert all(
            min(sides) >= 0 and sum(sides) <= n
            for sides, n in zip(ga.zero_padding_cells, image.shape[1:-1], strict=True)
        )
        inside = [
            slice(before, n - after)
            for (before, after), n in zip(ga.zero_padding_cells, image.shape[1:-1], strict=True)
        ]
        assert image[(0, *inside)].all()
        assert image.sum() == image[(0, *inside)].size

    loopback.run(parts[0] * parts[1] * parts[2], check)


def drop_pieces(keep):
    """Return a plan constructor that drops received pieces, at both ends, unless keep(plan, piece)."""
    build = HaloPlan.of.__func__

    def build_truncated(cls, partition, window, tile, outputs=None):
        plans = [build(cls, partition, window, t) for t in range(partition.tiles)]
        plan = copy(plans[tile])  # the original is shared
        receives = tuple(p for p in plan.receives if keep(plan, p))
        sends = tuple(p for p in plan.sends if keep(plans[p.peer], p))
        object.__setattr__(plan, "_pieces", (receives, sends, plan.local))
        for name in ("receives", "sends"):
            vars(plan).pop(name, None)
        return plan

    return classmethod(build_truncated)


def is_corner(plan, piece):
    return all(
        piece.source.ranges[a].stop <= plan.own.lo[a] or piece.source.ranges[a].start >= plan.own.hi[a]
        for a in range(2)
    )


@pytest.mark.parametrize(
    ("name", "keep"),
    [
        ("corner", lambda plan, piece: not is_corner(plan, piece)),
        ("preceding side", lambda plan, piece: piece.source.ranges[0].start >= plan.own.lo[0]),
        ("following side", lambda plan, piece: piece.source.ranges[1].stop <= plan.own.hi[1]),
    ],
)
def test_missing_halo_pieces_are_detected(monkeypatch, name, keep):
    monkeypatch.setattr(HaloPlan, "of", drop_pieces(keep))
    with pytest.raises(AssertionError):
        check_on_ranks((8, 8), nd.Window(3, padding=1), (2, 2, 1))


@pytest.mark.parametrize("mistake", ["ignores", "overwrites"])
def test_non_additive_adjoint_is_detected(monkeypatch, mistake):
    from neondist.halo import HaloExchange

    def overwrite(self, messages):
        for (_, own), cells in zip(self.receives, messages, strict=True):
            self.array[own] = cells

    monkeypatch.setattr(HaloExchange, "unpack", overwrite if mistake == "overwrites" else lambda self, messages: None)
    with pytest.raises(AssertionError):
        check_on_ranks((8, 8), nd.Window(3, padding=1), (2, 2, 1))


def test_views_are_new_arrays_unless_reused():
    x = np.ones((1, 4, 4, 1), np.float32)
    fresh = nd.SerialArray(x.shape, nd.Window())
    first = fresh.get_fprop_view(x)
    fresh.get_fprop_view(x + 1)
    assert first.max() == 1
    assert nd.SerialArray(x.shape).get_fprop_view(x) is not x
    reused = nd.SerialArray(x.shape, nd.Window(), reuse=True)
    assert np.shares_memory(reused.get_fprop_view(x), reused.get_fprop_view(x))


def test_padded_array_equals_numpy():
    check_views(nd.ProcessGrid.serial(), (5, 6), nd.Window(3, padding=2, mode="reflect"))


def test_error_messages():
    ga = nd.SerialArray((2, 5, 5, 1), nd.Window())
    with pytest.raises(ShapeError, match=r"tile of shape \(2, 5, 4, 1\).*expects \(n, 5, 5, 1\)"):
        ga.get_fprop_view(np.zeros((2, 5, 4, 1)))
    with pytest.raises(ShapeError, match="expected"):
        ga.scatter(np.zeros((2, 6, 5, 1)))
    with pytest.raises(ShapeError, match="spans 9 cells"):
        nd.SerialArray((2, 5, 5, 1), nd.Window(9))
    with pytest.raises(ConfigError, match="did you mean 'numpy'"):
        nd.SerialArray((2, 5, 5, 1), backend="nunpy")
    with pytest.raises(ConfigError, match="dtype: 'float31' is not a NumPy dtype"):
        nd.SerialArray((2, 5, 5, 1), dtype="float31")


@pytest.mark.parametrize("dtype", [">f4", ">f8", ">i4"])
def test_views_have_native_byte_order(dtype):
    """MPI libraries exchange no swapped bytes."""
    array = np.arange(30).reshape(1, 6, 5, 1).astype(dtype)

    def run(comm):
        tiled = nd.GlobalArray(nd.ProcessGrid(comm), array.shape, nd.Window(3, padding=1), dtype=dtype)
        tile = tiled.scatter(array)
        return tile.dtype, tiled.get_fprop_view(tile).dtype, tiled.gather(tile)

    for *dtypes, whole in loopback.run(2, run):
        assert dtypes == [array.dtype.newbyteorder("=")] * 2
        np.testing.assert_array_equal(whole, array)
