"""Measuring the machine at hand: messages between two ranks, and what cores take from each other."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from ...comm import Message, Transport
from ...costs import CrossEntropy
from ...layers import ConvLayer, FCLayer, MaxPoolingLayer, RectLin
from ...models import Convnet
from ..rest import rest
from .machine import Link, Machine

SIZES = (1 << 8, 1 << 12, 1 << 15, 1 << 18, 1 << 20, 1 << 22)
REPEATS = 7


def calibrate(world: Transport, cores: int) -> Machine:
    """Return the machine that these ranks (two at least) run on, as one node; collective."""
    times = [_pair(world, size) for size in SIZES]
    # relative errors count: a latency would not be seen beside the largest messages
    matrix = np.array([[1.0, size] for size in SIZES]) / np.array(times)[:, None]
    (latency, per_byte), *_ = np.linalg.lstsq(matrix, np.ones(len(SIZES)), rcond=None)
    link = Link(max(float(latency), min(times) / 2), 1 / max(float(per_byte), 1e-13))
    return Machine(cores, link, link, nodes=1, slowdown=max(1.0, _slowdown(world)))


def _pair(world: Transport, size: int) -> float:
    """Return the seconds in which ranks 0 and 1 exchange messages of so many bytes."""
    array = np.zeros((2, size), np.uint8)
    peer = {0: [1], 1: [0]}.get(world.rank, [])
    here, there = (slice(0, 1), slice(0, size)), (slice(1, 2), slice(0, size))
    exchange = world.exchange([Message(p, array, here) for p in peer], [Message(p, array, there) for p in peer])
    count = max(5, min(200, (1 << 24) // size))
    return min(_timed(world, exchange.run, count) for _ in range(REPEATS))


def _slowdown(world: Transport) -> float:
    """Return how much longer a training step takes while all ranks work on one."""
    model = Convnet(
        [ConvLayer(16, 3, padding=1, activation=RectLin()), ConvLayer(32, 3), MaxPoolingLayer(2), FCLayer(10)],
        CrossEntropy(),
    )
    model.build((128, 128, 8), 2)
    x, targets = np.ones((2, 128, 128, 8), np.float32), np.zeros(2, int)

    def step() -> None:
        model.train_batch(x, targets)

    def nothing() -> None:
        pass

    step()
    pairs = [(_timed(world, step, 3), _timed(world, nothing if world.rank else step, 3)) for _ in range(REPEATS)]
    return float(np.median([together / alone for together, alone in pairs]))


def _timed(world: Transport, call: Callable[[], Any], count: int) -> float:
    """Return the seconds of a call, of the slowest rank."""
    rest(world)
    begin = time.perf_counter()
    for _ in range(count):
        call()
    taken = time.perf_counter() - begin
    rest(world)
    return max(world.allgather(taken)) / count
