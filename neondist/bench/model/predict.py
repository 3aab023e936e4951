"""Predicted time, bytes sent and memory of a step, for a number of ranks and a machine."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from ...errors import ConfigError
from ...geometry import GridShape, grid_shape
from ...geometry.partition import factorisations
from ...models import Model
from ...plan.choices import choose_schemes, machine_profile_for, set_schemes
from ...system.machine import Machine
from ...terminal.progress_line import ProgressLine
from .rank_profile import COMPARISON_SECONDS, LEAST_STEPS, PREDICTION_SECONDS, RankProfile, profile_busiest_rank

Row = dict[str, Any]
ProfileFunction = Callable[[Any, GridShape, float], RankProfile]


def predict(
    experiment: Callable[[], Any],
    ranks: Iterable[int],
    machine: Machine,
    profile: ProfileFunction = profile_busiest_rank,
) -> list[Row]:
    """Return, for each rank count, the prediction for its best grid.

    Parameters
    ----------
    experiment : function
        Returns a new FitExperiment, whose model is not built.
    """
    rows = []
    for count in ranks:
        shape = fastest_grid(count, experiment, machine, profile)
        rank_profile = profile(experiment(), shape, PREDICTION_SECONDS)
        row = predict_step(shape, machine, rank_profile)
        rows.append(row | _predict_with_schemes(experiment, machine, shape, rank_profile, row, profile))
    return rows


def fastest_grid(
    count: int, experiment: Callable[[], Any], machine: Machine, profile: ProfileFunction = profile_busiest_rank
) -> GridShape:
    """Return the grid of the fastest step on `count` ranks."""
    shapes = candidate_grids(count, experiment())
    if len(shapes) == 1:
        return shapes[0]
    predicted_seconds = [
        predict_step(shape, machine, profile(experiment(), shape, COMPARISON_SECONDS))["seconds_per_step"]
        for shape in shapes
    ]
    return shapes[predicted_seconds.index(min(predicted_seconds))]


def profile_with_progress(progress: ProgressLine, num_profiles: int) -> ProfileFunction:
    """Return a profile function that reports its steps in a part of `progress`; `num_profiles` calls are expected."""
    profile_numbers = itertools.count()

    def profile(experiment: Any, shape: GridShape, min_seconds: float) -> RankProfile:
        number, step_numbers = next(profile_numbers), itertools.count(1)

        def count_step() -> None:
            done = number + min(1.0, next(step_numbers) / LEAST_STEPS)
            progress.set_part_fraction(done / max(num_profiles, number + 1))

        return profile_busiest_rank(experiment, shape, min_seconds, count_step)

    return profile


def candidate_grids(count: int, experiment: Any) -> list[GridShape]:
    """Return the grids to try.

    If the file sets rows or cols, this is only its grid; otherwise the most square grid, grids that cut one axis only
    and, if the file sets no replicas, square grids of several replicas.
    """
    fixed_factors = {name: value for name, value in experiment.grid.items() if value is not None}
    default = grid_shape(count, **fixed_factors)
    if {"rows", "cols"} & fixed_factors.keys():
        return [default]
    plan = experiment.model.plan(experiment.dataset.sample_shape, default, experiment.batch_size)
    shapes, min_extent = [default], plan.min_extent
    for rows, cols in factorisations(default.rows * default.cols, 2):
        if 1 in (rows, cols) and max(rows, cols) <= min_extent:  # every tile has cells
            shapes.append(GridShape(default.replicas, rows, cols, default.planes))
    if "replicas" not in fixed_factors:
        replicas = [n for n in range(2, min(count, experiment.batch_size) + 1) if count % (n * default.planes) == 0]
        shapes += [grid_shape(count, **fixed_factors, replicas=n) for n in replicas]
    return list(dict.fromkeys(shapes))


def _predict_with_schemes(
    experiment: Callable[[], Any],
    machine: Machine,
    shape: GridShape,
    rank: RankProfile,
    row: Row,
    profile: ProfileFunction,
) -> Row:
    """Return the best exact schemes of the layers, if any, and the prediction of the step with them."""
    trial = experiment()
    if not isinstance(trial.model, Model):  # the scheme of a module's windows is set only in the experiment file
        return {"schemes": [], "seconds_with_schemes": row["seconds_per_step"], "bytes_with_schemes": row["bytes_sent"]}
    seconds = {name: machine.compute_seconds(cost, shape.size) for name, cost in rank.seconds_per_cell.items()}
    speeds = machine_profile_for(machine, shape, trial.batch_size, trial.model.dtype.itemsize, seconds)
    choices = choose_schemes(trial.model.chain, trial.dataset.sample_shape, shape, speeds)
    changed = set_schemes(trial.model.leaves, {choice.layer: choice.scheme for choice in choices})
    best = predict_step(shape, machine, profile(trial, shape, PREDICTION_SECONDS)) if changed else row
    return {
        "schemes": [asdict(choice) | {"saves": choice.halo_scheme_seconds - choice.seconds} for choice in choices],
        "seconds_with_schemes": best["seconds_per_step"],
        "bytes_with_schemes": best["bytes_sent"],
    }


def count_rank_profiles(count: int, experiment: Any) -> int:
    """Return the number of rank profiles of a prediction for `count` ranks, excluding profiles of schemes."""
    grids = len(candidate_grids(count, experiment))
    return 1 + (grids if grids > 1 else 0)


def predict_step(shape: GridShape, machine: Machine, profile: RankProfile) -> Row:
    """Return the prediction for one grid."""
    link, log = machine.slowest_link(shape.tiles), profile.message_log
    exchanges = [(messages, sent) for messages, sent in log.exchange_sizes if messages]
    sums = [(ranks, count) for ranks, count in log.allreduce_sizes if ranks > 1]
    exchange_seconds = sum(link.message_seconds(messages, sent) for messages, sent in exchanges)
    sum_seconds = sum(machine.allreduce_seconds(ranks, count) for ranks, count in sums)
    compute_seconds = machine.compute_seconds(profile.seconds, shape.size, profile.memory_traffic)
    waiting_seconds = machine.waiting_seconds(shape.size, len(exchanges) + len(sums))
    waiting_seconds += machine.expected_delay_seconds(shape.size, compute_seconds)
    latency = sum(messages for messages, _ in exchanges) * link.latency
    latency += sum(machine.allreduce_seconds(ranks, 0) for ranks, _ in sums)
    total = compute_seconds + exchange_seconds + sum_seconds + waiting_seconds
    return {
        "ranks": shape.size,
        "grid": {axis: count for axis, count in asdict(shape).items() if axis != "planes" or count > 1},
        "compute_seconds": compute_seconds,
        "exchange_seconds": exchange_seconds,
        "sum_seconds": sum_seconds,
        "waiting_seconds": waiting_seconds,
        "latency_seconds": latency,
        "seconds_per_step": total,
        "mpi_share": (total - compute_seconds) / total if total else 0.0,
        "messages": sum(messages for messages, _ in exchanges),
        "bytes_sent": sum(sent for _, sent in exchanges),
        "bytes_summed": sum(count for _, count in sums),
        "bytes_held": profile.held_bytes,
        "recomputed": profile.recomputed_fraction,
        "uncontended_seconds": profile.seconds,
        "noise": profile.noise,
    }


def fit_machine(machine: Machine, rows: Sequence[Row], measured: Mapping[int, float]) -> Machine:
    """Return the machine, fitted to measured steps.

    The fit changes `compute_factor` and, if the rank counts use different numbers of nodes, `jitter`, but not the costs
    of messages.

    Parameters
    ----------
    rows : result of `predict` for the machine
    measured : dict of rank count to seconds

    Raises
    ------
    ConfigError
        A measured step takes less time than its messages alone.
    """
    fitted_rows = [row for row in rows if row["ranks"] in measured]
    matrix, remaining = [], []
    for row in fitted_rows:
        compute, ranks = row["compute_seconds"], row["ranks"]
        taken = measured[ranks] - row["exchange_seconds"] - row["sum_seconds"]
        taken -= row["waiting_seconds"] - machine.expected_delay_seconds(ranks, compute)
        if taken <= 0:
            raise ConfigError(
                f"--measured {ranks}={measured[ranks]:g}: the messages of that step alone take"
                f" {measured[ranks] - taken:.3g} s on this machine; calibrate the machine again, or correct the time"
            )
        weight = 1 / measured[ranks]  # minimises relative errors
        matrix.append([compute * weight, compute * machine.slowest_node_relative_delay(ranks) * weight])
        remaining.append(taken * weight)
    solution, *_ = np.linalg.lstsq(np.array(matrix), np.array(remaining), rcond=None)
    factor, jitter = map(float, solution)
    if jitter < 0 or len({machine.count_nodes(row["ranks"]) for row in fitted_rows}) == 1:
        (factor,), jitter = np.linalg.lstsq(np.array(matrix)[:, :1], np.array(remaining), rcond=None)[0], 0.0
    return replace(machine, compute_factor=machine.compute_factor * float(factor), jitter=jitter / float(factor))


def rescale_row(machine: Machine, row: Row, previous: Machine) -> Row:
    """Return a row of `predict` converted from machine `previous` to the same machine after `fit_machine`."""
    ranks, compute_before = row["ranks"], row["compute_seconds"]
    compute = compute_before * machine.compute_factor / previous.compute_factor
    waiting = row["waiting_seconds"] - previous.expected_delay_seconds(ranks, compute_before)
    waiting += machine.expected_delay_seconds(ranks, compute)
    total = row["seconds_per_step"] - compute_before - row["waiting_seconds"] + compute + waiting
    updates = {"compute_seconds": compute, "waiting_seconds": waiting, "seconds_per_step": total}
    updates["seconds_with_schemes"] = row.get("seconds_with_schemes", 0.0) + total - row["seconds_per_step"]
    return row | updates | {"mpi_share": (total - compute) / total}


def measure_uncontended_seconds(row: Row, experiment: Any, profile: ProfileFunction = profile_busiest_rank) -> float:
    """Measure the seconds per step of a row's busiest rank again, without other load."""
    return profile(experiment, GridShape(**row["grid"]), COMPARISON_SECONDS).seconds


def replace_uncontended_seconds(machine: Machine, row: Row, uncontended_seconds: Sequence[float]) -> Row:
    """Return a row of `predict` with the mean of new uncontended times, and with at least their spread as noise."""
    mean_seconds = float(np.mean(uncontended_seconds))
    rescaled = replace(machine, compute_factor=machine.compute_factor * mean_seconds / row["uncontended_seconds"])
    noise = max(row["noise"], max(uncontended_seconds) / min(uncontended_seconds) - 1)
    return rescale_row(rescaled, row, machine) | {"uncontended_seconds": mean_seconds, "noise": noise}


def fastest_rank_count(rows: Sequence[Row]) -> int:
    """Return the rank count with the fastest step."""
    best: int = min(rows, key=lambda row: row["seconds_per_step"])["ranks"]
    return best


def first_latency_bound_ranks(rows: Sequence[Row]) -> int | None:
    """Return the smallest rank count from which message latency exceeds compute time, or None."""
    ranks = None
    for row in reversed(rows):
        if row["latency_seconds"] <= row["compute_seconds"]:
            break
        ranks = row["ranks"]
    return ranks


def mean_relative_error(predicted: Sequence[Row], measured: dict[int, float]) -> float:
    """Return the mean relative error of the predictions."""
    pairs = [(row["seconds_per_step"], measured[row["ranks"]]) for row in predicted if row["ranks"] in measured]
    return float(np.mean([abs(a - b) / b for a, b in pairs]))
