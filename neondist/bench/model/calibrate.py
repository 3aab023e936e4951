"""Measuring the machine at hand: messages between two ranks, and what ranks take from each other.

Ranks beyond the cores sleep, except where it is measured what sharing costs.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np

from ...comm import Message, Transport
from ...machine import Link, Machine
from ..rest import rest
from .workload import Convolving, copying, multiplying

SIZES = (1 << 8, 1 << 12, 1 << 15, 1 << 18, 1 << 20, 1 << 22)
REPEATS, TURN = 7, 0.1
PIECES = (2e-3, 3e-2)
"""seconds that ranks which share cores compute between two meetings: less than a slice of the system's, and many"""


def calibrate(world: Transport, cores: int) -> Machine:
    """Return the machine that these ranks (two at least) run on, as one node of so many cores; collective."""
    cores = min(cores, world.size)
    convolving = Convolving()
    product, copy, alone = multiplying(), copying(), _timed(world, convolving.step, 3, 1)
    slowdown, at_memory = (_slowdown(world, work.call, cores) for work in (product, copy))
    link = _link(world)
    machine = Machine(
        cores,
        link,
        link,
        nodes=1,
        slowdown=slowdown,
        memory_slowdown=max(slowdown, at_memory),
        memory_bandwidth=copy.amount / _timed(world, copy.call, 1, 1),
        speed=convolving.operations / alone,
        host=platform.node(),
    )
    if world.size < 2 * cores:
        return machine
    factor, latency = _sharing(world, cores, product.call, slowdown)
    return replace(machine, shared_slowdown=factor, shared_latency=latency)


def _link(world: Transport) -> Link:
    times = [_pair(world, size) for size in SIZES]
    # relative errors count: a latency would not be seen beside the largest messages
    matrix = np.array([[1.0, size] for size in SIZES]) / np.array(times)[:, None]
    (latency, per_byte), *_ = np.linalg.lstsq(matrix, np.ones(len(SIZES)), rcond=None)
    return Link(max(float(latency), min(times) / 2), 1 / max(float(per_byte), 1e-13))


def _pair(world: Transport, size: int) -> float:
    """Return the seconds in which ranks 0 and 1 exchange messages of so many bytes."""
    array = np.zeros((2, size), np.uint8)
    peer = {0: [1], 1: [0]}.get(world.rank, [])
    here, there = (slice(0, 1), slice(0, size)), (slice(1, 2), slice(0, size))
    exchange = world.exchange([Message(p, array, here) for p in peer], [Message(p, array, there) for p in peer])
    return _timed(world, exchange.run, max(5, min(200, (1 << 24) // size)), 2)


def _slowdown(world: Transport, work: Callable[[], Any], cores: int) -> float:
    """Return how much longer some work takes while all cores are at it."""
    count = max(1, round(TURN / _timed(world, work, 1, 1)))  # short turns begin at different moments
    pairs = [(_once(world, work, count, cores), _once(world, work, count, 1)) for _ in range(REPEATS)]
    return max(1.0, median(together / alone for together, alone in pairs))


def _sharing(world: Transport, cores: int, work: Callable[[], Any], slowdown: float) -> tuple[float, float]:
    """Return what computing takes over its share of a core, and the seconds a meeting, with two ranks on each core."""
    ranks = 2 * cores
    word, unit = np.zeros(1), _timed(world, work, 3, 1)
    group = world.split(int(world.rank >= ranks), world.rank)
    fair, taken, few = [], [], max(1, round(PIECES[0] / unit))
    for count in few, max(few + 1, round(PIECES[1] / unit)):

        def compute_and_meet(count: int = count) -> None:
            for _ in range(count):
                work()
            group.allreduce(word)

        fair.append(2 * slowdown * count * unit)
        taken.append(median(_once(world, compute_and_meet, 20, ranks) for _ in range(3)))
    factor = max(1.0, (taken[1] - taken[0]) / (fair[1] - fair[0]))
    return factor, max(0.0, taken[0] - factor * fair[0])


def _timed(world: Transport, call: Callable[[], Any], count: int, ranks: int) -> float:
    """Return the seconds of a call on so many ranks, while the others sleep: the fastest of some turns."""
    return min(_once(world, call, count, ranks) for _ in range(REPEATS))


def _once(world: Transport, call: Callable[[], Any], count: int, ranks: int) -> float:
    """Return the seconds of a call, of the slowest rank."""
    rest(world)
    begin = time.perf_counter()
    for _ in range(count if world.rank < ranks else 0):
        call()
    taken = time.perf_counter() - begin
    rest(world)
    return max(world.allgather(taken)) / count
