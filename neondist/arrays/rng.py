"""Random numbers keyed by (seed, purpose, step, GLOBAL index), never by rank.

A counter-based generator: number i of a stream is a pure function of the stream's key and i, so each rank generates
only the numbers of its cells, and the numbers are the same on all grids (Salmon et al. 2011). The mixing function is
splitmix64 (Steele, Lea and Flood 2014).
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import cache
from math import ceil, pi
from typing import Any

import numpy as np

from .namespace import namespace

_SPLITMIX_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_FACTOR_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_FACTOR_2 = np.uint64(0x94D049BB133111EB)
_LOW_64_BITS = (1 << 64) - 1
_QUANTILE_COUNT = 1 << 16
_ELEMENTS_PER_BLOCK = 1 << 14  # elements per block, which fit in the cache


def key(*parts: int | str) -> int:
    """Return the 64-bit key of a stream, from integers and names such as (seed, 'dropout', layer name, step)."""
    mixed_bits = 0
    for part in parts:  # as in `_mix_bits_in_place`, with Python integers: arrays of one number are ten times slower
        z = (
            mixed_bits + int(_SPLITMIX_GAMMA) + (zlib.crc32(part.encode()) if isinstance(part, str) else int(part))
        ) & _LOW_64_BITS
        z = (z ^ z >> 30) * int(_MIX_FACTOR_1) & _LOW_64_BITS
        z = (z ^ z >> 27) * int(_MIX_FACTOR_2) & _LOW_64_BITS
        mixed_bits = z ^ z >> 31
    return mixed_bits


def shuffled_indices(samples: int, seed: int, epoch: int) -> np.ndarray:
    """Return the order of an epoch's samples (int, shape (samples,)), the same on all ranks."""
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(samples)


def uniform(stream: int, index: Any) -> Any:
    """Return float64 numbers in [0, 1), one for each entry of `index` (uint64, any shape)."""
    return (_random_bits(stream, namespace(index).asarray(index, np.uint64)) >> np.uint64(11)) * 2.0**-53


def uniform_at_least(rate: float, stream: int, index: Any) -> Any:
    """Return the mask `uniform(stream, index) >= rate` for rate in [0, 1), computed from bits in cache-sized blocks."""
    xp = namespace(index)
    index = xp.asarray(index, np.uint64)
    flat, is_at_least = index.reshape(-1), xp.empty(index.shape, bool)
    flat_result, min_bits = is_at_least.reshape(-1), np.uint64(ceil(rate * 2.0**53) << 11)
    for start in range(0, flat.size, _ELEMENTS_PER_BLOCK):
        block = slice(start, start + _ELEMENTS_PER_BLOCK)
        xp.greater_equal(_random_bits(stream, flat[block]), min_bits, out=flat_result[block])
    return is_at_least


def normal(stream: int, index: Any) -> Any:
    """Return standard normal float64 numbers, one for each entry of `index` (Box and Muller 1958)."""
    xp = namespace(index)
    index = xp.asarray(index, np.uint64)
    radius = xp.sqrt(-2.0 * xp.log1p(-uniform(stream, index)))
    return radius * xp.cos(2.0 * pi * uniform(key(stream, "angle"), index))


def coarse_normal(stream: int, index: np.ndarray) -> np.ndarray:
    """Return normal numbers at a quarter of the cost of `normal`: 2¹⁶ equally probable values within ±4.4."""
    quantile_index = _random_bits(stream, index)
    quantile_index >>= np.uint64(48)
    return _normal_quantiles().take(quantile_index.view(np.int64))


@cache
def _normal_quantiles() -> np.ndarray:
    from statistics import NormalDist  # a slow import

    lower = np.array([NormalDist().inv_cdf((at + 0.5) / _QUANTILE_COUNT) for at in range(_QUANTILE_COUNT // 2)])
    return np.concatenate([lower, -lower[::-1]])


def row_major_indices(shape: Sequence[int], slices: Sequence[slice], xp: Any = np) -> Any:
    """Return the row-major indices, in an array of `shape`, of the cells that `slices` selects: uint64 of `xp`."""
    index = xp.zeros((1,) * len(shape), np.uint64)
    stride = 1
    for axis in range(len(shape) - 1, -1, -1):
        axis_indices = xp.arange(*slices[axis].indices(shape[axis]), dtype=np.uint64) * np.uint64(stride)
        index = index + axis_indices.reshape((-1,) + (1,) * (len(shape) - 1 - axis))
        stride *= shape[axis]
    return index


def _random_bits(stream: int, index: Any) -> Any:
    bits = (index + np.uint64(1)).reshape(-1) * _SPLITMIX_GAMMA + np.uint64(stream)
    return _mix_bits_in_place(bits).reshape(index.shape)


def _mix_bits_in_place(bits: Any) -> Any:
    """Mix the bits in place, and return them."""
    right_shift, shifted = namespace(bits).right_shift, bits >> np.uint64(30)
    bits ^= shifted
    bits *= _MIX_FACTOR_1
    right_shift(bits, np.uint64(27), out=shifted)
    bits ^= shifted
    bits *= _MIX_FACTOR_2
    right_shift(bits, np.uint64(31), out=shifted)
    bits ^= shifted
    return bits
