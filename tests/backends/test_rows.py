"""Convolutions row by row against NumPy's windows, in float64."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_winograd import agree, in_room

from neondist.backends import Kernels
from neondist.backends import cells as cells_module
from neondist.backends.conv import Convolution
from neondist.backends.windows import cropped

pytestmark = pytest.mark.skipif(
    not hasattr(cells_module.compiled(), "convolve"), reason="neondist was installed without a C compiler for x86-64"
)


class Plain(Convolution):
    xp = np


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left_to_the_table():
    with pytest.MonkeyPatch.context() as patch:
        for name in "conv_forward", "conv_backward_input", "conv_backward_weights":
            patch.setattr(Kernels, name, None)
        yield


@st.composite
def cases(draw):
    """Draw extent, kernel, stride and dilation of 1 to 3 axes; channels; how many cells the gradient is cropped by."""
    axes = draw(st.lists(st.tuples(*[st.integers(1, 4)] * 3, st.integers(0, 9)), min_size=1, max_size=3))
    kernel, stride, dilation, more = zip(*axes, strict=True)
    dilation = tuple(1 if s > 1 else d for s, d in zip(stride, dilation, strict=True))
    extent = tuple((k - 1) * d + 1 + n for k, d, n in zip(kernel, dilation, more, strict=True))
    channels = st.sampled_from([1, 2, 3, 7, 8, 9, 16, 17, 33])
    sides = tuple((draw(st.integers(0, n)), draw(st.integers(0, 2)) if n > 3 else 0) for n in more)
    return extent, kernel, stride, dilation, draw(channels), draw(channels), sides


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@settings(max_examples=60, deadline=None)
@given(case=cases(), samples=st.integers(0, 3), apart=st.booleans())
@pytest.mark.long
def test_outputs_and_gradients_of_inputs(kernels, dtype, case, samples, apart):
    """Of any kernel, stride and dilation; cells may be apart, and what is beside them is not read."""
    extent, kernel, stride, dilation, inner, outer, sides = case
    rng, how = np.random.default_rng(0), (stride, dilation, 1)
    x = in_room(rng, (samples, *extent, inner * (1 + apart)), dtype)[..., :inner]
    weights, bias = in_room(rng, (*kernel, inner, outer), dtype), rng.normal(size=outer).astype(dtype)
    y = Plain().conv_forward(x.astype(float), weights.astype(float), *how, bias)
    agree(kernels.conv_forward(x, weights, *how, bias), y, dtype, 5)
    dy = in_room(rng, y.shape, dtype)
    dx = Plain().conv_backward_input(dy.astype(float), weights.astype(float), extent, *how)
    agree(kernels.conv_backward_input(dy, weights, extent, *how, sides), cropped(dx, sides), dtype, 5)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.tuples(*[st.integers(1, 4)] * 3, st.integers(1, 5)), min_size=1, max_size=3),
    width=st.integers(16, 150),
    channels=st.tuples(st.integers(1, 5), st.sampled_from([8, 16, 24, 40])),
    apart=st.booleans(),
)
@pytest.mark.long
def test_gradients_of_weights(kernels, dtype, sizes, width, channels, apart):
    """Of any kernel, stride and dilation, along rows that are long enough; shares of two threads add up."""
    sizes[-1], (inner, outer) = (*sizes[-1][:3], width), channels
    extent = [(n - 1) * s + (k - 1) * d + 1 + k % 2 * (s - 1) for k, s, d, n in sizes]
    kernel, stride, dilation, out = zip(*sizes, strict=True)
    rng = np.random.default_rng(width)
    x = in_room(rng, (2, *extent, inner * (1 + apart)), dtype)[..., :inner]
    dy, how = in_room(rng, (2, *out, outer), dtype), (kernel, stride, dilation, 1)
    expected = Plain().conv_backward_weights(x.astype(float), dy.astype(float), *how)
    agree(kernels.conv_backward_weights(x, dy, *how), expected, dtype)


@pytest.mark.parametrize("inner", [8, 24])
@pytest.mark.parametrize("outer", [2, 8])
@pytest.mark.parametrize("width", [5, 20])
def test_gradients_of_single_cells_weights(kernels, inner, outer, width):
    """One of both fills vectors; short rows are joined where they follow each other."""
    rng, how = np.random.default_rng(0), ((1, 1), (1, 1), (1, 1), 1)
    x, dy = rng.normal(size=(2, 4, width, inner)), rng.normal(size=(2, 4, width, outer))
    agree(kernels.conv_backward_weights(x, dy, *how), Plain().conv_backward_weights(x, dy, *how), np.float64)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("shape", [(128, 30, 10), (17, 5, 8), (100, 33, 64), (3, 4, 5), (96, 1, 1)])
def test_products_of_matrices(kernels, dtype, shape):
    """Of rows, and of what the ways back of a fully connected layer turn round."""
    rng, (rows, inner, outer) = np.random.default_rng(0), shape
    x, w, dy = (rng.normal(size=size).astype(dtype) for size in ((rows, inner), (inner, outer), (rows, outer)))
    wide = rng.normal(size=(rows, inner + 3)).astype(dtype)[:, 1:-2]
    for a, b in (x, w), (wide, w), (dy, w.T), (x.T, dy), (x[::2].T, dy[::2]), (np.asfortranarray(x), w):
        found = kernels.matmul(a, b)
        agree(found, a.astype(float) @ b.astype(float), dtype)
        assert found.dtype == dtype


def test_arrays_that_it_cannot_take_are_refused(kernels):
    """Channels apart, other dtypes or shapes, too many pieces: the caller does it otherwise."""
    x, w, y = np.ones((2, 7, 8, 6)), np.ones((3, 3, 6, 5)), np.zeros((2, 5, 6, 5))
    rest = None, (1, 1, 1), (1, 1, 1), (0, 0, 0), 1, 0
    assert kernels.compiled.convolve(x, w, y, *rest)
    assert (y == 54).all()
    for arrays in (
        (np.ones((2, 7, 8, 12))[..., ::2], w, y),
        (x, w, np.zeros((2, 5, 6, 10))[..., ::2]),
        (x.astype(np.float32), w, y),
        (x, w.astype(np.float32), y),
        (x, w, np.zeros((1, 5, 6, 5))),
        (x, w[..., :4], y),
        (x[..., :3], w, y),
        (x, np.ones((200, 3, 6, 5)), y),
        (x.astype(int), w.astype(int), y.astype(int)),
        (x[0], w[0], y[0]),
    ):
        assert not kernels.compiled.convolve(*arrays, *rest)
    assert not kernels.compiled.convolve(x, w, y, np.ones(4), *rest[1:])
