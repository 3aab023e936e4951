"""Convolutions in strips compared with complete ones, with outputs of any strides."""

import numpy as np
import pytest
from availability import BACKENDS, KERNEL_VARIANTS, make_backend
from hypothesis import given
from hypothesis import strategies as st

import neondist as nd
from neondist.backends import Kernels
from neondist.backends.windows import split_into_strips, zero_borders


@st.composite
def convolutions(draw):
    ndim = draw(st.integers(1, 3))
    axis = st.tuples(*[st.integers(1, 3)] * ndim)
    kernel, stride, dilation = draw(axis), draw(axis), draw(axis)
    extra = draw(st.tuples(*[st.integers(0, 9 // ndim)] * ndim))
    extent = tuple((k - 1) * d + 1 + e for k, d, e in zip(kernel, dilation, extra, strict=True))
    return draw(st.integers(0, 3)), extent, kernel, stride, dilation, draw(st.sampled_from([1, 2]))


@pytest.mark.parametrize("backend", KERNEL_VARIANTS)
@pytest.mark.parametrize("strip", [1, 40, 1 << 22])
@given(convolutions())
@pytest.mark.long
def test_strips_match_complete_convolutions(backend, strip, case):
    samples, extent, kernel, stride, dilation, groups = case
    kernels, rng = make_backend(backend).kernels, np.random.default_rng(0)
    x = rng.normal(size=(samples, *extent, 2 * groups))
    weights, bias = rng.normal(size=(*kernel, 2, 3 * groups)), rng.normal(size=3 * groups)
    options = stride, dilation, groups
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "strip_elements", strip)
        expected = np.maximum(kernels.conv_forward(x, weights, *options, bias), 0)
        y, dx = (np.full((*shape[:-1], 2 * shape[-1]), np.nan)[..., ::2] for shape in (expected.shape, x.shape))
        kernels.conv_into(y, x, weights, *options, bias, kernels.relu)
        np.testing.assert_allclose(y, expected, atol=1e-12)
        dy = rng.normal(size=y.shape)
        dz = dy * (y > 0)
        backward_part = lambda part: kernels.relu_backward(y[part], dy[part])  # noqa: E731
        gradients = kernels.conv_backward_into(dx, x, dy, weights, *options, backward_part)
        in_place = x.copy()
        in_place_gradients = kernels.conv_backward_into(
            in_place, in_place, dy, weights, *options, backward_part, None, True, True
        )
    weight_gradient = kernels.conv_backward_weights(x, dz, kernel, *options)
    np.testing.assert_allclose(gradients[0], weight_gradient, atol=1e-10)
    np.testing.assert_allclose(gradients[1], kernels.channel_sum(dz), atol=1e-10)
    np.testing.assert_allclose(dx, kernels.conv_backward_input(dz, weights, extent, *options), atol=1e-12)
    np.testing.assert_allclose(in_place_gradients[0], gradients[0], atol=1e-12)
    np.testing.assert_allclose(in_place, dx * (x > 0), atol=1e-12)


@pytest.mark.parametrize("backend", KERNEL_VARIANTS)
@pytest.mark.parametrize("kernel", [(12, 22), (257, 2), (23, 12)])
def test_large_windows_in_place(backend, kernel):
    """Overwrite the input by the gradient, even if only parts of the convolution are compiled."""
    kernels, rng = make_backend(backend).kernels, np.random.default_rng(0)
    extent, options = [k + 3 for k in kernel], ((2, 2), (1, 1), 1)
    x, weights = rng.normal(size=(1, *extent, 3)), rng.normal(size=(*kernel, 3, 2))
    dy = rng.normal(size=kernels.conv_forward(x, weights, *options).shape)
    in_place = x.copy()
    sides = [(1, 0), (1, 0)]
    weight_gradient, _ = kernels.conv_backward_into(
        in_place, in_place, dy, weights, *options, lambda part: dy[part].copy(), sides
    )
    zero_borders(x, sides)
    expected = Kernels().conv_backward_weights(x, dy, kernel, *options)
    np.testing.assert_allclose(weight_gradient, expected, atol=1e-9)
    dx = Kernels().conv_backward_input(dy, weights, extent, *options)
    np.testing.assert_allclose(in_place[:, 1:, 1:], dx[:, 1:, 1:], atol=1e-9)


@given(convolutions(), st.integers(1, 200), st.tuples(st.integers(0, 4), st.integers(0, 4)))
def test_rows_outside_strips(case, limit, sides):
    """Count the rows of a strip that are known to be zero at both ends of the view."""
    samples, extent, kernel, stride, dilation, _ = case
    out_extent = ((n - d * (k - 1) - 1) // s + 1 for n, k, s, d in zip(extent, kernel, stride, dilation, strict=True))
    x, y = np.zeros((samples, *extent, 2)), np.zeros((samples, *out_extent, 3))
    for strip in split_into_strips(x, y, kernel, stride, dilation, limit):
        rows = range(extent[0])[strip.view_rows]
        before, after = strip.zero_row_counts(sides, x)
        assert min(before, len(rows)) == sum(row < sides[0] for row in rows)
        assert min(after, len(rows)) == sum(row >= extent[0] - sides[1] for row in rows)


class DoubledConv(nd.ConvLayer):
    """Subclass that calls the parent's `forward` twice and combines the results."""

    def forward(self, ctx, view):
        return super().forward(ctx, view) + super().forward(ctx, -view) + 1


class OffsetMixin:
    """Mixin that changes the result of `forward`."""

    def forward(self, ctx, view):
        return super().forward(ctx, view) - 1


class OffsetConv(OffsetMixin, nd.ConvLayer): ...


class OutputRecorder(nd.Observer):
    """Observer that copies all outputs."""

    def __init__(self):
        self.outputs = {}

    def on_value(self, layer, name, array):
        if name == "output":
            self.outputs[layer.name] = array.copy()


@pytest.mark.parametrize("backend", BACKENDS)
def test_subclasses_process_results_of_parents(backend):
    for cls, expected_output in (
        (DoubledConv, lambda base, x: base(x) + base(-x) + 1),
        (OffsetConv, lambda base, x: base(x) - 1),
    ):
        layers = [cls(2, 3, padding=1, activation=nd.Tanh()), nd.ConvLayer(2, 3, padding=1)]
        model = nd.Convnet(layers, backend=backend, dtype="float64")
        model.build((5, 6, 2), batch_size=2)
        x, recorder = np.random.default_rng(1).normal(size=(2, 5, 6, 2)), OutputRecorder()
        first = layers[0]
        window = first.window

        def base(x, first=first, window=window):
            padded = np.pad(x, [(0, 0), (1, 1), (1, 1), (0, 0)])
            params = first.params
            z = first.kernels.conv_forward(padded, params["weights"], window.stride, (1, 1), 1, params["bias"])
            return np.tanh(z)

        with model.grid.observers.add_temporarily(recorder):
            y = model.fprop(x)
        np.testing.assert_allclose(recorder.outputs[first.name], expected_output(base, x), atol=1e-12)
        if cls is OffsetConv:  # its gradient is that of the parent
            dy, dx = np.ones_like(y), model.bprop(np.ones_like(y))
            direction = np.random.default_rng(2).normal(size=x.shape)
            upper, lower = (model.fprop(x + sign * 1e-5 * direction) for sign in (1, -1))
            np.testing.assert_allclose(np.sum(dx * direction), np.sum((upper - lower) * dy) / 2e-5, rtol=1e-7)
