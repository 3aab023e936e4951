"""Border schemes compared: accuracy, bytes and time of the same training run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from ..config import dump
from ..errors import ConfigError
from ..files import append, make_folder, write_text
from .schemes_table import Row, markdown, summaries, tiles_of

if TYPE_CHECKING:
    from ..comm import Transport

RESULTS = "results.jsonl"


def bench_schemes(world: Transport, folder: Path, runs: Sequence[tuple[Any, Callable[[], Any]]]) -> list[Row]:
    """Train whatever has no result in `folder` yet, and return all results; collective.

    Parameters
    ----------
    runs : pairs of a description (with `scheme` and `seed`) and what loads its experiment
    folder : Path
        Gets results.jsonl, a line for each run as soon as it is complete.
    """
    rows: list[Row] = []
    for described, load in runs:
        experiment = load()
        key = hashlib.sha256(f"{dump(experiment)}{world.size}".encode()).hexdigest()[:16]
        known = {row["key"]: row for row in read_results(folder / RESULTS)} if world.rank == 0 else {}
        row = world.bcast(known.get(key))
        if row is None:
            row = {"key": key, "scheme": described.scheme, "seed": described.seed} | _run(experiment, world)
            if world.rank == 0:
                make_folder(folder)
                append(folder / RESULTS, json.dumps(row) + "\n")
        if world.rank == 0:
            error = f"valid error {100 * row['valid_error']:.2f} %"
            print(f"{row['scheme']}, {tiles_of(row)} tiles, seed {row['seed']}: {error}", flush=True)
        rows.append(row)
    return rows


def report(rows: Sequence[Row], folder: Path) -> str:
    """Write schemes.md and the pictures schemes.png and tiles.png into `folder`; return the table in Markdown."""
    found = summaries(rows)
    table = markdown(found)
    write_text(folder / "schemes.md", table)
    from .schemes_plot import plot, plot_tiles

    plot(found, folder / "schemes.png")
    if len({row["tiles"] for row in found}) > 1:
        plot_tiles(found, folder / "tiles.png")
    return table


def _run(experiment: Any, world: Transport) -> Row:
    grid = experiment.open_grid(world)
    history = experiment.run(grid, hooks=[]).history
    last = history[-1]
    if last["valid_error"] is None:
        error = ConfigError("bench schemes compares wrong answers, but the test split has no classes to tell")
        error.agreed = True  # all ranks have the same history
        raise error
    return {
        "exact": all(layer.scheme.exact for layer in experiment.model.leaves if layer.window is not None),
        "ranks": grid.size,
        "grid": [grid.replicas, grid.rows, grid.cols],
        "epochs": len(history),
        "train_loss": last["train_loss"],
        "valid_loss": last["valid_loss"],
        "valid_error": last["valid_error"],
        "bytes_per_step": sum(r["bytes_sent"] for r in history) / max(last["step"], 1),
        "seconds_per_epoch": mean(r["seconds"] for r in history),
    }


def read_results(file: Path) -> list[Row]:
    """Return the results that are there; a line that was not written to its end is left out."""
    rows = []
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return [row for row in rows if isinstance(row, dict) and "key" in row]
