"""Compiled kernels over cells against those of NumPy in float64, and against PyTorch."""

import numpy as np
import pytest

from neondist.backends import Kernels, Normalisation, get_backend
from neondist.backends import cells as cells_module

pytestmark = pytest.mark.skipif(cells_module.compiled() is None, reason="neondist was installed without a C compiler")
SHAPES = [
    (3, 5, 7, 4),
    (2, 40, 41, 16),
    (1, 6, 3, 5, 300),
    (2, 9000, 1),
    (4, 130),
    (3, 1, 1, 2),
    (2, 0, 4),
    (0, 3, 3, 2),
]
REFERENCE = Kernels()


def placed(array, how):
    """Return the same numbers, laid out otherwise."""
    if how == "whole" or array.ndim < 3:
        return array
    room = np.full([n + 3 for n in array.shape], np.nan, array.dtype)
    middle = tuple(slice(1, n + 1) for n in array.shape[1:-1])
    view = room[(slice(0, len(array)), *middle, slice(0, array.shape[-1]))]  # cells with a gap between them
    if how == "rows":
        room = np.full([*(n + 3 for n in array.shape[:-1]), array.shape[-1]], np.nan, array.dtype)
        view = room[(slice(1, len(array) + 1), *middle)]
    elif how == "backwards":
        view = view[:, ::-1]
    view[...] = array
    return view


@pytest.mark.parametrize("layout", ["whole", "rows", "cells", "backwards"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.long
def test_equals_the_reference(kernels, shape, dtype, layout):
    rng = np.random.default_rng(0)
    x, dy = (rng.normal(1, 2, shape).astype(dtype) for _ in range(2))
    wide, wide_dy = x.astype("float64"), dy.astype("float64")
    x, dy, y = (placed(array, layout) for array in (x, dy, np.zeros_like(x)))
    close = {"rtol": 1e-12, "atol": 1e-11} if dtype == "float64" else {"rtol": 1e-5, "atol": 2e-3}
    expected = np.empty(shape)

    def check(found, wanted):
        assert found.dtype == x.dtype
        np.testing.assert_allclose(found, wanted, **close)

    kernels.relu(x, y)
    check(y, np.maximum(wide, 0))
    check(kernels.relu_backward(x, dy), wide_dy * (wide > 0))
    kernels.add([x, dy], y, clip=True)
    check(y, np.maximum(wide + wide_dy, 0))
    kernels.add([x, dy, x], y)
    check(y, wide + wide_dy + wide)
    check(kernels.channel_sum(x), wide.sum(axis=tuple(range(x.ndim - 1))))
    if x.ndim > 2:
        check(kernels.sample_sum(x), wide.sum(axis=tuple(range(1, x.ndim - 1))))
    for by_sample in (False, True):
        found, wanted = kernels.moments(x, by_sample), REFERENCE.moments(wide, by_sample)
        for one, other in zip(found, wanted, strict=True):
            check(one, other)
        groups = len(x) if by_sample else 1
        numbers = [rng.normal(1, 1, (groups, shape[-1])).astype(dtype) for _ in range(6)]
        for clip in (False, True):
            how, widened = (
                Normalisation(*numbers[:3], clip),
                Normalisation(*(each.astype("float64") for each in numbers[:3]), clip),
            )
            kernels.normalise(x, how, y)
            REFERENCE.normalise(wide, widened, expected)
            check(y, expected)
            sums = zip(
                kernels.normalise_sums(x, dy, how), REFERENCE.normalise_sums(wide, wide_dy, widened), strict=True
            )
            for one, other in sums:
                check(one, other)
            kernels.normalise_back(x, dy, how, numbers[3:], y)
            REFERENCE.normalise_back(wide, wide_dy, widened, numbers[3:], expected)
            check(y, expected)


def test_they_are_what_runs(kernels):
    """Strides of rows and cells are no reason for NumPy; other types and cells that are not in one piece are."""
    x = np.ones((2, 5, 6, 4), np.float32)
    assert kernels._run("clip", placed(x, "rows"), placed(x, "cells"))
    assert not kernels._run("clip", x.astype("float16"), x.astype("float16"))
    assert not kernels._run("clip", x.swapaxes(1, 3), x.swapaxes(1, 3).copy())
    assert not kernels._run("clip", x, x.astype("float64"))
    assert not kernels._run("clip", x, x[:1])
    assert not kernels._run("normalise", x, x, by=np.ones((3, 1, 5)))
    assert not kernels._run("normalise", x, x, by=np.ones((3, 3, 4)))
    kernels.relu(x.astype("float16"), half := np.empty(x.shape, "float16"))
    assert (half == 1).all()
    with pytest.raises(ValueError, match="kernel 'clap' is unknown"):
        kernels._run("clap", x, x)


@pytest.mark.parametrize("by_sample", [False, True])
@pytest.mark.parametrize("case", ["far from zero", "far, one thing after the other", "an odd first cell"])
def test_moments_do_not_cancel(kernels, case, by_sample):
    """float32 numbers with a mean of 1e5 deviations; also where the first cells are not like the others."""
    rng = np.random.default_rng(0)
    x = rng.normal(0, 1, (2, 300, 70, 3))
    x += {"far from zero": 1e5, "an odd first cell": 10}.get(case, np.linspace(-1e5, 1e5, 300)[:, None, None])
    if case == "an odd first cell":
        x[:, 0, 0] = 1e6
    x = x.astype("float32")
    mean, squares = kernels.moments(x, by_sample)
    wanted_mean, wanted = REFERENCE.moments(x.astype("float64"), by_sample)
    np.testing.assert_allclose(mean, wanted_mean, rtol=1e-6, atol=1e-3)
    np.testing.assert_allclose(squares, wanted, rtol=1e-4)


def test_what_is_no_number_stays_so(kernels):
    x = np.array([[np.nan, -1, np.inf, 2]], np.float32)
    kernels.relu(x, y := np.empty_like(x))
    np.testing.assert_array_equal(y, [[np.nan, 0, np.inf, 2]])


@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_backends_have_them(name):
    if name == "torch":
        pytest.importorskip("torch")
    backend = get_backend(name)
    assert backend.kernels.compiled is not None
    backend.close()
