"""Random numbers from indices."""

import numpy as np
import pytest

from neondist import rng


@pytest.mark.parametrize("rate", [0.0, 0.4, 0.5, 1 / 3, 2.0**-60, 1 - 2.0**-53])
@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (7, 5000)])
def test_the_bits_choose_as_the_numbers_do(rate, shape):
    index = np.arange(np.prod(shape, dtype=int), dtype=np.uint64).reshape(shape) * np.uint64(7)
    for stream in 0, 12345, 2**64 - 1:
        np.testing.assert_array_equal(rng.at_least(rate, stream, index), rng.uniform(stream, index) >= rate)
