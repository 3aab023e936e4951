"""Counter-based random numbers."""

import zlib

import numpy as np
import pytest
from scipy.special import ndtri

import neondist as nd
from neondist.arrays import rng


def test_keys_equal_uniform_bits():
    """`key`, computed from integers, and `uniform`, from arrays, use the same bits."""
    index = np.zeros(1, np.uint64)
    for part in 0, 7, 2**63 + 5, 2**64 - 1, "dropout":
        parent = rng.key(3, "x")
        stream = parent + (zlib.crc32(part.encode()) if isinstance(part, str) else part) & 2**64 - 1
        assert rng.uniform(stream, index) == (rng.key(3, "x", part) >> 11) * 2.0**-53


@pytest.mark.parametrize("rate", [0.0, 0.4, 0.5, 1 / 3, 2.0**-60, 1 - 2.0**-53])
@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (7, 5000)])
def test_at_least_matches_uniform(rate, shape):
    index = np.arange(np.prod(shape, dtype=int), dtype=np.uint64).reshape(shape) * np.uint64(7)
    for stream in 0, 12345, 2**64 - 1:
        np.testing.assert_array_equal(rng.uniform_at_least(rate, stream, index), rng.uniform(stream, index) >= rate)


def test_coarse_normal_values_are_quantiles():
    index, stream = np.arange(100000, dtype=np.uint64).reshape(100, -1), rng.key(3, "x")
    expected = ndtri((np.floor(65536 * rng.uniform(stream, index)) + 0.5) / 65536)
    np.testing.assert_allclose(rng.coarse_normal(stream, index), expected, rtol=0, atol=1e-12)


def test_normal_distribution():
    x = rng.normal(rng.key(1, "a"), np.arange(200_000, dtype=np.uint64))
    for power, moment in enumerate([0, 1, 0, 3, 0, 15], start=1):
        assert abs(np.mean(x**power) - moment) < 0.03 * 3 ** (power / 2)
    for limit, probability in (0.5, 0.3829), (1, 0.6827), (2, 0.9545):
        assert abs(np.mean(np.abs(x) < limit) - probability) < 0.005


@pytest.mark.parametrize(
    ("initializer", "variance", "maximum"),
    [
        (nd.Constant(2.5), 0, 2.5),
        (nd.Gaussian(0.3), 0.09, np.inf),
        (nd.Uniform(-0.2, 0.4), 0.6**2 / 12, 0.4),
        (nd.FanInNormal(2**0.5), 2 / 50, np.inf),
        (nd.FanInUniform(), 1 / 150, 50**-0.5),
        (nd.GlorotUniform(), 2 / 80, (6 / 80) ** 0.5),
    ],
)
def test_initial_weights_have_the_expected_variance(initializer, variance, maximum):
    values = initializer.values(rng.key(3, "weights"), np.arange(50_000, dtype=np.uint64), fan_in=50, fan_out=30)
    assert values.var() == pytest.approx(variance, rel=0.03)
    assert values.max() <= maximum
    assert maximum == np.inf or values.max() > 0.99 * maximum
