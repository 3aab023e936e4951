"""Convolutions in strips give what they give at once, written into arrays of any strides."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from present import KERNELS, NAMES, backend_of

import neondist as nd
from neondist.backends import Kernels
from neondist.backends.windows import clear_sides, strips


@st.composite
def convolutions(draw):
    ndim = draw(st.integers(1, 3))
    axis = st.tuples(*[st.integers(1, 3)] * ndim)
    kernel, stride, dilation = draw(axis), draw(axis), draw(axis)
    extra = draw(st.tuples(*[st.integers(0, 9 // ndim)] * ndim))
    extent = tuple((k - 1) * d + 1 + e for k, d, e in zip(kernel, dilation, extra, strict=True))
    return draw(st.integers(0, 3)), extent, kernel, stride, dilation, draw(st.sampled_from([1, 2]))


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("numbers", [1, 40, 1 << 22])
@given(convolutions())
@pytest.mark.long
def test_strips_join_to_the_whole(name, numbers, case):
    samples, extent, kernel, stride, dilation, groups = case
    kernels, rng = backend_of(name).kernels, np.random.default_rng(0)
    x = rng.normal(size=(samples, *extent, 2 * groups))
    weights, bias = rng.normal(size=(*kernel, 2, 3 * groups)), rng.normal(size=3 * groups)
    how = stride, dilation, groups
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "strip", numbers)
        expected = np.maximum(kernels.conv_forward(x, weights, *how, bias), 0)
        y, dx = (np.full((*shape[:-1], 2 * shape[-1]), np.nan)[..., ::2] for shape in (expected.shape, x.shape))
        kernels.conv_into(y, x, weights, *how, bias, kernels.relu)
        np.testing.assert_allclose(y, expected, atol=1e-12)
        dy = rng.normal(size=y.shape)
        dz = dy * (y > 0)
        begin = lambda part: kernels.relu_backward(y[part], dy[part])  # noqa: E731
        found = kernels.conv_back_into(dx, x, dy, weights, *how, begin)
        over = x.copy()
        again = kernels.conv_back_into(over, over, dy, weights, *how, begin, None, True, True)
    by_weights = kernels.conv_backward_weights(x, dz, kernel, *how)
    np.testing.assert_allclose(found[0], by_weights, atol=1e-10)
    np.testing.assert_allclose(found[1], kernels.channel_sum(dz), atol=1e-10)
    np.testing.assert_allclose(dx, kernels.conv_backward_input(dz, weights, extent, *how), atol=1e-12)
    np.testing.assert_allclose(again[0], found[0], atol=1e-12)
    np.testing.assert_allclose(over, dx * (x > 0), atol=1e-12)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("kernel", [(12, 22), (257, 2), (23, 12)])
def test_large_windows_leave_what_they_read_until_it_has_been_read(name, kernel):
    """The gradient lies over the input, also where one part of it is compiled and another cannot be."""
    kernels, rng = backend_of(name).kernels, np.random.default_rng(0)
    extent, how = [k + 3 for k in kernel], ((2, 2), (1, 1), 1)
    x, weights = rng.normal(size=(1, *extent, 3)), rng.normal(size=(*kernel, 3, 2))
    dy = rng.normal(size=kernels.conv_forward(x, weights, *how).shape)
    over = x.copy()
    sides = [(1, 0), (1, 0)]
    found, _ = kernels.conv_back_into(over, over, dy, weights, *how, lambda part: dy[part].copy(), sides)
    clear_sides(x, sides)
    expected = Kernels().conv_backward_weights(x, dy, kernel, *how)
    np.testing.assert_allclose(found, expected, atol=1e-9)
    dx = Kernels().conv_backward_input(dy, weights, extent, *how)
    np.testing.assert_allclose(over[:, 1:, 1:], dx[:, 1:, 1:], atol=1e-9)


@given(convolutions(), st.integers(1, 200), st.tuples(st.integers(0, 4), st.integers(0, 4)))
def test_a_strip_knows_which_of_its_rows_lie_outside(case, numbers, sides):
    """Of so many rows at both ends of the view that are known to be zero."""
    samples, extent, kernel, stride, dilation, _ = case
    out = ((n - d * (k - 1) - 1) // s + 1 for n, k, s, d in zip(extent, kernel, stride, dilation, strict=True))
    x, y = np.zeros((samples, *extent, 2)), np.zeros((samples, *out, 3))
    for strip in strips(x, y, kernel, stride, dilation, numbers):
        rows = range(extent[0])[strip.seen]
        before, after = strip.outside(sides, x)
        assert min(before, len(rows)) == sum(row < sides[0] for row in rows)
        assert min(after, len(rows)) == sum(row >= extent[0] - sides[1] for row in rows)


class Doubled(nd.ConvLayer):
    """A user's subclass that calls the base's forward twice and works on the result."""

    def forward(self, ctx, view):
        return super().forward(ctx, view) + super().forward(ctx, -view) + 1


class Mixed:
    """A mixin that changes what `forward` returns."""

    def forward(self, ctx, view):
        return super().forward(ctx, view) - 1


class MixedConv(Mixed, nd.ConvLayer): ...


class Outputs(nd.Observer):
    """Copies of all outputs."""

    def __init__(self):
        self.found = {}

    def value(self, layer, name, array):
        if name == "output":
            self.found[layer.name] = array.copy()


@pytest.mark.parametrize("name", NAMES)
def test_a_subclass_may_work_on_what_its_parent_returns(name):
    for cls, own in ((Doubled, lambda base, x: base(x) + base(-x) + 1), (MixedConv, lambda base, x: base(x) - 1)):
        layers = [cls(2, 3, padding=1, activation=nd.Tanh()), nd.ConvLayer(2, 3, padding=1)]
        model = nd.Convnet(layers, backend=name, dtype="float64")
        model.build((5, 6, 2), batch_size=2)
        x, outputs = np.random.default_rng(1).normal(size=(2, 5, 6, 2)), Outputs()
        first = layers[0]
        window = first.window

        def base(x, first=first, window=window):
            padded = np.pad(x, [(0, 0), (1, 1), (1, 1), (0, 0)])
            params = first.params
            z = first.kernels.conv_forward(padded, params["weights"], window.stride, (1, 1), 1, params["bias"])
            return np.tanh(z)

        with model.grid.observers.watched_by(outputs):
            y = model.fprop(x)
        np.testing.assert_allclose(outputs.found[first.name], own(base, x), atol=1e-12)
        if cls is MixedConv:  # whose gradient is its parent's
            dy, dx = np.ones_like(y), model.bprop(np.ones_like(y))
            direction = np.random.default_rng(2).normal(size=x.shape)
            ahead, behind = (model.fprop(x + sign * 1e-5 * direction) for sign in (1, -1))
            np.testing.assert_allclose(np.sum(dx * direction), np.sum((ahead - behind) * dy) / 2e-5, rtol=1e-7)
