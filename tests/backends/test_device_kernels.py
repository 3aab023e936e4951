"""GPU kernels, compiled for the CPU from the same source, compared with the reference; and counts of launches."""

import numpy as np
import pytest
from device import ON_GPU, select_device
from device_emulation import find_compiler
from hypothesis import given, settings
from hypothesis import strategies as st

import neondist as nd
from neondist.arrays.namespace import to_host
from neondist.arrays.precision import ComputePrecision
from neondist.backends import Kernels, Normalisation
from neondist.comm import loopback

pytestmark = pytest.mark.skipif(find_compiler() is None and not ON_GPU, reason="no C compiler")
REFERENCE = Kernels()


@st.composite
def boxes(draw, shape, steps=False):
    """Draw a box of an array, which may be empty."""
    box, empty = [], draw(st.integers(0, 9)) == 7
    for n in shape:
        lo = draw(st.integers(0, n - 1))
        hi = draw(st.integers(lo if empty else lo + 1, n))
        box.append(slice(lo, hi, draw(st.integers(1, 3)) if steps else None))
    return tuple(box)


shapes = st.lists(st.integers(2, 5), min_size=1, max_size=4)


def draw_values(shape, dtype, seed=0):
    values = np.random.default_rng(seed).normal(size=shape)
    return (100 * values).astype(dtype)


@settings(max_examples=30, deadline=None)
@given(st.data(), st.sampled_from(["float32", "float64", "uint8", "int16"]))
def test_batched_copies(data, dtype):
    """Copy between arrays of any strides, with different numbers of axes in one launch."""
    device, pairs = select_device(), []
    for seed in range(data.draw(st.integers(1, 5))):
        shape = data.draw(shapes)
        axes, source = data.draw(st.permutations(range(len(shape)))), draw_values(shape, dtype, seed)
        box = data.draw(boxes(shape, steps=True))
        target = np.zeros([2 * n + 1 for n in source[box].transpose(axes).shape], dtype)
        pairs.append((source, box, axes, target, tuple(slice(1, None, 2) for _ in shape)))
    device_pairs = [
        (device.xp.array(source)[box].transpose(axes), device.xp.array(target), target_box)
        for source, box, axes, target, target_box in pairs
    ]
    launches_before = device.launches
    device.backend.kernels.copy_each(
        [array for array, *_ in device_pairs], [target[target_box] for _, target, target_box in device_pairs]
    )
    assert device.launches - launches_before <= 1
    for (source, box, axes, target, target_box), (_, device_target, _) in zip(pairs, device_pairs, strict=True):
        target[target_box] = source[box].transpose(axes)
        np.testing.assert_array_equal(device.xp.asnumpy(device_target), target)


@settings(max_examples=30, deadline=None)
@given(st.data(), st.sampled_from(["float32", "float64"]))
def test_overlapping_box_sums(data, dtype):
    """Compare sums bit for bit, as every cell is accumulated in the order of the boxes."""
    device, shape = select_device(), data.draw(shapes)
    array = draw_values(shape, dtype)
    overlapping_boxes = data.draw(st.lists(boxes(shape, steps=True), min_size=3, max_size=6))
    parts = [draw_values(array[box].shape, dtype, seed) for seed, box in enumerate(overlapping_boxes, start=1)]
    device_array = device.xp.array(array)
    device_parts = [device.xp.array(part) for part in parts]
    launches_before = device.launches
    device.backend.kernels.add_boxes(device_array, overlapping_boxes, device_parts)
    assert device.launches - launches_before <= 1
    REFERENCE.add_boxes(array, overlapping_boxes, parts)
    np.testing.assert_array_equal(device.xp.asnumpy(device_array), array)


@settings(max_examples=20, deadline=None)
@given(st.data(), st.booleans(), st.booleans(), st.sampled_from(["float32", "float64"]))
def test_normalisation_is_one_launch_per_pass(data, clip, by_sample, dtype):
    """Normalise views of larger arrays, as in a halo buffer."""
    device, shape = select_device(), data.draw(st.lists(st.integers(2, 4), min_size=2, max_size=4))
    xp, view = device.xp, tuple(slice(1, 1 + n) for n in shape)
    buffers = [draw_values([n + 2 for n in shape], dtype, seed) for seed in range(4)]
    factors = [draw_values((shape[0] if by_sample else 1, shape[-1]), dtype, seed) for seed in range(4, 10)]
    results = []
    for kernels, to_array in (REFERENCE, np.array), (device.backend.kernels, xp.array):
        x, dy, y, dx = (to_array(buffer)[view] for buffer in buffers)
        normalisation = Normalisation(*map(to_array, factors[:3]), clip)
        backward_factors = [to_array(factor) for factor in factors[3:]]
        launches_before = device.launches
        kernels.normalise(x, normalisation, y)
        kernels.normalise_backward(x, dy, normalisation, backward_factors, dx)
        results.append((to_host(y), to_host(dx)))
    assert device.launches - launches_before <= 2
    tolerances = {"rtol": 1e-6 if ON_GPU else 0, "atol": 1e-3 if ON_GPU else 0}
    for actual, expected in zip(*results, strict=True):
        np.testing.assert_allclose(actual, expected, **tolerances)


@settings(max_examples=30, deadline=None)
@given(st.data(), st.booleans(), st.booleans(), st.sampled_from(["float32", "float64"]))
def test_reductions_need_few_launches(data, clip, by_sample, dtype):
    """Reduce arrays of any strides, with offsets of 32 or 64 bits and one or many lanes, without cancellation."""
    device, shape = select_device(), data.draw(st.lists(st.integers(1, 6), min_size=2, max_size=4))
    kernels, view = device.backend.kernels, tuple(slice(1, 1 + n) for n in shape)
    kernels.int64_threshold = data.draw(st.sampled_from([0, 1 << 30]))
    many_cells = data.draw(st.booleans())  # enough cells for four launches
    values, slopes = (
        draw_values([200 if many_cells else shape[0] + 2, *(n + 2 for n in shape[1:])], dtype, seed) for seed in (0, 1)
    )
    view = (slice(1, 190) if many_cells and not by_sample else view[0], *view[1:])
    values += 1000
    factors = [draw_values((shape[0] if by_sample else 1, shape[-1]), dtype, seed) for seed in range(4, 7)]
    factors[0] += 1000
    x, dy = (device.xp.array(array)[view] for array in (values, slopes))
    launches_before = device.launches
    sums = [
        *kernels.moments(x, by_sample),
        *kernels.normalise_backward_sums(x, dy, Normalisation(*map(device.xp.array, factors), clip)),
    ]
    sums += [kernels.channel_sum(x), kernels.sample_sum(x)]
    assert device.launches - launches_before <= 16
    x, dy = values[view].astype("f8"), slopes[view].astype("f8")
    expected = [*REFERENCE.moments(x, by_sample)]
    if not clip:  # clipping depends on rounding
        expected += REFERENCE.normalise_backward_sums(x, dy, Normalisation(*factors))
    expected += [REFERENCE.channel_sum(x), REFERENCE.sample_sum(x)]
    sums = sums[:2] + sums[4 if clip else 2 :]
    tolerance = 1e-4 if dtype == "float32" else 1e-12
    for actual, reference in zip(sums, expected, strict=True):
        assert str(actual.dtype) == dtype
        np.testing.assert_allclose(
            to_host(actual), reference, rtol=tolerance, atol=tolerance * max(1, np.abs(reference).max())
        )


def test_clipped_cells_have_no_gradient():
    device = select_device()
    x, dy = np.array([[-1.0, 2.0], [3.0, -4.0], [5.0, 6.0]]), np.array([[10.0, 20.0], [30.0, 40.0], [50.0, 60.0]])
    normalisation = Normalisation(*(np.array([values]) for values in ([1.0, 1.0], [2.0, 2.0], [0.0, 0.0])), True)
    expected = REFERENCE.normalise_backward_sums(x, dy, normalisation)
    np.testing.assert_array_equal(expected[0], [[80.0, 80.0]])
    device_normalisation = Normalisation(*map(device.xp.array, normalisation[:3]), True)
    sums = device.backend.kernels.normalise_backward_sums(device.xp.array(x), device.xp.array(dy), device_normalisation)
    for actual, reference in zip(sums, expected, strict=True):
        np.testing.assert_array_equal(to_host(actual), reference)


@pytest.mark.parametrize("wide", [0, 1 << 30])
def test_bfloat16_rounding_is_one_launch(wide):
    device, values = select_device(), draw_values((6, 7, 8), "f4") ** 9
    values[0, :4, 0] = np.nan, np.inf, -np.inf, np.finfo("f4").max
    values[1] = (np.arange(7 * 8, dtype="u4") * 0x1000 + 0x3F800000).view("f4").reshape(7, 8)
    kernels, precision = device.backend.kernels, ComputePrecision("bfloat16")
    kernels.int64_threshold = wide
    x, launches_before = device.xp.array(values)[:, 1::2].swapaxes(0, 2), device.launches
    rounded = kernels.round_operand(x, precision)
    assert device.launches - launches_before <= 1
    np.testing.assert_array_equal(to_host(rounded), precision.round_to_operands(values[:, 1::2].swapaxes(0, 2)))


@settings(max_examples=20, deadline=None)
@given(st.data(), st.sampled_from(["float32", "float64"]))
def test_pooling_is_one_launch_per_pass(data, dtype):
    """Pool views of a larger array of integers, many of which are equal."""
    device, axes = select_device(), data.draw(st.integers(1, 3))
    kernel, stride, out_extent = (data.draw(st.tuples(*[st.integers(1, 3)] * axes)) for _ in range(3))
    extent = [k + n - 1 for k, n in zip(kernel, out_extent, strict=True)]
    buffer = np.rint(draw_values([4, *(n + 2 for n in extent), 3], dtype) / 60).astype(dtype)
    view, results = (slice(0, 2), *(slice(1, 1 + n) for n in extent)), []
    for kernels, to_array in (REFERENCE, np.array), (device.backend.kernels, device.xp.array):
        x, launches_before = to_array(buffer)[view], device.launches
        y, positions = kernels.max_pool(x, kernel, stride)
        dy = to_array(draw_values(y.shape, dtype, 1))
        dx = kernels.max_pool_backward(dy, positions, extent, kernel, stride)
        results.append((to_host(y), to_host(positions), to_host(dx)))
    assert device.launches - launches_before <= 2
    for expected, actual in zip(*results, strict=True):
        np.testing.assert_array_equal(expected, actual)


@settings(max_examples=20, deadline=None)
@given(st.data(), st.integers(2, 3), st.integers(1, 2))
def test_depthwise_convolution_is_one_launch_per_pass(data, channels, multiplier):
    device, axes = select_device(), data.draw(st.integers(1, 3))
    kernel, stride, dilation, out_extent = (data.draw(st.tuples(*[st.integers(1, 3)] * axes)) for _ in range(4))
    extent = [d * (k - 1) + n for k, d, n in zip(kernel, dilation, out_extent, strict=True)]
    buffer, weights = (
        draw_values([4, *(n + 2 for n in extent), channels], "f8"),
        draw_values((*kernel, 1, channels * multiplier), "f8"),
    )
    view, options, results = (slice(0, 2), *(slice(1, 1 + n) for n in extent)), (stride, dilation, channels), []
    for kernels, to_array in (REFERENCE, np.array), (device.backend.kernels, device.xp.array):
        x, w, launches_before = to_array(buffer)[view], to_array(weights), device.launches
        y = kernels.conv_forward(x, w, *options)
        dx = kernels.conv_backward_input(to_array(draw_values(y.shape, "f8", 1)), w, extent, *options)
        results.append((to_host(y), to_host(dx)))
    assert device.launches - launches_before <= 2
    for expected, actual in zip(*results, strict=True):
        np.testing.assert_allclose(expected, actual, rtol=1e-12, atol=1e-9)


@pytest.mark.parametrize("mode", ["zeros", "reflect", "wrap"])
def test_halo_exchange_is_two_launches_and_one_synchronisation(mode):
    window = nd.Window(kernel=(5, 3), padding=((2, 2), (1, 1)), mode=mode)

    def exchange_halo(comm, device):
        array = nd.GlobalArray(
            nd.ProcessGrid(comm, rows=3, cols=3), (2, 7, 8, 3), window, backend=device.backend if device else "numpy"
        )
        xp = device.xp if device else np
        tile = xp.array(draw_values((2, *array.own.shape, 3), "float32", comm.rank))
        view = array.get_fprop_view(tile)
        results = [view, array.get_bprop_view(view)]
        if device is None:
            return results
        buffer, counts = array.buffer(2), []
        for halo in (buffer.gather, buffer.scatter_add):
            counts_before = device.launches, device.synchronisations
            halo.exchange()
            counts.append((device.launches - counts_before[0], device.synchronisations - counts_before[1]))
        assert counts == [(2, 1), (2, 1)] or ON_GPU
        return [xp.asnumpy(result) for result in results]

    for expected, results in zip(
        loopback.run(9, lambda comm: exchange_halo(comm, None)),
        loopback.run(9, lambda comm: exchange_halo(comm, select_device())),
        strict=True,
    ):
        for reference, actual in zip(expected, results, strict=True):
            np.testing.assert_array_equal(reference, actual)
