"""Row-wise convolutions compared with the reference in float64."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_arrays import assert_close, draw_padded

from neondist.backends import Kernels
from neondist.backends import cells as cells_module
from neondist.backends.conv import ConvolutionKernels
from neondist.backends.windows import crop_borders

pytestmark = pytest.mark.skipif(
    not hasattr(cells_module.load_compiled_kernels(), "convolve"),
    reason="neondist was installed without a C compiler for x86-64",
)


class ReferenceConvolution(ConvolutionKernels):
    xp = np


@pytest.fixture(scope="module", autouse=True)
def disable_fallback():
    with pytest.MonkeyPatch.context() as patch:
        for name in "conv_forward", "conv_backward_input", "conv_backward_weights":
            patch.setattr(Kernels, name, None)
        yield


@st.composite
def cases(draw):
    """Draw extent, kernel, stride and dilation of 1 to 3 axes, channels, and the cropping of the gradient."""
    axes = draw(st.lists(st.tuples(*[st.integers(1, 4)] * 3, st.integers(0, 9)), min_size=1, max_size=3))
    kernel, stride, dilation, out_extent = zip(*axes, strict=True)
    dilation = tuple(1 if s > 1 else d for s, d in zip(stride, dilation, strict=True))
    extent = tuple((k - 1) * d + 1 + n for k, d, n in zip(kernel, dilation, out_extent, strict=True))
    channels = st.sampled_from([1, 2, 3, 7, 8, 9, 16, 17, 33])
    sides = tuple((draw(st.integers(0, n)), draw(st.integers(0, 2)) if n > 3 else 0) for n in out_extent)
    return extent, kernel, stride, dilation, draw(channels), draw(channels), sides


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@settings(max_examples=60, deadline=None)
@given(case=cases(), samples=st.integers(0, 3), strided=st.booleans())
@pytest.mark.long
def test_outputs_and_input_gradients(kernels, dtype, case, samples, strided):
    """Vary kernel, stride, dilation and the stride of cells; neighbouring memory is not read."""
    extent, kernel, stride, dilation, inner, outer, sides = case
    rng, options = np.random.default_rng(0), (stride, dilation, 1)
    x = draw_padded(rng, (samples, *extent, inner * (1 + strided)), dtype)[..., :inner]
    weights, bias = draw_padded(rng, (*kernel, inner, outer), dtype), rng.normal(size=outer).astype(dtype)
    y = ReferenceConvolution().conv_forward(x.astype(float), weights.astype(float), *options, bias)
    assert_close(kernels.conv_forward(x, weights, *options, bias), y, dtype, 5)
    dy = draw_padded(rng, y.shape, dtype)
    dx = ReferenceConvolution().conv_backward_input(dy.astype(float), weights.astype(float), extent, *options)
    assert_close(kernels.conv_backward_input(dy, weights, extent, *options, sides), crop_borders(dx, sides), dtype, 5)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.tuples(*[st.integers(1, 4)] * 3, st.integers(1, 5)), min_size=1, max_size=3),
    width=st.integers(16, 150),
    channels=st.tuples(st.integers(1, 5), st.sampled_from([8, 16, 24, 40])),
    strided=st.booleans(),
)
@pytest.mark.long
def test_weight_gradients(kernels, dtype, sizes, width, channels, strided):
    """Vary kernel, stride and dilation with rows of sufficient length; the sums of threads are combined."""
    sizes[-1], (inner, outer) = (*sizes[-1][:3], width), channels
    extent = [(n - 1) * s + (k - 1) * d + 1 + k % 2 * (s - 1) for k, s, d, n in sizes]
    kernel, stride, dilation, out_extent = zip(*sizes, strict=True)
    rng = np.random.default_rng(width)
    x = draw_padded(rng, (2, *extent, inner * (1 + strided)), dtype)[..., :inner]
    dy, options = draw_padded(rng, (2, *out_extent, outer), dtype), (kernel, stride, dilation, 1)
    expected = ReferenceConvolution().conv_backward_weights(x.astype(float), dy.astype(float), *options)
    assert_close(kernels.conv_backward_weights(x, dy, *options), expected, dtype)


@pytest.mark.parametrize("inner", [8, 24])
@pytest.mark.parametrize("outer", [2, 8])
@pytest.mark.parametrize("width", [5, 20])
def test_weight_gradients_of_pointwise_convolutions(kernels, inner, outer, width):
    """Fill vectors with input or output channels, and join short rows where they are contiguous."""
    rng, options = np.random.default_rng(0), ((1, 1), (1, 1), (1, 1), 1)
    x, dy = rng.normal(size=(2, 4, width, inner)), rng.normal(size=(2, 4, width, outer))
    assert_close(
        kernels.conv_backward_weights(x, dy, *options),
        ReferenceConvolution().conv_backward_weights(x, dy, *options),
        np.float64,
    )


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("shape", [(128, 30, 10), (17, 5, 8), (100, 33, 64), (3, 4, 5), (96, 1, 1)])
def test_matrix_products(kernels, dtype, shape):
    """Multiply rows, and transposed operands as in the backward pass of a fully connected layer."""
    rng, (rows, inner, outer) = np.random.default_rng(0), shape
    x, w, dy = (rng.normal(size=size).astype(dtype) for size in ((rows, inner), (inner, outer), (rows, outer)))
    sliced = rng.normal(size=(rows, inner + 3)).astype(dtype)[:, 1:-2]
    for a, b in (x, w), (sliced, w), (dy, w.T), (x.T, dy), (x[::2].T, dy[::2]), (np.asfortranarray(x), w):
        product = kernels.matmul(a, b)
        assert_close(product, a.astype(float) @ b.astype(float), dtype)
        assert product.dtype == dtype


def test_unsupported_arrays(kernels):
    """Leave strided channels, other dtypes or shapes, and large kernels to the fallback."""
    x, w, y = np.ones((2, 7, 8, 6)), np.ones((3, 3, 6, 5)), np.zeros((2, 5, 6, 5))
    arguments = None, (1, 1, 1), (1, 1, 1), (0, 0, 0), 1, 0
    assert kernels.compiled.convolve(x, w, y, *arguments)
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
        assert not kernels.compiled.convolve(*arrays, *arguments)
    assert not kernels.compiled.convolve(x, w, y, np.ones(4), *arguments[1:])
