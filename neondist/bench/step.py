"""`neondist bench step`: a training step by layer, compared with the same network in PyTorch's autograd."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from ..backends import get_backend
from ..comm import ProcessGrid, raise_if_any_failed
from ..data import Split
from ..errors import UserError
from ..io.environment import describe_environment
from ..models import Model, ModelStep, TrainableModel, require_layer_model
from ..plan import ModelPlan
from ..runtime.observers.clock import WORK_KINDS, Clock
from ..runtime.observers.trace import write_trace
from ..terminal.progress_line import ProgressLine, SilentProgress
from ..train import FitExperiment
from . import memory
from .kernel_allocations import measure_allocations
from .noise import relative_noise
from .roofline import measure_peak_rates, roofline_rows
from .sleeping_barrier import sleeping_barrier
from .torch_baseline import TorchBaseline

WARM_UP_STEPS = 2
ROUND_SECONDS = 0.3
TRACED_STEPS = 3
MIN_READ_STEPS, READ_ROUNDS = 10, 5
"""minimum number of steps in a turn that reads its batches (one batch ahead), and number of such turns"""
HALO_MESSAGE_KINDS = "halo", "ring"
GRADIENT_TOLERANCES = {"float32": 1e-2, "float64": 1e-8}
"""relative tolerances of gradients, whose sums may have millions of terms"""


def bench_step(
    experiment: FitExperiment,
    grid: ProcessGrid,
    steps: int = 10,
    against: str | None = None,
    threads: int = 1,
    roofline: bool = False,
    trace: Path | None = None,
    reading: bool = False,
    progress: ProgressLine | None = None,
    step_seconds_lower_bound: float = 0.0,
) -> dict[str, Any]:
    """Measure training steps on one batch. Collective: every rank gets the same result.

    Parameters
    ----------
    experiment : FitExperiment
        Experiment with a model of layers, or with a PyTorch module, whose times are reported by submodule.
    steps : int
        Number of steps to time.
    against : {'torch'}, optional
        Also train the same network in PyTorch, in alternating rounds.
    threads : int
        Number of PyTorch's threads; the total number of threads of all ranks gives both the same resources.
    roofline : bool
        Add the roofline of every layer: 'machine', and further values in 'layers'. With PyTorch's kernels, also add
        'allocations', the allocations of these kernels in a step of rank 0.
    trace : Path, optional
        File for a trace of a few more steps of all ranks, for Perfetto or chrome://tracing.
    reading : bool
        Also time steps whose batches are read from the data set, as in training, in alternating rounds.
    progress : ProgressLine, optional
        On rank 0: counts the steps.
    step_seconds_lower_bound : float
        Minimum seconds of a step, for the estimate of `progress` before the first step ends; 0 if unknown.

    Returns
    -------
    dict
        Contents of the JSON file: seconds are medians of the slowest rank; in 'layers', means over the ranks.
    """
    model, dataset, empty_bytes = experiment.model, experiment.dataset, memory.resident_bytes()
    plan = model.fit_plan_to_memory(model.plan(dataset.sample_shape, grid.shape, experiment.batch_size))
    batch_size, (x, targets) = experiment.batch_size, load_own_batch(experiment, grid, plan)
    memory.reset_peak_memory()
    model.build(dataset.sample_shape, batch_size, grid, plan)
    model.restrict_cost_to_local_cells(dataset.fields)
    results = {"bench": "step", "batch_size": batch_size, "steps": steps, "sample_shape": list(dataset.sample_shape)}
    results |= {"backend": get_backend(model.backend).name}
    results |= describe_environment(grid, dtype=str(model.dtype), seed=model.seed)

    turns = max(MIN_READ_STEPS, steps)
    later_steps = 2 * READ_ROUNDS * turns * reading + TRACED_STEPS * (trace is not None)  # without those timed by layer
    total, progress = WARM_UP_STEPS + 1 + steps + later_steps + 1, progress or SilentProgress()
    progress.set_total_parts(total, planned_seconds=[step_seconds_lower_bound] * total)

    def train(count: int, batches: Iterable[tuple[Any, np.ndarray]] = itertools.repeat((x, targets))) -> float:
        """Return the seconds of `count` steps on the slowest rank."""
        sleeping_barrier(grid.world)
        begin = time.perf_counter()
        for images, labels in itertools.islice(batches, count):
            model.train_batch(images, labels, batch_size=batch_size)
        seconds = max(grid.world.allgather(time.perf_counter() - begin))
        progress.add_done_parts(count)
        return seconds

    with _start_baseline(model, grid, x, targets, batch_size, threads, against) as (baseline, agreement):
        for _ in range(WARM_UP_STEPS):
            train(1)
        count = max(1, round(ROUND_SECONDS / train(1)))
        total = WARM_UP_STEPS + 1 + -(-steps // count) * count + later_steps + count  # whole rounds, one timed by layer
        progress.change_parts(total, [step_seconds_lower_bound] * total)
        rounds = [(train(count), *_time_baseline(baseline, grid, count)) for _ in range(-(-steps // count))]
    step_seconds = median(seconds for seconds, *_ in rounds) / count
    fastest = min(seconds for seconds, *_ in rounds) / count
    results["noise"] = relative_noise([seconds for seconds, *_ in rounds])
    results |= {"seconds_per_step": step_seconds, "steps_per_second": 1 / step_seconds, "fastest_seconds": fastest}
    peaks = grid.world.allgather((memory.peak_bytes(), memory.peak_bytes() - empty_bytes))
    results |= {"process_bytes": [peak for peak, _ in peaks], "peak_bytes": [above for _, above in peaks]}
    if against:
        results["against"] = {**agreement, "name": against, "threads": threads} | _compare_rounds(rounds, count)
    if reading:
        with closing(_read_batches(dataset.train, grid, model.dtype, batch_size)) as batches:
            pairs = [(train(turns, batches), train(turns)) for _ in range(READ_ROUNDS)]
        ratios = [seconds / reference for seconds, reference in pairs]
        seconds = median(seconds for seconds, _ in pairs) / turns
        results["reading"] = {"seconds_per_step": seconds, "ratio": median(ratios), "ratios": ratios}
    layers = _layer_rows(model, grid, lambda: train(count), count)
    if roofline:
        layer_model = require_layer_model(model, "roofline", "leave it out")
        machine = measure_peak_rates(layer_model, grid.world)
        results, layers = results | {"machine": machine}, roofline_rows(layer_model, layers, machine)
        if results["backend"] == "torch":
            allocated = measure_allocations(lambda: train(1))
            results |= {"allocations": grid.world.bcast([entry._asdict() for entry in allocated])}
    if trace is not None:
        write_trace(trace, grid, lambda: train(TRACED_STEPS))
    return results | {"layers": layers}


def load_own_batch(experiment: FitExperiment, grid: ProcessGrid, plan: ModelPlan) -> tuple[Any, np.ndarray]:
    """Open the data set of an experiment and return this rank's tiles and labels of a first batch."""
    dataset, model = experiment.dataset, experiment.model
    dataset.open(grid.with_tiles(plan.overlapping_tiles), augment=experiment.augment, seed=model.seed)
    batch = np.arange(experiment.batch_size) % len(dataset.train)
    own_samples = batch[slice(*grid.sample_range(len(batch)))]
    return dataset.train.images(own_samples, model.dtype), dataset.train.targets(own_samples)


def _read_batches(split: Split, grid: ProcessGrid, dtype: Any, batch: int) -> Generator[tuple[Any, np.ndarray]]:
    """Yield a replica's share of each batch, endlessly, prefetched as in training."""
    parts = (np.arange(first, first + batch) % len(split) for first in itertools.count(0, batch))
    with closing(split.batches((part[slice(*grid.sample_range(batch))] for part in parts), dtype)) as batches:
        yield from batches


@contextmanager
def _start_baseline(
    trained: TrainableModel, grid: ProcessGrid, x: Any, targets: Any, batch: int, threads: int, against: str | None
) -> Iterator[tuple[TorchBaseline | None, dict[str, Any]]]:
    """Start the PyTorch baseline on rank 0, and compare loss and gradients at the initial weights."""
    if not against:
        yield None, {}
        return
    model = require_layer_model(trained, "against", "leave it out")
    whole, state = model.gather_input(x), model.state()
    local = np.repeat(model.local_targets(targets, batch)[..., None], model.output.channels, axis=-1)
    labels = model.output.gather(local)[..., 0]
    loss, gradients = _gradients_without_dropout(
        model, lambda: ModelStep(model).compute_gradients(x, targets, batch)[0]
    )
    baseline, error, agreement = None, None, dict[str, Any]()
    try:
        try:
            if grid.rank == 0:
                baseline = TorchBaseline(model, state, list(gradients), whole, labels.astype(np.int64), threads)
                baseline_loss, worst, name = baseline.compare_gradients(gradients)
                tolerance = GRADIENT_TOLERANCES[str(model.dtype)]
                agree = abs(loss - baseline_loss) <= tolerance * abs(baseline_loss) and worst <= tolerance
                agreement = {"loss": [loss, baseline_loss], "gradients_worst": worst, "worst_at": name, "agree": agree}
        except UserError as problem:
            error = problem
        sleeping_barrier(grid.world)
        raise_if_any_failed(grid.world, error)
        yield baseline, grid.world.bcast(agreement)
    finally:
        if baseline:
            baseline.close()


def _time_baseline(baseline: TorchBaseline | None, grid: ProcessGrid, count: int) -> tuple[float, int]:
    sleeping_barrier(grid.world)
    seconds, peak, _ = baseline.time_steps(count) if baseline else ([], 0, 0)
    sleeping_barrier(grid.world)  # the broadcast would keep the cores of waiting ranks busy
    return grid.world.bcast((sum(seconds), peak))


def _compare_rounds(rounds: Sequence[tuple[float, float, int]], steps_per_round: int) -> dict[str, Any]:
    """Return the baseline's results from rounds of (own seconds, baseline's seconds, baseline's peak bytes)."""
    own_seconds, baseline_seconds, peaks = zip(*rounds, strict=True)
    ratios = [seconds / other for seconds, other in zip(own_seconds, baseline_seconds, strict=True)]
    return {
        "seconds_per_step": median(baseline_seconds) / steps_per_round,
        "ratio": median(ratios),
        "ratio_of_fastest": min(own_seconds) / min(baseline_seconds),
        "ratios": ratios,
        "peak_bytes": max(peaks),
    }


def _gradients_without_dropout(model: Model, train: Any) -> tuple[float, dict[str, Any]]:
    """Return loss and gradients of a step without update and without dropout, as dropout masks differ in PyTorch."""
    rates: list[tuple[Any, float]] = [(layer, layer.rate) for layer in model.leaves if hasattr(layer, "rate")]
    state = model.state()
    try:
        for layer, _ in rates:
            layer.rate = 0.0
        loss = train()
    finally:
        for layer, rate in rates:
            layer.rate = rate
    gradients = {name: array.copy() for name, array in model.gradients().items()}
    model.load_state(state)  # running statistics
    return loss, gradients


def _layer_rows(model: TrainableModel, grid: ProcessGrid, train: Any, count: int) -> list[dict[str, Any]]:
    """Return the time and bytes per step of every layer, or part of a module, from observed steps."""
    plan, clock, before = model.compiled, Clock(), model.ledger()
    with grid.observers.add_temporarily(clock):
        train()
    names, seconds, moved = plan.class_by_benchmark_row, Counter[tuple[str, str]](), Counter[str]()
    for (name, kind), taken in clock.seconds.items():
        seconds[plan.benchmark_row_of(name), kind] += taken  # type: ignore[assignment]
    for account, number in (model.ledger() - before).items():
        if account.kind in HALO_MESSAGE_KINDS:
            moved[plan.benchmark_row_of(account.layer)] += number * account.nbytes
    observed = {row for row, _ in seconds}  # steps of a module on one rank are not observed: the original module runs
    rows = list(dict.fromkeys([*(name for name in names if name in observed), *(row for row, _ in seconds)]))
    own_seconds = {(row, kind): seconds[row, kind] / count for row in rows for kind in WORK_KINDS}
    all_ranks = grid.world.allgather((own_seconds, moved))
    return [
        {"name": row, "class": names.get(row, "")}
        | {kind: sum(times[row, kind] for times, _ in all_ranks) / grid.size for kind in WORK_KINDS}
        | {"bytes_sent": round(sum(bytes_.get(row, 0) for _, bytes_ in all_ranks) / count)}
        for row in rows
    ]
