"""Calibration on this machine: messages between two ranks, and slowdowns of ranks that share resources.

Each round takes every measurement once; results are medians over the rounds. A slowdown is the median of the ratios
within a round, because the speed of a core changes by up to a half from one second to the next (frequency scaling,
other guests of a host), so that times from different rounds are not comparable. Idle ranks sleep.
"""

from __future__ import annotations

import itertools
import platform
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from math import prod
from statistics import mean, median
from typing import Any

import numpy as np

from ...comm import Message, ProcessGrid, Transport
from ...costs import CrossEntropy
from ...geometry import grid_shape
from ...layers import ConvLayer, FCLayer, MaxPoolingLayer, ReLU
from ...models import Convnet
from ...system.machine import Link, Machine
from ...terminal.console import counted
from ...terminal.progress_line import ProgressLine, SilentProgress
from ..least_time import CoreSpeed
from ..networks import NETWORKS
from ..noise import relative_noise
from ..roofline import COPIED_BYTES, BenchmarkWork, matrix_product_work, memory_copy_work
from ..sleeping_barrier import sleeping_barrier
from ..step import ROUND_SECONDS, bench_step
from .predict import predict_step
from .rank_profile import LEAST_STEPS, PREDICTION_SECONDS, profile_busiest_rank

MESSAGE_SIZES = (1 << 8, 1 << 12, 1 << 15, 1 << 18, 1 << 20, 1 << 22)
MATRIX_EXTENT, CONVOLVED_SHAPE = 256, (128, 128, 8)
"""extent of matrices that fit in a core's own cache, and sample shape of a small network"""
CALIBRATION_ROUNDS, TURN_SECONDS = 12, 0.1
VALIDATION_NETWORKS, MEASURED_STEPS = ("mnist", "separable", "lcn"), 10
SYNC_INTERVAL_SECONDS = (2e-3, 3e-2)
"""seconds between two synchronisations of ranks that share cores: less than one scheduler time slice, and several"""


def part_seconds_lower_bounds(world: Transport, cores: int) -> list[float]:
    """Return the minimum seconds of each part of `calibrate` and `measure_prediction_error`, for the progress line."""
    sharing = 6 * max(SYNC_INTERVAL_SECONDS) * (world.size >= 2 * cores)  # three intervals at half the speed
    speed, parts = CoreSpeed.measure(), [2 * TURN_SECONDS + sharing] * CALIBRATION_ROUNDS
    for name, ranks in _validation_cases(world, cores):
        experiment = NETWORKS[name].experiment()
        experiment.dataset.check()
        step = speed.step_seconds_lower_bound(experiment, ranks)
        parts.append(max(PREDICTION_SECONDS, LEAST_STEPS * step) + max(ROUND_SECONDS, MEASURED_STEPS * step))
    return parts


def calibrate(world: Transport, cores: int, progress: ProgressLine | None = None) -> tuple[Machine, float]:
    """Return the machine of these ranks (at least two) as one node of `cores` cores, and the noise. Collective.

    The noise is the relative excess of a matrix product's median time over its minimum; large if other programs run.
    """
    progress, planned = progress or SilentProgress(), part_seconds_lower_bounds(world, cores) if world.rank == 0 else []
    progress.set_total_parts(len(planned), planned_seconds=planned)
    progress.begin_part("preparing messages and kernels")
    cores, timings = min(cores, world.size), _Timings(world)
    convolving, product = convolution_work(), matrix_product_work(MATRIX_EXTENT, np.float32)
    copy = memory_copy_work(COPIED_BYTES)
    pairs = {size: _create_two_rank_exchange(world, size) for size in MESSAGE_SIZES}
    unit = min(timings.time_calls("unit", product.call, 3, 1) for _ in range(3))
    few, many = (max(least, round(piece / unit)) for least, piece in zip((1, 2), SYNC_INTERVAL_SECONDS, strict=True))
    group = world.split(int(world.rank >= 2 * cores), world.rank)
    progress.set_total_parts(len(planned), planned_seconds=planned)  # restart the estimate after the preparation
    progress.begin_part("messages and kernels")
    for _ in range(CALIBRATION_ROUNDS):
        for size, exchange in pairs.items():
            timings.time_calls(size, exchange, max(5, min(200, (1 << 24) // size)), 2)
        timings.time_calls("convolving", convolving.call, 3, 1)
        for name, work in ("product", product), ("copy", copy):
            count = max(1, round(TURN_SECONDS / unit)) if work is product else 2
            timings.time_calls((name, "alone"), work.call, count, 1)
            timings.time_calls((name, "shared"), work.call, count, cores)
        for count in (few, many) if world.size >= 2 * cores else ():
            timings.time_calls(
                ("shared", count), _work_and_synchronise(product.call, count, group), max(2, many // count), 2 * cores
            )
        progress.add_done_parts(1)
    median_seconds = {name: median(taken) for name, taken in timings.seconds_by_name.items()}
    noise = max(relative_noise(timings.seconds_by_name["product", sharing]) for sharing in ("alone", "shared"))
    slowdown, memory_slowdown = (_fit_slowdown(timings.seconds_by_name, name) for name in ("product", "copy"))
    link = _fit_link({size: median_seconds[size] for size in MESSAGE_SIZES})
    machine = Machine(
        cores,
        link,
        link,
        nodes=1,
        slowdown=slowdown,
        memory_slowdown=max(slowdown, memory_slowdown),
        memory_bandwidth=copy.operations_or_bytes / median_seconds["copy", "alone"],
        speed=convolving.operations_or_bytes / median_seconds["convolving"],
        host=platform.node(),
    )
    if world.size < 2 * cores:
        return machine, noise
    factor, latency = _fit_core_sharing(timings.seconds_by_name, few, many)
    return replace(machine, shared_slowdown=factor, shared_latency=latency), noise


def measure_prediction_error(
    world: Transport, cores: int, machine: Machine, progress: ProgressLine | None = None
) -> float:
    """Return the mean relative error of predicted step times of some networks, on up to `cores` ranks. Collective."""
    errors, progress = [], progress or SilentProgress()
    for name, ranks in _validation_cases(world, cores):
        progress.begin_part(f"a step of {name}, {counted(ranks, 'rank')}")
        case, shape, predicted, taken = NETWORKS[name], grid_shape(ranks), 0.0, 0.0
        if world.rank == 0:
            predicted = predict_step(shape, machine, profile_busiest_rank(case.experiment(), shape))["seconds_per_step"]
        sleeping_barrier(world)
        group = world.split(int(world.rank >= ranks), world.rank)
        if world.rank < ranks:
            with ProcessGrid(group) as grid:
                taken = bench_step(case.experiment(), grid, MEASURED_STEPS)["seconds_per_step"]
        sleeping_barrier(world)
        predicted, taken = world.bcast((predicted, taken))
        errors.append(abs(predicted / taken - 1))
        progress.add_done_parts(1)
    return mean(errors)


def _validation_cases(world: Transport, cores: int) -> list[tuple[str, int]]:
    """Return the networks and rank counts to predict and measure."""
    return list(itertools.product(VALIDATION_NETWORKS, sorted({1, 2, min(cores, world.size)})))


def _fit_link(times: dict[int, float]) -> Link:
    """Fit a line to the times of messages, minimising relative errors; absolute errors would hide the latency."""
    taken = np.array(list(times.values()))
    matrix = np.array([[1.0, size] for size in times]) / taken[:, None]
    (latency, per_byte), *_ = np.linalg.lstsq(matrix, np.ones(len(taken)), rcond=None)
    return Link(max(float(latency), taken.min() / 2), 1 / max(float(per_byte), 1e-13))


def _fit_slowdown(seconds: Mapping[Hashable, Sequence[float]], name: str) -> float:
    """Return the time of a workload with all cores busy, relative to one busy core; at least 1; median over rounds."""
    pairs = zip(seconds[name, "alone"], seconds[name, "shared"], strict=True)
    return max(1.0, median(shared / alone for alone, shared in pairs))


def _fit_core_sharing(seconds: Mapping[Hashable, Sequence[float]], few: int, many: int) -> tuple[float, float]:
    """Return the median slowdown of ranks that share cores, and their median seconds of waiting per synchronisation."""
    rounds = list(zip(seconds["product", "shared"], seconds["shared", few], seconds["shared", many], strict=True))
    # two ranks take turns on a core
    factor = max(1.0, median((b - a) / (2 * product * (many - few)) for product, a, b in rounds))
    return factor, max(0.0, median(a - factor * 2 * product * few for product, a, _ in rounds))


def convolution_work() -> BenchmarkWork:
    """Return a training step of a small network: the forward pass, and the gradients of weights and inputs."""
    model = Convnet(
        [ConvLayer(16, 3, padding=1, activation=ReLU()), ConvLayer(32, 3), MaxPoolingLayer(2), FCLayer(10)],
        cost=CrossEntropy(),
    )
    model.build(CONVOLVED_SHAPE, 2)
    x, targets = np.ones((2, *CONVOLVED_SHAPE), np.float32), np.zeros(2, int)
    model.train_batch(x, targets)
    layers = [layer for layer in model.leaves if layer.window is not None and layer.params]
    products = sum(prod(layer.output_shape[:-1]) * layer.params["weights"].size for layer in layers)
    return BenchmarkWork(lambda: model.train_batch(x, targets), 3 * 2 * 2 * products)


def _create_two_rank_exchange(world: Transport, size: int) -> Callable[[], None]:
    """Return an exchange of messages of `size` bytes between ranks 0 and 1."""
    array = np.zeros((2, size), np.uint8)
    peer = {0: [1], 1: [0]}.get(world.rank, [])
    source, target = (slice(0, 1), slice(0, size)), (slice(1, 2), slice(0, size))
    return world.create_exchange(
        [Message(p, array, source) for p in peer], [Message(p, array, target) for p in peer]
    ).run


def _work_and_synchronise(work: Callable[[], Any], count: int, group: Transport) -> Callable[[], None]:
    """Return a function that calls `work` several times, then synchronises the group by an allreduce."""
    number = np.zeros(1)

    def run_work_and_allreduce() -> None:
        for _ in range(count):
            work()
        group.allreduce(number)

    return run_work_and_allreduce


class _Timings:
    """Timings in seconds per call, by name."""

    def __init__(self, world: Transport) -> None:
        self.world = world
        self.seconds_by_name: defaultdict[Hashable, list[float]] = defaultdict(list)

    def time_calls(self, name: Hashable, call: Callable[[], Any], count: int, ranks: int) -> float:
        """Return the seconds per call of the slowest of `ranks` ranks, while the others sleep."""
        sleeping_barrier(self.world)
        begin = time.perf_counter()
        for _ in range(count if self.world.rank < ranks else 0):
            call()
        taken = time.perf_counter() - begin
        sleeping_barrier(self.world)
        self.seconds_by_name[name].append(max(self.world.allgather(taken)) / count)
        return self.seconds_by_name[name][-1]
