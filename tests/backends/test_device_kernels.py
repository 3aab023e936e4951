"""Kernels of a GPU, compiled from the same text for the CPU, against the reference; and how often they are started."""

import numpy as np
import pytest
from device import ON_GPU, device_under_test
from device_twin import compiler
from hypothesis import given, settings
from hypothesis import strategies as st

import neondist as nd
from neondist.arrays.namespace import to_host
from neondist.arrays.precision import ComputePrecision
from neondist.backends import Kernels, Normalisation
from neondist.comm import loopback

pytestmark = pytest.mark.skipif(compiler() is None and not ON_GPU, reason="no C compiler")
REFERENCE = Kernels()


@st.composite
def boxes(draw, shape, steps=False):
    """A box of an array, which may be empty."""
    found, empty = [], draw(st.integers(0, 9)) == 7
    for n in shape:
        lo = draw(st.integers(0, n - 1))
        hi = draw(st.integers(lo if empty else lo + 1, n))
        found.append(slice(lo, hi, draw(st.integers(1, 3)) if steps else None))
    return tuple(found)


shapes = st.lists(st.integers(2, 5), min_size=1, max_size=4)


def numbers(shape, dtype, seed=0):
    values = np.random.default_rng(seed).normal(size=shape)
    return (100 * values).astype(dtype)


@settings(max_examples=30, deadline=None)
@given(st.data(), st.sampled_from(["float32", "float64", "uint8", "int16"]))
def test_copies_of_several_arrays(data, dtype):
    """From any strides to any strides; arrays of fewer axes beside those of more."""
    device, pairs = device_under_test(), []
    for seed in range(data.draw(st.integers(1, 5))):
        shape = data.draw(shapes)
        axes, whole = data.draw(st.permutations(range(len(shape)))), numbers(shape, dtype, seed)
        box = data.draw(boxes(shape, steps=True))
        target = np.zeros([2 * n + 1 for n in whole[box].transpose(axes).shape], dtype)
        pairs.append((whole, box, axes, target, tuple(slice(1, None, 2) for _ in shape)))
    found = [
        (device.xp.array(whole)[box].transpose(axes), device.xp.array(target), place)
        for whole, box, axes, target, place in pairs
    ]
    before = device.launches
    device.backend.kernels.copy_each([each for each, *_ in found], [target[place] for _, target, place in found])
    assert device.launches - before <= 1
    for (whole, box, axes, target, place), (_, there, _) in zip(pairs, found, strict=True):
        target[place] = whole[box].transpose(axes)
        np.testing.assert_array_equal(device.xp.asnumpy(there), target)


@settings(max_examples=30, deadline=None)
@given(st.data(), st.sampled_from(["float32", "float64"]))
def test_sums_of_boxes_that_overlap(data, dtype):
    """The same to the last bit: every cell adds what comes to it in the order of the boxes."""
    device, shape = device_under_test(), data.draw(shapes)
    array, cuts = numbers(shape, dtype), data.draw(st.lists(boxes(shape, steps=True), min_size=3, max_size=6))
    parts = [numbers(array[cut].shape, dtype, seed) for seed, cut in enumerate(cuts, start=1)]
    there = device.xp.array(array)
    brought = [device.xp.array(part) for part in parts]
    before = device.launches
    device.backend.kernels.add_boxes(there, cuts, brought)
    assert device.launches - before <= 1
    REFERENCE.add_boxes(array, cuts, parts)
    np.testing.assert_array_equal(device.xp.asnumpy(there), array)


@settings(max_examples=20, deadline=None)
@given(st.data(), st.booleans(), st.booleans(), st.sampled_from(["float32", "float64"]))
def test_cells_are_normalised_in_one_launch_each_way(data, clip, by_sample, dtype):
    """In the middle of larger arrays, as in a halo's buffer."""
    device, shape = device_under_test(), data.draw(st.lists(st.integers(2, 4), min_size=2, max_size=4))
    xp, inside = device.xp, tuple(slice(1, 1 + n) for n in shape)
    wholes = [numbers([n + 2 for n in shape], dtype, seed) for seed in range(4)]
    factors = [numbers((shape[0] if by_sample else 1, shape[-1]), dtype, seed) for seed in range(4, 10)]
    found = []
    for kernels, brought in (REFERENCE, np.array), (device.backend.kernels, xp.array):
        x, dy, y, dx = (brought(whole)[inside] for whole in wholes)
        how, by = Normalisation(*map(brought, factors[:3]), clip), [brought(factor) for factor in factors[3:]]
        before = device.launches
        kernels.normalise(x, how, y)
        kernels.normalise_back(x, dy, how, by, dx)
        found.append((to_host(y), to_host(dx)))
    assert device.launches - before <= 2
    close = {"rtol": 1e-6 if ON_GPU else 0, "atol": 1e-3 if ON_GPU else 0}
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, **close)


@settings(max_examples=30, deadline=None)
@given(st.data(), st.booleans(), st.booleans(), st.sampled_from(["float32", "float64"]))
def test_sums_over_cells_are_a_few_launches(data, clip, by_sample, dtype):
    """Of any strides, with places of 32 and of 64 bits, in one lane and in many; nothing cancels."""
    device, shape = device_under_test(), data.draw(st.lists(st.integers(1, 6), min_size=2, max_size=4))
    kernels, inside = device.backend.kernels, tuple(slice(1, 1 + n) for n in shape)
    kernels.wide = data.draw(st.sampled_from([0, 1 << 30]))
    more = data.draw(st.booleans())  # as many cells as are added up in four launches
    whole, slopes = (
        numbers([200 if more else shape[0] + 2, *(n + 2 for n in shape[1:])], dtype, seed) for seed in (0, 1)
    )
    inside = (slice(1, 190) if more and not by_sample else inside[0], *inside[1:])
    whole += 1000
    factors = [numbers((shape[0] if by_sample else 1, shape[-1]), dtype, seed) for seed in range(4, 7)]
    factors[0] += 1000
    x, dy = (device.xp.array(array)[inside] for array in (whole, slopes))
    before = device.launches
    found = [
        *kernels.moments(x, by_sample),
        *kernels.normalise_sums(x, dy, Normalisation(*map(device.xp.array, factors), clip)),
    ]
    found += [kernels.channel_sum(x), kernels.sample_sum(x)]
    assert device.launches - before <= 16
    x, dy = whole[inside].astype("f8"), slopes[inside].astype("f8")
    expected = [*REFERENCE.moments(x, by_sample)]
    if not clip:  # whether a number is clipped hangs on its rounding
        expected += REFERENCE.normalise_sums(x, dy, Normalisation(*factors))
    expected += [REFERENCE.channel_sum(x), REFERENCE.sample_sum(x)]
    found = found[:2] + found[4 if clip else 2 :]
    close = 1e-4 if dtype == "float32" else 1e-12
    for one, other in zip(found, expected, strict=True):
        assert str(one.dtype) == dtype
        np.testing.assert_allclose(to_host(one), other, rtol=close, atol=close * max(1, np.abs(other).max()))


def test_gradients_of_what_was_clipped_are_left_out():
    device = device_under_test()
    x, dy = np.array([[-1.0, 2.0], [3.0, -4.0], [5.0, 6.0]]), np.array([[10.0, 20.0], [30.0, 40.0], [50.0, 60.0]])
    how = Normalisation(*(np.array([numbers]) for numbers in ([1.0, 1.0], [2.0, 2.0], [0.0, 0.0])), True)
    expected = REFERENCE.normalise_sums(x, dy, how)
    np.testing.assert_array_equal(expected[0], [[80.0, 80.0]])
    there = Normalisation(*map(device.xp.array, how[:3]), True)
    found = device.backend.kernels.normalise_sums(device.xp.array(x), device.xp.array(dy), there)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(to_host(one), other)


@pytest.mark.parametrize("wide", [0, 1 << 30])
def test_operands_of_bfloat16_are_one_launch(wide):
    device, values = device_under_test(), numbers((6, 7, 8), "f4") ** 9
    values[0, :4, 0] = np.nan, np.inf, -np.inf, np.finfo("f4").max
    values[1] = (np.arange(7 * 8, dtype="u4") * 0x1000 + 0x3F800000).view("f4").reshape(7, 8)
    kernels, precision = device.backend.kernels, ComputePrecision("bfloat16")
    kernels.wide = wide
    x, before = device.xp.array(values)[:, 1::2].swapaxes(0, 2), device.launches
    found = kernels.round_operand(x, precision)
    assert device.launches - before <= 1
    np.testing.assert_array_equal(to_host(found), precision.rounded(values[:, 1::2].swapaxes(0, 2)))


@settings(max_examples=20, deadline=None)
@given(st.data(), st.sampled_from(["float32", "float64"]))
def test_pooling_is_one_launch_each_way(data, dtype):
    """Of whole numbers, many of which are the same, in the middle of a larger array."""
    device, axes = device_under_test(), data.draw(st.integers(1, 3))
    kernel, stride, more = (data.draw(st.tuples(*[st.integers(1, 3)] * axes)) for _ in range(3))
    extent = [k + n - 1 for k, n in zip(kernel, more, strict=True)]
    whole = np.rint(numbers([4, *(n + 2 for n in extent), 3], dtype) / 60).astype(dtype)
    inside, found = (slice(0, 2), *(slice(1, 1 + n) for n in extent)), []
    for kernels, brought in (REFERENCE, np.array), (device.backend.kernels, device.xp.array):
        x, before = brought(whole)[inside], device.launches
        y, place = kernels.max_pool(x, kernel, stride)
        dy = brought(numbers(y.shape, dtype, 1))
        dx = kernels.max_pool_backward(dy, place, extent, kernel, stride)
        found.append((to_host(y), to_host(place), to_host(dx)))
    assert device.launches - before <= 2
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


@settings(max_examples=20, deadline=None)
@given(st.data(), st.integers(2, 3), st.integers(1, 2))
def test_depthwise_convolution_is_one_launch_each_way(data, channels, each):
    device, axes = device_under_test(), data.draw(st.integers(1, 3))
    kernel, stride, dilation, more = (data.draw(st.tuples(*[st.integers(1, 3)] * axes)) for _ in range(4))
    extent = [d * (k - 1) + n for k, d, n in zip(kernel, dilation, more, strict=True)]
    whole, weights = (
        numbers([4, *(n + 2 for n in extent), channels], "f8"),
        numbers((*kernel, 1, channels * each), "f8"),
    )
    inside, how, found = (slice(0, 2), *(slice(1, 1 + n) for n in extent)), (stride, dilation, channels), []
    for kernels, brought in (REFERENCE, np.array), (device.backend.kernels, device.xp.array):
        x, w, before = brought(whole)[inside], brought(weights), device.launches
        y = kernels.conv_forward(x, w, *how)
        dx = kernels.conv_backward_input(brought(numbers(y.shape, "f8", 1)), w, extent, *how)
        found.append((to_host(y), to_host(dx)))
    assert device.launches - before <= 2
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-9)


@pytest.mark.parametrize("mode", ["zeros", "reflect", "wrap"])
def test_a_halo_is_two_launches_and_one_wait_each_way(mode):
    window = nd.Window(kernel=(5, 3), padding=((2, 2), (1, 1)), mode=mode)

    def job(comm, device):
        array = nd.GlobalArray(
            nd.ProcessGrid(comm, rows=3, cols=3), (2, 7, 8, 3), window, backend=device.backend if device else "numpy"
        )
        xp = device.xp if device else np
        tile = xp.array(numbers((2, *array.own.shape, 3), "float32", comm.rank))
        view = array.get_fprop_view(tile)
        found = [view, array.get_bprop_view(view)]
        if device is None:
            return found
        buffer, counts = array.buffer(2), []
        for halo in (buffer.gather, buffer.scatter_add):
            before = device.launches, device.synchronisations
            halo.exchange()
            counts.append((device.launches - before[0], device.synchronisations - before[1]))
        assert counts == [(2, 1), (2, 1)] or ON_GPU
        return [xp.asnumpy(each) for each in found]

    for expected, found in zip(
        loopback.run(9, lambda comm: job(comm, None)),
        loopback.run(9, lambda comm: job(comm, device_under_test())),
        strict=True,
    ):
        for one, other in zip(expected, found, strict=True):
            np.testing.assert_array_equal(one, other)
