"""Convolutions with fewer products against plain ones: NumPy's windows, in float64."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neondist.backends import Kernels
from neondist.backends import cells as cells_module
from neondist.backends.windows import cropped

pytestmark = pytest.mark.skipif(
    not hasattr(cells_module.compiled(), "winograd"), reason="neondist was installed without a C compiler for x86-64"
)
PLAIN = Kernels()


@pytest.fixture(scope="module", autouse=True)
def small_ones_too():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("neondist.backends.compiled_conv._CELLS", 1)
        yield


def in_room(rng, shape, dtype):
    """Return numbers in the middle of a larger array of NaN."""
    room = np.full([n + 3 for n in shape], np.nan, dtype)
    view = room[tuple(slice(1, n + 1) for n in shape)]
    view[...] = rng.normal(size=shape)
    return view


def agree(found, expected, dtype, side=3):
    """Errors of float32 are larger for windows of 5 x 5."""
    tolerance = {np.float64: 1e-13, np.float32: 5e-5 if side == 5 else 2e-5}[dtype]
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * max(1, np.abs(expected).max(initial=0)))


@st.composite
def cases(draw):
    """Draw extents of 2 or 3 axes, depth, channels, and how many cells the gradient is cropped by."""
    axes = draw(st.integers(2, 3))
    kernel = (*((draw(st.integers(1, 4)),) if axes == 3 else ()), *draw(st.sampled_from([(3, 3), (5, 5)])))
    extent = tuple(k + draw(st.integers(0, 6)) for k in kernel)
    channels = st.sampled_from([8, 11, 16, 17, 31, 32, 33, 40, 65])
    sides = tuple((draw(st.integers(0, min(n, 3))), draw(st.integers(0, 3)) if n > 5 else 0) for n in extent)
    return draw(st.integers(1, 3)), extent, kernel, draw(channels), draw(channels), sides


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@settings(max_examples=40, deadline=None)
@given(case=cases(), seed=st.integers(0, 99))
@pytest.mark.long
def test_all_ways_of_a_convolution(kernels, dtype, case, seed):
    samples, extent, kernel, inner, outer, sides = case
    rng, how = np.random.default_rng(seed), ((1,) * len(extent), (1,) * len(extent), 1)
    x = in_room(rng, (samples, *extent, inner), dtype)
    weights, bias = in_room(rng, (*kernel, inner, outer), dtype), rng.normal(size=outer).astype(dtype)
    assert kernels.transforms(x, weights.shape, how)
    expected = PLAIN.conv_forward(*(np.asarray(a, float) for a in (x, weights)), *how, bias)
    agree(kernels.conv_forward(x, weights, *how, bias), expected, dtype, kernel[-1])
    dy = in_room(rng, expected.shape, dtype)
    dx = PLAIN.conv_backward_input(*(np.asarray(a, float) for a in (dy, weights)), extent, *how, sides)
    agree(kernels.conv_backward_input(dy, weights, extent, *how, sides), dx, dtype, kernel[-1])
    dw = PLAIN.conv_backward_weights(*(np.asarray(a, float) for a in (x, dy)), kernel, *how)
    agree(kernels.conv_backward_weights(x, dy, kernel, *how), dw, dtype, kernel[-1])


@pytest.mark.parametrize("shape", [(0, 5, 6, 16), (2, 2, 6, 16), (2, 5, 0, 16), (1, 2, 2, 2, 16)])
def test_nothing(kernels, shape):
    how = (1,) * (len(shape) - 2), (1,) * (len(shape) - 2), 1
    weights = np.ones((*(3,) * (len(shape) - 2), 16, 20))
    y = kernels.conv_forward(np.ones(shape), weights, *how)
    assert y.shape == (shape[0], *(max(0, n - 2) for n in shape[1:-1]), 20)
    assert not kernels.conv_backward_weights(np.ones(shape), y, weights.shape[:-2], *how).any()
    dx = kernels.conv_backward_input(y, weights, shape[1:-1], *how)
    assert dx.shape == shape
    assert not dx.any()


def test_other_convolutions_go_elsewhere(kernels):
    x, one, two = np.ones((1, 8, 8, 16)), (1, 1), (2, 2)
    for shape, how in (
        ((3, 3, 16, 16), (two, one)),
        ((3, 3, 16, 16), (one, two)),
        ((3, 3, 4, 16), (one, one)),
        ((5, 3, 16, 16), (one, one)),
        ((7, 7, 16, 16), (one, one)),
        ((3, 5, 16, 16), (one, one)),
        ((3, 3, 512, 512), (one, one)),
    ):
        assert not kernels.transforms(x, shape, (*how, 1))


def test_arrays_that_it_cannot_take_are_refused(kernels):
    """Channels apart, other dtypes or shapes: the caller does it otherwise."""
    x, w, y = np.ones((2, 7, 8, 16)), np.ones((3, 3, 16, 20)), np.zeros((2, 5, 6, 20))
    run = partial(kernels.compiled.winograd, False)
    rest = None, (0, 0, 0), 1, 0
    assert run(x, w, y, *rest)
    apart = np.ones((2, 7, 8, 32))[..., ::2]
    for arrays in (
        (apart, w, y),
        (x, w, np.zeros((2, 5, 6, 40))[..., ::2]),
        (x.astype(np.float32), w, y),
        (x, w.astype(np.float32), y),
        (x, w, np.zeros((1, 5, 6, 20))),
        (x, w[..., :19], y),
        (x, w[:2], y),
        (x[..., :3], w[:, :, :3], y),  # fewer than a vector's
        (x.astype(int), w.astype(int), y.astype(int)),
    ):
        assert not run(*arrays, *rest)
    how = (1, 1), (1, 1), 1
    agree(kernels.conv_forward(apart, w, *how), PLAIN.conv_forward(apart, w, *how), np.float64)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("strip", [1, 2000, 1 << 20])
@settings(max_examples=10, deadline=None)
@given(case=cases(), apart=st.booleans())
@pytest.mark.long
def test_strips_join_to_the_whole(kernels, dtype, strip, case, apart):
    """In place, whatever is beside; if channels are apart, the table does it."""
    samples, extent, kernel, inner, outer, sides = case
    rng, how = np.random.default_rng(0), ((1,) * len(extent), (1,) * len(extent), 1)
    x, bias = np.zeros((samples, *extent, inner), dtype), rng.normal(size=outer).astype(dtype)
    cropped(x, sides)[...] = rng.normal(size=cropped(x, sides).shape)
    weights = rng.normal(size=(*kernel, inner, outer)).astype(dtype)
    z = PLAIN.conv_forward(x.astype(float), weights.astype(float), *how, bias)
    y = in_room(rng, (*z.shape[:-1], 2 * outer), dtype)[..., :: 1 + apart][..., :outer]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "strip", strip)
        kernels.conv_into(y, x, weights, *how, bias, kernels.relu, sides)
        agree(y, np.maximum(z, 0), dtype, kernel[-1])
        dy, dx = in_room(rng, y.shape, dtype), in_room(rng, (*x.shape[:-1], 2 * inner), dtype)[..., :: 1 + apart]
        dx, dz = dx[..., :inner], dy * (y > 0)
        begin = lambda part: kernels.relu_backward(y[part], dy[part])  # noqa: E731
        found = kernels.conv_back_into(dx, x, dy, weights, *how, begin, sides)
        over = x.copy()
        again = kernels.conv_back_into(over, over, dy, weights, *how, begin, sides, True, True)
    agree(found[0], PLAIN.conv_backward_weights(x.astype(float), dz.astype(float), kernel, *how), dtype, kernel[-1])
    agree(found[1], dz.sum(axis=tuple(range(dz.ndim - 1)), dtype=float), dtype, kernel[-1])
    whole = PLAIN.conv_backward_input(dz.astype(float), weights.astype(float), extent, *how)
    agree(cropped(dx, sides), cropped(whole, sides), dtype, kernel[-1])
    assert np.isfinite(dx).all()
    agree(again[0], found[0], dtype, kernel[-1])
    agree(cropped(over, sides), cropped(dx * (x > 0), sides), dtype, kernel[-1])


def test_the_same_numbers_whatever_is_beside_them(kernels):
    """A tile's result does not depend on how many there are."""
    rng, how = np.random.default_rng(0), ((1, 1), (1, 1), 1)
    x, w = rng.normal(size=(3, 42, 46, 32)), rng.normal(size=(3, 3, 32, 48))
    y = kernels.conv_forward(x, w, *how)
    np.testing.assert_array_equal(kernels.conv_forward(x[1:2, 4:20, 6:30], w, *how), y[1:2, 4:18, 6:28])
    first, again = (kernels.conv_backward_weights(x, y, (3, 3), *how) for _ in range(2))
    np.testing.assert_array_equal(first, again)


@pytest.mark.parametrize("channels", [64, 256])
@pytest.mark.parametrize(("side", "forward", "by_weights"), [(3, 3, 4), (5, 10, 12)])
def test_errors_are_those_of_short_sums(kernels, channels, side, forward, by_weights):
    """Of float32: at most so many times those of what is summed directly."""
    rng, how = np.random.default_rng(0), ((1, 1), (1, 1), 1)
    x = rng.normal(size=(1, 20, 20, channels)).astype(np.float32)
    w = (rng.normal(size=(side, side, channels, 32)) / (side * np.sqrt(channels))).astype(np.float32)
    y = PLAIN.conv_forward(x.astype(float), w.astype(float), *how)
    error, plain = (np.sqrt(np.mean((k.conv_forward(x, w, *how) - y) ** 2)) for k in (kernels, PLAIN))
    assert error < forward * plain
    dw = PLAIN.conv_backward_weights(x.astype(float), y, (side, side), *how)
    dy = y.astype(np.float32)
    error, plain = (
        np.sqrt(np.mean((k.conv_backward_weights(x, dy, (side, side), *how) - dw) ** 2)) for k in (kernels, PLAIN)
    )
    assert error < by_weights * plain


def test_not_a_number_stays_so(kernels):
    x, w = np.ones((1, 6, 6, 16)), np.ones((3, 3, 16, 16))
    x[0, 2, 2, 3] = np.nan
    y = np.zeros((1, 4, 4, 16))
    assert kernels.compiled.winograd(False, x, w, y, None, (0, 0, 0), 1, 0)
    assert np.isnan(y[0, :3, :3]).all()
