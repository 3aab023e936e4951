"""Comparison of border schemes: accuracy, bytes and time of the same training run."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from ..comm import Transport
from ..config import dump
from ..errors import ConfigError
from ..halo import as_scheme
from ..io.files import append_text, make_folder, write_figure
from ..terminal.console import counted, emit
from ..terminal.progress_line import ProgressLine, first_rank_progress
from ..train import EpochRecord, Hook, TrainState
from . import tables
from .least_time import CoreSpeed
from .tables import markdown_table

RESULTS_FILE = "results.jsonl"
Row = dict[str, Any]


class RunProgressReporter(Hook):
    """Hook that reports the progress of training runs; each run is one part of the progress line of rank 0.

    Parameters
    ----------
    progress : ProgressLine
    runs : int
        Number of runs.
    step_seconds_lower_bound : float
        Minimum seconds of a step of any run, for the estimate before the first step ends.
    """

    def __init__(self, progress: ProgressLine, runs: int, step_seconds_lower_bound: float) -> None:
        self.progress, self.runs, self.step_seconds_lower_bound = progress, runs, step_seconds_lower_bound

    def before_run(self, run: TrainState) -> None:
        """Plan all runs, now that the data set is open and the number of steps is known."""
        steps = run.epochs * -(-run.epoch_size // run.batch_size)
        self.progress.change_parts(self.runs, [steps * self.step_seconds_lower_bound] * self.runs)

    def after_step(self, run: TrainState) -> None:
        """Set the completed fraction of the run."""
        self.progress.set_part_fraction((run.epoch + run.samples_seen / run.epoch_size) / run.epochs)


def bench_schemes(
    world: Transport, folder: Path, runs: Sequence[tuple[Any, Callable[[], Any]]], cores: int | None = None
) -> list[EpochRecord]:
    """Train all runs without a result in `folder`, and return all results. Collective.

    Parameters
    ----------
    runs : pairs of a description (with `scheme` and `seed`) and a function that loads its experiment
    folder : Path
        Folder of results.jsonl, to which each completed run appends a line.
    cores : int, optional
        Number of cores that the ranks share, for the estimate before the first step ends; default: one per rank.
    """
    rows: list[EpochRecord] = []
    is_warm = False
    with first_rank_progress(world.rank, sys.stderr, len(runs), "run", delay=0) as progress:
        speed = CoreSpeed.measure() if world.rank == 0 else None
        for description, load in runs:
            experiment = load()
            key = hashlib.sha256(f"{dump(experiment)}{world.size}".encode()).hexdigest()[:16]
            results = {row["key"]: row for row in read_results(folder / RESULTS_FILE)} if world.rank == 0 else {}
            row = world.bcast(results.get(key))
            if row is None:
                progress.begin_part(f"{description.scheme}, seed {description.seed}")
                step = 0.0 if speed is None else speed.step_seconds_lower_bound(experiment, world.size, cores)
                if not is_warm:
                    _warm_up(load(), world)
                    is_warm = True
                summary = _train_and_summarise(experiment, world, RunProgressReporter(progress, len(runs), step))
                row = EpochRecord(key=key, scheme=description.scheme, seed=description.seed, **summary)
                if world.rank == 0:
                    make_folder(folder)
                    append_text(folder / RESULTS_FILE, json.dumps(row) + "\n")
            else:
                progress.resumed_parts += 1  # trained by an earlier command: excluded from the estimate
            if world.rank == 0:
                error = f"{row.selection_split} error {100 * row.selection_value('error'):.2f} %"
                emit(f"{row['scheme']}, {counted(count_tiles(row), 'tile')}, seed {row['seed']}: {error}")
            progress.add_done_parts(1)
            rows.append(row)
    return rows


def write_report(rows: Sequence[EpochRecord], folder: Path) -> str:
    """Write schemes.md, schemes.png and, for several numbers of tiles, tiles.png; return the table in Markdown."""
    summary = summarise_by_scheme(rows)
    table = schemes_table(summary)
    plots: dict[str, Callable[[Path], None]] = {"schemes.png": partial(plot_error_over_bytes, summary)}
    if len({row["tiles"] for row in summary}) > 1:
        plots["tiles.png"] = partial(plot_error_over_tiles, summary)
    tables.write_report(folder, {"schemes.md": table + "\n"}, plots)
    return table


def _warm_up(experiment: Any, world: Transport) -> None:
    """Train on one batch, so that the time of the first run does not include imports and the choice of kernels."""
    experiment.dataset.limit_batches(experiment.batch_size, 1)
    experiment.epochs, experiment.loggers = 1, []
    experiment.run(experiment.open_grid(world), hooks=[])


def _train_and_summarise(experiment: Any, world: Transport, progress: RunProgressReporter) -> dict[str, Any]:
    grid = experiment.open_grid(world)
    history = experiment.run(grid, hooks=[progress]).history
    last = history[-1]
    if last.selection_value("error") is None:
        raise ConfigError(
            "bench schemes compares classification errors of a validation or test split, but the experiment has none;"
            " give an experiment with class labels and such a split"
        ).mark_raised_on_all_ranks()  # all ranks have the same history
    return {
        "exact": all(layer.scheme.exact for layer in experiment.model.leaves if layer.window is not None),
        "ranks": grid.size,
        "grid": [grid.replicas, grid.rows, grid.cols],
        "epochs": len(history),
        **{name: value for name, value in last.items() if name.endswith(("_loss", "_error"))},
        "bytes_per_step": sum(r["bytes_sent"] for r in history) / max(last["step"], 1),
        "seconds_per_epoch": mean(r["seconds"] for r in history),
    }


def read_results(file: Path) -> list[EpochRecord]:
    """Return the existing results; incomplete lines are skipped."""
    rows = []
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return [EpochRecord(row) for row in rows if isinstance(row, dict) and "key" in row]


def count_tiles(row: EpochRecord) -> int:
    """Return the number of tiles of an image."""
    return int(prod(row["grid"][1:]))


def summarise_by_scheme(rows: Sequence[EpochRecord]) -> list[Row]:
    """Return one row for each scheme and number of tiles: means over the seeds, deviations, and the Pareto front.

    A scheme is on the front unless another scheme, on as many tiles, has a lower mean error or sends fewer bytes, and
    is worse in neither.
    """
    summary = []
    for tiles, scheme in dict.fromkeys((count_tiles(row), row["scheme"]) for row in rows):
        group = [row for row in rows if (count_tiles(row), row["scheme"]) == (tiles, scheme)]
        errors = [row.selection_value("error") for row in group]
        summary.append(
            {
                "tiles": tiles,
                "scheme": scheme,
                "exact": group[0]["exact"],
                "formula": as_scheme(scheme).formula,
                "runs": len(group),
                "split": group[0].selection_split,
                "error": mean(errors),
                "deviation": stdev(errors) if len(errors) > 1 else 0.0,
                "loss": mean(row.selection_value("loss") for row in group),
                "bytes": mean(row["bytes_per_step"] for row in group),
                "seconds": mean(row["seconds_per_epoch"] for row in group),
            }
        )
    for row in summary:
        row["front"] = not any(
            other["tiles"] == row["tiles"]
            and other["error"] <= row["error"] and other["bytes"] <= row["bytes"]
            and (other["error"], other["bytes"]) != (row["error"], row["bytes"])
            for other in summary
        )  # fmt: skip
    return summary


def schemes_table(rows: Sequence[Row]) -> str:
    """Return the summaries as a Markdown table."""
    split = rows[0]["split"] if rows else "test"
    metrics = [f"{split} error, %", f"{split} loss"]
    heads = ["tiles", "scheme", "exact", *metrics, "kB per step", "s per epoch", "runs", "Pareto front"]
    cells = [
        [
            str(row["tiles"]),
            f"`{row['scheme']}`",
            "yes" if row["exact"] else "no",
            f"{100 * row['error']:.2f}" + (f" ± {100 * row['deviation']:.2f}" if row["runs"] > 1 else ""),
            f"{row['loss']:.4f}",
            f"{row['bytes'] / 1e3:.1f}",
            f"{row['seconds']:.1f}",
            str(row["runs"]),
            "yes" if row["front"] else "",
        ]
        for row in rows
    ]
    return markdown_table(heads, cells)


def plot_error_over_bytes(rows: Sequence[Row], file: Path) -> None:
    """Plot error (mean and deviation) against bytes sent per step, with one panel per number of tiles.

    A line joins the schemes on the Pareto front.
    """
    from matplotlib.figure import Figure

    counts = list(dict.fromkeys(row["tiles"] for row in rows))
    figure = Figure(figsize=(3 + 5 * len(counts), 4.5), layout="constrained")
    for axes, tiles in zip(figure.subplots(1, len(counts), sharey=True, squeeze=False)[0], counts, strict=True):
        _plot_pareto_front(axes, [row for row in rows if row["tiles"] == tiles])
        axes.set_title(f"{counted(tiles, 'tile')}")
    figure.supxlabel("halo data per training step on all ranks, kB", fontsize=10)
    figure.supylabel(f"{rows[0]['split']} error, %", fontsize=10)
    figure.suptitle("Border schemes: exact (circles), approximate (squares), Pareto front (line)", fontsize=11)
    write_figure(file, figure, dpi=90)


def _plot_pareto_front(axes: Any, rows: Sequence[Row]) -> None:
    for row in rows:
        axes.errorbar(
            row["bytes"] / 1e3, 100 * row["error"], 100 * row["deviation"],
            marker="o" if row["exact"] else "s", capsize=3, color="C0" if row["exact"] else "C1",
        )  # fmt: skip
        place = (row["bytes"] / 1e3, 100 * row["error"])
        axes.annotate(row["scheme"], place, xytext=(5, 4), textcoords="offset points", fontsize=8)
    front = sorted((row["bytes"] / 1e3, 100 * row["error"]) for row in rows if row["front"])
    axes.plot(*zip(*front, strict=True), color="grey", linewidth=0.8, zorder=0)
    least = min((row["bytes"] / 1e3 for row in rows if row["bytes"]), default=1.0)
    axes.set_xscale("symlog", linthresh=least / 2)  # towers send nothing
    axes.set_xlim(left=-least / 8)


def plot_error_over_tiles(rows: Sequence[Row], file: Path) -> None:
    """Plot error (mean and deviation) against the number of tiles, one line per scheme."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for scheme in dict.fromkeys(row["scheme"] for row in rows):
        group = sorted((row for row in rows if row["scheme"] == scheme), key=lambda row: row["tiles"])
        errors, deviations = ([100 * row[key] for row in group] for key in ("error", "deviation"))
        axes.errorbar([row["tiles"] for row in group], errors, deviations, marker=".", capsize=3, label=scheme)
    counts = sorted({row["tiles"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_xlabel("tiles")
    axes.set_ylabel(f"{rows[0]['split']} error, %")
    axes.legend(fontsize=8)
    write_figure(file, figure, dpi=90)
