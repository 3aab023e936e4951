"""Compiled max pooling against NumPy's and PyTorch's."""

from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neondist.backends import Kernels
from neondist.backends import cells as cells_module

pytestmark = pytest.mark.skipif(cells_module.compiled() is None, reason="neondist was installed without a C compiler")
REFERENCE = Kernels()


def placed(array, layout):
    """Return the same numbers in the middle of a larger array of NaN, or with an axis turned round."""
    if layout == "whole":
        return array
    wide = layout == "cells"
    room = np.full([n + 3 for n in array.shape[:-1]] + [array.shape[-1] + wide], np.nan, array.dtype)
    view = room[(*(slice(1, n + 1) for n in array.shape[:-1]), slice(0, array.shape[-1]))]
    if layout == "backwards":
        view = view[:, ::-1]
    view[...] = array
    return view


@st.composite
def cases(draw):
    ndim = draw(st.integers(1, 3))
    axes = st.lists(st.integers(1, 4), min_size=ndim, max_size=ndim)
    kernel, stride = draw(axes), draw(axes)
    extent = [draw(st.integers(0, 3 * k + 3)) for k in kernel]
    channels = draw(st.one_of(st.integers(0, 9), st.sampled_from([15, 16, 17, 24, 33, 520, 1100])))
    if channels > 100:
        extent = [min(n, 4) for n in extent]
    return (draw(st.integers(0, 3)), *extent, channels), tuple(kernel), tuple(stride)


LAYOUTS = st.sampled_from(["whole", "rows", "cells", "backwards"])


def check(kernels, x, kernel, stride, layouts=("whole",) * 4):
    out = tuple(max(0, (n - k) // s + 1) for n, k, s in zip(x.shape[1:-1], kernel, stride, strict=True))
    expected, place = REFERENCE.max_pool(x, kernel, stride)
    shape = (len(x), *out, x.shape[-1])
    y, dy = (placed(np.full(shape, 7, x.dtype), layout) for layout in layouts[:2])
    around = y.base
    before = None if around is None else np.isnan(around).sum()
    found = kernels.max_pool_into(y, placed(x, layouts[2]), kernel, stride)
    assert found.dtype == np.uint8
    np.testing.assert_array_equal(y, expected)
    np.testing.assert_array_equal(found, place)
    assert before is None or np.isnan(around).sum() == before
    dy[...] = np.random.default_rng(1).integers(-9, 9, shape)
    dx = placed(np.full(x.shape, 7, x.dtype), layouts[3])
    kernels.max_pool_back_into(dx, dy, found, kernel, stride)
    np.testing.assert_array_equal(dx, REFERENCE.max_pool_backward(dy, place, x.shape[1:-1], kernel, stride))
    if dx.base is not None:
        assert np.isnan(dx.base).sum() == dx.base.size - dx.size
    for each in (kernels, REFERENCE):  # what is not positive gets no gradient
        places = each.max_pool_into(y, x, kernel, stride, clears=True)
        cleared = np.full(x.shape, 7, x.dtype)
        each.max_pool_back_into(cleared, dy, places, kernel, stride)
        kept = dy * (expected > 0)
        np.testing.assert_array_equal(cleared, REFERENCE.max_pool_backward(kept, place, x.shape[1:-1], kernel, stride))


@given(cases(), st.tuples(*(LAYOUTS,) * 4), st.sampled_from(["float32", "float64"]), st.booleans())
@settings(max_examples=120, deadline=None)
def test_equals_the_reference(kernels, case, layouts, dtype, ties):
    """Also where kernels are longer than strides and the other way round, and where padding is all that is seen."""
    shape, kernel, stride = case
    rng = np.random.default_rng(prod(shape) + len(shape))
    x = rng.choice([-np.inf, 0, -0.0, 1, np.inf], shape) if ties else rng.normal(size=shape)
    check(kernels, x.astype(dtype), kernel, stride, layouts)


@pytest.mark.parametrize(
    "shape", [(3, 40, 41, 16), (2, 9, 70, 130), (1, 12, 13, 14, 30), (2, 30000, 2), (5, 90, 3, 70)]
)
@pytest.mark.parametrize(("k", "s"), [(2, 2), (3, 2), (3, 1), (2, 3), (4, 4)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.long
def test_arrays_large_enough_for_threads(kernels, shape, k, s, dtype):
    axes = len(shape) - 2
    check(kernels, np.random.default_rng(0).normal(size=shape).astype(dtype), (k,) * axes, (s,) * axes)


def test_windows_of_256_cells(kernels):
    x = np.sort(np.random.default_rng(0).normal(size=(1, 20 * 19, 1)), axis=1).reshape(1, 20, 19, 1)
    check(kernels, x, (16, 16), (1, 1))
    check(kernels, x, (19, 13), (2, 3))
    assert not kernels._max_pool(False, x, x[:, :4, :3], np.empty((1, 4, 3, 1), "uint8"), (17, 17), (1, 1))


@pytest.mark.parametrize("channels", [1, 8, 19, 64])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_what_is_no_number_wins_as_in_pytorch(kernels, channels, dtype):
    """Of several the last has the gradient."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    x = rng.choice([np.nan, -np.inf, 1, 2], (2, 9, 11, channels), p=[0.3, 0.3, 0.2, 0.2]).astype(dtype)
    for kernel, stride in [((2, 2), (2, 2)), ((3, 4), (2, 1))]:
        wanted = torch.from_numpy(x).movedim(-1, 1).clone().requires_grad_()
        pooled = torch.nn.functional.max_pool2d(wanted, kernel, stride)
        y = np.empty(pooled.movedim(1, -1).shape, dtype)
        dy, dx = rng.integers(-9, 9, y.shape).astype(dtype), np.empty_like(x)
        places = kernels.max_pool_into(y, x, kernel, stride)
        np.testing.assert_array_equal(y, pooled.detach().movedim(1, -1).numpy())
        kernels.max_pool_back_into(dx, dy, places, kernel, stride)
        pooled.backward(torch.from_numpy(dy).movedim(-1, 1))
        np.testing.assert_array_equal(dx, wanted.grad.movedim(1, -1).numpy())


def test_what_it_cannot_have(kernels):
    """Other types go another way; cells that are not in one piece, on the way back, through a copy."""
    x = np.random.default_rng(0).normal(size=(2, 6, 6, 4))
    half, y = x.astype("float16"), np.empty((2, 3, 3, 4), "float16")
    places = kernels.max_pool_into(y, half, (2, 2), (2, 2))
    dx = np.full_like(half, 7)
    kernels.max_pool_back_into(dx, np.ones_like(y), places, (2, 2), (2, 2))
    assert dx.sum() == y.size
    y = np.empty((2, 3, 3, 4))
    places = kernels.max_pool_into(y, x, (2, 2), (2, 2))
    turned = np.empty((2, 4, 6, 6)).transpose(0, 2, 3, 1)
    kernels.max_pool_back_into(turned, y[::-1, ..., ::-1], places, (2, 2), (2, 2))
    again = np.empty_like(x)
    kernels.max_pool_back_into(again, y[::-1, ..., ::-1].copy(), places, (2, 2), (2, 2))
    np.testing.assert_array_equal(turned, again)
    for other in x.astype("float32"), x[:, :2], x[..., :3]:
        assert not kernels._max_pool(False, x, other, np.empty(other.shape, "uint8"), (2, 2), (2, 2))
    assert not kernels._max_pool(False, x, y, places, (2,), (2,))
    assert not kernels._max_pool(False, x, y, places, (2, 2), (2, 0))
