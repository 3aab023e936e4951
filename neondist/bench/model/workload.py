"""Workload of calibration: matrix products, copies, and convolutions in training."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ...costs import CrossEntropy
from ...layers import ConvLayer, FCLayer, MaxPoolingLayer, ReLU
from ...models import Convnet

MATRIX_EXTENT = 256
"""extent of the matrices, which fit in a core's own cache"""
COPIED_BYTES = 1 << 26
"""bytes to copy, more than fit in the caches"""


class BenchmarkWork(NamedTuple):
    """A function to time, and its number of operations, or of bytes read and written."""

    call: Callable[[], Any]
    operations_or_bytes: float


def matrix_product_work() -> BenchmarkWork:
    """Return a matrix product, limited by the core."""
    a, b = np.ones((2, MATRIX_EXTENT, MATRIX_EXTENT), np.float32)
    out = np.empty_like(a)
    return BenchmarkWork(lambda: np.matmul(a, b, out=out), 2 * MATRIX_EXTENT**3)


def memory_copy_work() -> BenchmarkWork:
    """Return a copy, limited by memory bandwidth."""
    source, target = np.ones((2, COPIED_BYTES // 8))
    return BenchmarkWork(lambda: np.copyto(target, source), 2 * COPIED_BYTES)


class ConvolutionWork:
    """Training steps of a small network."""

    SHAPE = (128, 128, 8)

    def __init__(self) -> None:
        self.model = Convnet(
            [ConvLayer(16, 3, padding=1, activation=ReLU()), ConvLayer(32, 3), MaxPoolingLayer(2), FCLayer(10)],
            cost=CrossEntropy(),
        )
        self.model.build(self.SHAPE, 2)
        self.x, self.targets = np.ones((2, *self.SHAPE), np.float32), np.zeros(2, int)
        self.step()

    def step(self) -> None:
        """Train on a batch."""
        self.model.train_batch(self.x, self.targets)

    @property
    def operations(self) -> float:
        """Number of operations of a step: the forward pass, and the gradients of weights and inputs."""
        convolutions = (layer for layer in self.model.leaves if layer.window is not None and layer.params)
        return sum(3 * 2 * 2 * prod(layer.output_shape[:-1]) * layer.params["weights"].size for layer in convolutions)
