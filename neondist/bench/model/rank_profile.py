"""Profile of one of many ranks, run alone in this process: compute time, messages and memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from ...comm.mpi import world_transport
from ...errors import LaunchError
from ...geometry import GridShape
from ...models import TrainableModel
from ...plan import Plan
from ...runtime.observers.clock import Clock
from ...system.job import detect_job
from .. import memory
from ..noise import relative_noise
from ..roofline import count_multiplications
from .dry_run import DryRunMessageLog, dry_run_grid

MAX_TURNS = 5
COMPARISON_SECONDS, PREDICTION_SECONDS = 0.1, 0.5
"""minimum compute time to measure, in seconds: for the comparison of grids, and for a prediction"""
LEAST_STEPS = 5
"""minimum number of steps of `profile_busiest_rank`: two for warm-up, two timed, and one timed by layer"""
_MEMORY_BATCHES = 4  # allocators keep and split freed memory, so each of the first batches may need more


@dataclass
class RankProfile:
    """Profile of one step of one rank.

    Attributes
    ----------
    seconds : compute time, the median of several turns
    noise : relative excess of the median turn over the fastest
    message_log : messages that the rank would send
    held_bytes : memory of the rank in bytes
    memory_traffic : minimum bytes read and written by the computation
    recomputed_fraction : multiplications that strips repeat, relative to those of all layers computed once
    seconds_per_cell : seconds for one output cell of one sample, by layer
    """

    seconds: float
    message_log: DryRunMessageLog = field(default_factory=DryRunMessageLog)
    held_bytes: int = 0
    memory_traffic: float = 0.0
    seconds_per_cell: dict[str, float] = field(default_factory=dict)
    noise: float = 0.0
    recomputed_fraction: float = 0.0


def profile_busiest_rank(
    experiment: Any,
    shape: GridShape,
    min_seconds: float = PREDICTION_SECONDS,
    on_step: Callable[[], object] = lambda: None,
) -> RankProfile:
    """Measure a training step of the rank with the most cells, at the shapes of its own tile and views.

    Parameters
    ----------
    min_seconds : float
        Minimum total time of the timed repetitions; the profile contains their median.
    on_step : callable
        Called after each step, at least `LEAST_STEPS` times.
    """
    model: TrainableModel = experiment.model
    train, message_log, samples = prepare_busiest_rank_step(experiment, shape)
    on_step()

    def step() -> None:
        train()
        on_step()

    step()
    turns = [time_step(step, min_seconds / MAX_TURNS), time_step(step, min_seconds / MAX_TURNS)]
    while len(turns) < MAX_TURNS and sum(turns) < 4 * min_seconds:  # two turns suffice for long steps
        turns.append(time_step(step, min_seconds / MAX_TURNS))
    clock, count = Clock(), max(1, round(min_seconds / MAX_TURNS / min(turns)))
    with model.grid.observers.add_temporarily(clock):
        for _ in range(count):
            step()
    spent = {}
    plan = model.compiled
    for name, plans in plan.execution_units.items() if isinstance(plan, Plan) else ():
        taken = (clock.seconds[name, "forward"] + clock.seconds[name, "backward"]) / (count * max(1, samples))
        works = [count_multiplications(entry) / max(1, prod(entry.output_shape[:-1])) for entry in plans]
        total = sum(work * entry.layer.output_tile.size for work, entry in zip(works, plans, strict=True))
        share = taken / max(1, total)
        is_single_layer = len(plans) == 1
        for work, entry in zip(works, plans, strict=True):  # a segment's time is shared in proportion to products
            if cells := entry.layer.output_tile.size:
                spent[entry.name] = taken / cells if is_single_layer else work * share
    held_bytes, memory_traffic = (figure(model.grid.rank) for figure in (plan.memory, plan.memory_traffic))
    repeated = recomputed_fraction(plan, model.grid.tile) if isinstance(plan, Plan) else 0.0
    return RankProfile(median(turns), message_log, held_bytes, memory_traffic, spent, relative_noise(turns), repeated)


def measure_peak_memory(experiment: Any, shape: GridShape) -> int:
    """Return the peak resident bytes of rank 0, which also writes files and plots, after a short run in this process.

    The run has one epoch of a few batches, and one epoch of each pretraining stage; it writes to a temporary folder.
    Messages of other ranks are zeros. The result includes the image chunks that the whole run would cache. The
    experiment cannot be used afterwards.
    """
    if shape.size > 1 and detect_job(os.environ) is None:  # in an MPI job, all ranks would have to start MPI
        with suppress(LaunchError):
            world_transport()
    model, epochs = experiment.model, experiment.epochs
    experiment.epochs, model.num_pretrain_epochs = 1, min(1, model.num_pretrain_epochs)
    experiment.server_strategy = None
    for logger in experiment.loggers:
        logger.folder = None  # loggers write to the temporary folder
    experiment.dataset.limit_batches(experiment.batch_size, _MEMORY_BATCHES)
    model.nonfinite = "skip"  # gradients are incomplete
    grid = dry_run_grid(0, shape, DryRunMessageLog())
    with TemporaryDirectory(prefix="neondist-memory-") as folder:
        experiment.run(grid, output=folder, hooks=[])
    peak, splits = memory.peak_bytes(), experiment.dataset.splits
    cached_bytes = sum(split.bytes_to_be_cached(epochs if name == "train" else 1) for name, split in splits.items())
    experiment.dataset.close()
    return peak + cached_bytes


def recomputed_fraction(plan: Plan, tile: int) -> float:
    """Return the multiplications that strips repeat, relative to those of all layers computed once."""
    total = sum(count_multiplications(p) * p.layer.output_tile.size / max(1, prod(p.output_shape[:-1])) for p in plan)
    done = once = 0.0
    for segment in plan.segments:
        strips = list(segment.strips(tile))
        for entry in segment.plans:
            work = count_multiplications(entry) / max(1, prod(entry.output_shape[:-1]))
            done += work * sum(section.placed[id(entry.layer)].tile(at).size for at, section in strips)
            once += work * entry.layer.output_tile.size
    return (done - once) / total if total else 0.0


def fullest_tile(shape: GridShape, image_extent: Sequence[int]) -> int:
    """Return the tile with the most cells; if there are several, the most central, which has the most neighbours."""
    boxes = shape.partition(image_extent).boxes()
    middle = [n / 2 for n in image_extent]

    def size_and_centrality(tile: int) -> tuple[int, float]:
        distance = sum(abs((lo + hi) / 2 - at) for (lo, hi), at in zip(boxes[tile].axes(), middle, strict=True))
        return boxes[tile].size, -distance

    return max(range(len(boxes)), key=size_and_centrality)


def prepare_busiest_rank_step(experiment: Any, shape: GridShape) -> tuple[Callable[[], None], DryRunMessageLog, int]:
    """Return a training step of the rank with the most cells, the log of its messages, and its number of samples."""
    model, sample_shape, batch = experiment.model, experiment.dataset.sample_shape, experiment.batch_size
    message_log = DryRunMessageLog()
    grid = dry_run_grid(fullest_tile(shape, sample_shape[:-1]), shape, message_log)
    model.build(sample_shape, batch, grid, model.fit_plan_to_memory(model.plan(sample_shape, shape, batch)))
    model.restrict_cost_to_local_cells(experiment.dataset.fields)
    x, targets = model.timing_batch(experiment.dataset)
    model.learning_rate_scale = 0.0  # gradients are incomplete

    def step() -> None:
        message_log.exchange_sizes.clear()
        message_log.allreduce_sizes.clear()
        model.train_batch(x, targets, batch_size=batch)

    step()
    return step, message_log, len(x)


def time_step(step: Callable[[], None], min_seconds: float) -> float:
    """Return the mean seconds of a step, over at least `min_seconds`."""
    count, begin = 0, time.perf_counter()
    while True:
        step()
        count += 1
        taken = time.perf_counter() - begin
        if taken > min_seconds:
            return taken / count
