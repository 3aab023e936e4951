"""Winograd convolutions compared with the reference in float64."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_arrays import assert_close, draw_padded

from neondist.backends import Kernels
from neondist.backends import cells as cells_module
from neondist.backends.windows import crop_borders

pytestmark = pytest.mark.skipif(
    not hasattr(cells_module.load_compiled_kernels(), "winograd"),
    reason="neondist was installed without a C compiler for x86-64",
)
REFERENCE = Kernels()


@pytest.fixture(scope="module", autouse=True)
def transform_small_inputs():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("neondist.backends.compiled_conv._MIN_WINOGRAD_CELLS", 1)
        yield


@st.composite
def cases(draw):
    """Draw samples, extent and kernel of 2 or 3 axes, channels, and the cropping of the gradient."""
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
def test_convolution_and_gradients(kernels, dtype, case, seed):
    samples, extent, kernel, inner, outer, sides = case
    rng, options = np.random.default_rng(seed), ((1,) * len(extent), (1,) * len(extent), 1)
    x = draw_padded(rng, (samples, *extent, inner), dtype)
    weights, bias = draw_padded(rng, (*kernel, inner, outer), dtype), rng.normal(size=outer).astype(dtype)
    assert kernels.uses_winograd_kernel(x, weights.shape, options)
    expected = REFERENCE.conv_forward(*(np.asarray(a, float) for a in (x, weights)), *options, bias)
    assert_close(kernels.conv_forward(x, weights, *options, bias), expected, dtype, kernel[-1])
    dy = draw_padded(rng, expected.shape, dtype)
    dx = REFERENCE.conv_backward_input(*(np.asarray(a, float) for a in (dy, weights)), extent, *options, sides)
    assert_close(kernels.conv_backward_input(dy, weights, extent, *options, sides), dx, dtype, kernel[-1])
    dw = REFERENCE.conv_backward_weights(*(np.asarray(a, float) for a in (x, dy)), kernel, *options)
    assert_close(kernels.conv_backward_weights(x, dy, kernel, *options), dw, dtype, kernel[-1])


@pytest.mark.parametrize("shape", [(0, 5, 6, 16), (2, 2, 6, 16), (2, 5, 0, 16), (1, 2, 2, 2, 16)])
def test_empty_extents(kernels, shape):
    options = (1,) * (len(shape) - 2), (1,) * (len(shape) - 2), 1
    weights = np.ones((*(3,) * (len(shape) - 2), 16, 20))
    y = kernels.conv_forward(np.ones(shape), weights, *options)
    assert y.shape == (shape[0], *(max(0, n - 2) for n in shape[1:-1]), 20)
    assert not kernels.conv_backward_weights(np.ones(shape), y, weights.shape[:-2], *options).any()
    dx = kernels.conv_backward_input(y, weights, shape[1:-1], *options)
    assert dx.shape == shape
    assert not dx.any()


def test_unsupported_convolutions(kernels):
    x, ones, twos = np.ones((1, 8, 8, 16)), (1, 1), (2, 2)
    for shape, options in (
        ((3, 3, 16, 16), (twos, ones)),
        ((3, 3, 16, 16), (ones, twos)),
        ((3, 3, 4, 16), (ones, ones)),
        ((5, 3, 16, 16), (ones, ones)),
        ((7, 7, 16, 16), (ones, ones)),
        ((3, 5, 16, 16), (ones, ones)),
        ((3, 3, 512, 512), (ones, ones)),
    ):
        assert not kernels.uses_winograd_kernel(x, shape, (*options, 1))


def test_unsupported_arrays(kernels):
    """Leave strided channels, other dtypes and other shapes to the fallback."""
    x, w, y = np.ones((2, 7, 8, 16)), np.ones((3, 3, 16, 20)), np.zeros((2, 5, 6, 20))
    run = partial(kernels.compiled.winograd, False)
    arguments = None, (0, 0, 0), 1, 0
    assert run(x, w, y, *arguments)
    strided = np.ones((2, 7, 8, 32))[..., ::2]
    for arrays in (
        (strided, w, y),
        (x, w, np.zeros((2, 5, 6, 40))[..., ::2]),
        (x.astype(np.float32), w, y),
        (x, w.astype(np.float32), y),
        (x, w, np.zeros((1, 5, 6, 20))),
        (x, w[..., :19], y),
        (x, w[:2], y),
        (x[..., :3], w[:, :, :3], y),  # less than a vector
        (x.astype(int), w.astype(int), y.astype(int)),
    ):
        assert not run(*arrays, *arguments)
    options = (1, 1), (1, 1), 1
    assert_close(kernels.conv_forward(strided, w, *options), REFERENCE.conv_forward(strided, w, *options), np.float64)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("strip", [1, 2000, 1 << 20])
@settings(max_examples=10, deadline=None)
@given(case=cases(), strided=st.booleans())
@pytest.mark.long
def test_strips_match_complete_convolutions(kernels, dtype, strip, case, strided):
    """Compute in place inside larger arrays; strided channels use the fallback."""
    samples, extent, kernel, inner, outer, sides = case
    rng, options = np.random.default_rng(0), ((1,) * len(extent), (1,) * len(extent), 1)
    x, bias = np.zeros((samples, *extent, inner), dtype), rng.normal(size=outer).astype(dtype)
    crop_borders(x, sides)[...] = rng.normal(size=crop_borders(x, sides).shape)
    weights = rng.normal(size=(*kernel, inner, outer)).astype(dtype)
    z = REFERENCE.conv_forward(x.astype(float), weights.astype(float), *options, bias)
    y = draw_padded(rng, (*z.shape[:-1], 2 * outer), dtype)[..., :: 1 + strided][..., :outer]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "strip_elements", strip)
        kernels.conv_into(y, x, weights, *options, bias, kernels.relu, sides)
        assert_close(y, np.maximum(z, 0), dtype, kernel[-1])
        dy, dx = (
            draw_padded(rng, y.shape, dtype),
            draw_padded(rng, (*x.shape[:-1], 2 * inner), dtype)[..., :: 1 + strided],
        )
        dx, dz = dx[..., :inner], dy * (y > 0)
        backward_part = lambda part: kernels.relu_backward(y[part], dy[part])  # noqa: E731
        gradients = kernels.conv_backward_into(dx, x, dy, weights, *options, backward_part, sides)
        in_place = x.copy()
        in_place_gradients = kernels.conv_backward_into(
            in_place, in_place, dy, weights, *options, backward_part, sides, True, True
        )
    assert_close(
        gradients[0],
        REFERENCE.conv_backward_weights(x.astype(float), dz.astype(float), kernel, *options),
        dtype,
        kernel[-1],
    )
    assert_close(gradients[1], dz.sum(axis=tuple(range(dz.ndim - 1)), dtype=float), dtype, kernel[-1])
    input_gradient = REFERENCE.conv_backward_input(dz.astype(float), weights.astype(float), extent, *options)
    assert_close(crop_borders(dx, sides), crop_borders(input_gradient, sides), dtype, kernel[-1])
    assert np.isfinite(dx).all()
    assert_close(in_place_gradients[0], gradients[0], dtype, kernel[-1])
    assert_close(crop_borders(in_place, sides), crop_borders(dx * (x > 0), sides), dtype, kernel[-1])


def test_results_are_independent_of_neighbours(kernels):
    """Check that the result of a tile does not depend on the number of tiles."""
    rng, options = np.random.default_rng(0), ((1, 1), (1, 1), 1)
    x, w = rng.normal(size=(3, 42, 46, 32)), rng.normal(size=(3, 3, 32, 48))
    y = kernels.conv_forward(x, w, *options)
    np.testing.assert_array_equal(kernels.conv_forward(x[1:2, 4:20, 6:30], w, *options), y[1:2, 4:18, 6:28])
    first, second = (kernels.conv_backward_weights(x, y, (3, 3), *options) for _ in range(2))
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("channels", [64, 256])
@pytest.mark.parametrize(("kernel_size", "forward_factor", "weight_factor"), [(3, 3, 4), (5, 10, 12)])
def test_rounding_errors(kernels, channels, kernel_size, forward_factor, weight_factor):
    """Bound errors in float32 by a multiple of those of direct sums."""
    rng, options = np.random.default_rng(0), ((1, 1), (1, 1), 1)
    x = rng.normal(size=(1, 20, 20, channels)).astype(np.float32)
    w = (rng.normal(size=(kernel_size, kernel_size, channels, 32)) / (kernel_size * np.sqrt(channels))).astype(
        np.float32
    )
    y = REFERENCE.conv_forward(x.astype(float), w.astype(float), *options)
    error, reference_error = (
        np.sqrt(np.mean((kernels_.conv_forward(x, w, *options) - y) ** 2)) for kernels_ in (kernels, REFERENCE)
    )
    assert error < forward_factor * reference_error
    dw = REFERENCE.conv_backward_weights(x.astype(float), y, (kernel_size, kernel_size), *options)
    dy = y.astype(np.float32)
    error, reference_error = (
        np.sqrt(np.mean((kernels_.conv_backward_weights(x, dy, (kernel_size, kernel_size), *options) - dw) ** 2))
        for kernels_ in (kernels, REFERENCE)
    )
    assert error < weight_factor * reference_error


def test_nan_is_propagated(kernels):
    x, w = np.ones((1, 6, 6, 16)), np.ones((3, 3, 16, 16))
    x[0, 2, 2, 3] = np.nan
    y = np.zeros((1, 4, 4, 16))
    assert kernels.compiled.winograd(False, x, w, y, None, (0, 0, 0), 1, 0)
    assert np.isnan(y[0, :3, :3]).all()
