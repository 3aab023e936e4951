"""Minimum times of training steps on this machine, from which benchmarks initially estimate their duration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..backends import get_backend
from ..comm import SingleTransport
from ..train.validate import experiment_grid_shape
from .roofline import measure_rank_rates

MATRIX_EXTENT, COPIED_BYTES, TIMED_CALLS = 512, 1 << 25, 3  # a quick measurement
MAX_SAVED_PRODUCTS = 6.25
"""largest ratio of a plan's flops to those of Winograd's algorithm, reached by 5 x 5 kernels"""


@dataclass(frozen=True)
class CoreSpeed:
    """Speed of one core, from a quick measurement.

    Attributes
    ----------
    flops : float
        Floating-point operations per second of a matrix product.
    bandwidth : float
        Bytes per second that a copy reads and writes.
    """

    flops: float
    bandwidth: float

    @classmethod
    def measure(cls) -> CoreSpeed:
        """Return the speed of this process with one thread."""
        from threadpoolctl import threadpool_limits

        sizes = MATRIX_EXTENT, COPIED_BYTES, TIMED_CALLS
        with threadpool_limits(1):
            return cls(*measure_rank_rates(SingleTransport(), np.matmul, np.dtype(np.float32), *sizes))

    def step_seconds_lower_bound(self, experiment: Any, ranks: int, cores: int | None = None) -> float:
        """Return the minimum seconds of a step on the busiest of `ranks` ranks; 0 on a GPU, whose speed is unknown.

        The ranks share `cores` cores; default: one core each.
        """
        model, dataset = experiment.model, experiment.dataset
        if get_backend(model.backend).name == "cupy":
            return 0.0
        shape = experiment_grid_shape(experiment, ranks)
        workload = model.plan(dataset.sample_shape, shape, experiment.batch_size).workload
        core_share = 1.0 if cores is None else ranks / cores
        return core_share * self.seconds_lower_bound(workload.flops, workload.memory_traffic)

    def seconds_lower_bound(self, flops: float, memory_traffic: float = 0.0) -> float:
        """Return the minimum seconds that one core takes for the work of a plan."""
        return float(max(flops / MAX_SAVED_PRODUCTS / self.flops, memory_traffic / self.bandwidth))
