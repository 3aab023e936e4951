"""Random images, and checks of sources that read them."""

import numpy as np

import neondist as nd


def draw_image(shape, dtype="uint8", seed=0):
    """Return random values from 0 to 200."""
    return (np.random.default_rng(seed).random(shape) * 200).astype(dtype)


def check_source(source, expected):
    """Check all values of a source, and those of a box inside."""
    np.testing.assert_array_equal(source.read(nd.Box.of(source.shape)), expected)
    box = tuple(slice(n // 3, n // 3 + max(1, n // 2)) for n in expected.shape)
    np.testing.assert_array_equal(source.read(box), expected[box])
