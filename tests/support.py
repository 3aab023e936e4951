"""Oracles that several tests share: what one process would see, and sums over ranks."""

from __future__ import annotations

import numpy as np

import neondist as nd
from neondist.errors import UserError
from neondist.geometry import GridShape

PAD_MODE = {"zeros": "constant", "reflect": "reflect", "replicate": "edge", "wrap": "wrap"}


def padded_whole(whole, window):
    """The whole image with its padding, by NumPy."""
    extra = {"constant_values": window.fill} if window.mode == "zeros" else {}
    return np.pad(whole, [(0, 0), *window.padding, (0, 0)], mode=PAD_MODE[window.mode], **extra)


def expected_view(whole, window, need):
    """The part of the padded image that a tile needs."""
    before = [p for p, _ in window.padding]
    return padded_whole(whole, window)[(slice(None), *need.shift(before).slices, slice(None))]


def check_views(grid, extent, window, samples=2, channels=2):
    """Views equal the padded image; the adjoint passes the dot test; both, over all ranks of `grid`."""
    rng = np.random.default_rng(7)
    whole = rng.normal(size=(samples, *extent, channels))
    ga = nd.GlobalArray(grid, whole.shape, window, dtype="float64")
    for _ in range(2):  # a second round finds what a reused buffer left behind
        tile = ga.scatter(whole)
        view = ga.get_fprop_view(tile)
        assert view.shape == ga.view_shape
        np.testing.assert_array_equal(view, expected_view(whole, window, ga.need))
        dview = np.random.default_rng(grid.rank).normal(size=view.shape)
        dx = ga.get_bprop_view(dview)
        assert dx.shape == ga.local_shape
        left = np.sum((view * dview)[inside(ga, view)])
        sums = np.array([left, np.sum(tile * dx), np.sum(np.abs(tile * dx))])
        grid.world.allreduce(sums)
        assert abs(sums[0] - sums[1]) <= 1e-12 * max(1.0, sums[2])
        np.testing.assert_array_equal(ga.gather(tile), whole)
        whole = -whole
    return ga


def inside(ga, view):
    """Cells of the view that depend on the image: all, unless padding is a constant."""
    if ga.window.mode != "zeros":
        return np.ones(view.shape, bool)
    mask = np.ones(view.shape, bool)
    for axis, ((lo, hi), n) in enumerate(zip(ga.need.axes(), ga.extent, strict=True), start=1):
        cells = np.arange(lo, max(lo, hi))
        shape = [1] * view.ndim
        shape[axis] = -1
        mask &= ((cells >= 0) & (cells < n)).reshape(shape)
    return mask


def slides(shape, window):
    """Whether the window can slide over the shape."""
    try:
        window.check(shape)
    except UserError:
        return False
    return True


def grids(size):
    """Every rows x cols of `size` ranks."""
    return [GridShape(1, r, size // r) for r in range(1, size + 1) if size % r == 0]


def worst(found, expected):
    """The largest relative difference of two dicts of arrays."""
    assert found.keys() == expected.keys()
    return max(
        float(np.abs(found[k] - expected[k]).max(initial=0) / max(np.abs(expected[k]).max(initial=0), 1e-300))
        for k in expected
    )
