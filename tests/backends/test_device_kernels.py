"""Kernels of a GPU, compiled from the same text for the CPU, against the reference; and how often they are started."""

import numpy as np
import pytest
from device import ON_GPU, device_under_test
from device_twin import compiler
from hypothesis import given, settings
from hypothesis import strategies as st

import neondist as nd
from neondist.backends import Kernels
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
    array, cuts = numbers(shape, dtype), data.draw(st.lists(boxes(shape), min_size=3, max_size=6))
    parts = [numbers(array[cut].shape, dtype, seed) for seed, cut in enumerate(cuts, start=1)]
    there = device.xp.array(array)
    brought = [device.xp.array(part) for part in parts]
    before = device.launches
    device.backend.kernels.add_boxes(there, cuts, brought)
    assert device.launches - before <= 1
    REFERENCE.add_boxes(array, cuts, parts)
    np.testing.assert_array_equal(device.xp.asnumpy(there), array)


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
