"""Border schemes compared: accuracy, bytes and time of the same training run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

from ..config import dump
from ..files import write_text
from ..schemes import as_scheme

if TYPE_CHECKING:
    from ..comm import Transport

RESULTS = "results.jsonl"
Row = dict[str, Any]


def bench_schemes(world: Transport, folder: Path, runs: Sequence[tuple[Any, Callable[[], Any]]]) -> str:
    """Train whatever has no result in `folder` yet, and write all results; collective.

    Parameters
    ----------
    runs : pairs of a description (with `scheme` and `seed`) and what loads its experiment
    folder : Path
        Gets results.jsonl (a line for each run, as soon as it is complete), schemes.md and schemes.png.

    Returns
    -------
    str
        A table in Markdown.
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
                folder.mkdir(parents=True, exist_ok=True)
                with (folder / RESULTS).open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
        if world.rank == 0:
            print(f"{row['scheme']}, seed {row['seed']}: valid error {100 * row['valid_error']:.2f} %", flush=True)
        rows.append(row)
    table = markdown(summaries(rows))
    if world.rank == 0:
        write_text(folder / "schemes.md", table)
        from .schemes_plot import plot

        plot(summaries(rows), folder / "schemes.png")
    return table


def _run(experiment: Any, world: Transport) -> Row:
    grid = experiment.open_grid(world)
    history = experiment.run(grid, hooks=[]).history
    last = history[-1]
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


def summaries(rows: Sequence[Row]) -> list[Row]:
    """Return one row for each scheme, in the order given: means over the seeds, deviations, and what is on the front.

    A scheme is on the front if no other has both a lower mean error and fewer bytes.
    """
    found = []
    for scheme in dict.fromkeys(row["scheme"] for row in rows):
        mine = [row for row in rows if row["scheme"] == scheme]
        errors = [row["valid_error"] for row in mine]
        found.append(
            {
                "scheme": scheme,
                "exact": mine[0]["exact"],
                "formula": as_scheme(scheme).formula,
                "runs": len(mine),
                "error": mean(errors),
                "deviation": stdev(errors) if len(errors) > 1 else 0.0,
                "loss": mean(row["valid_loss"] for row in mine),
                "bytes": mean(row["bytes_per_step"] for row in mine),
                "seconds": mean(row["seconds_per_epoch"] for row in mine),
            }
        )
    for row in found:
        row["front"] = not any(
            other["error"] <= row["error"] and other["bytes"] <= row["bytes"]
            and (other["error"], other["bytes"]) != (row["error"], row["bytes"])
            for other in found
        )  # fmt: skip
    return found


def markdown(rows: Sequence[Row]) -> str:
    """Return the table."""
    lines = [
        "| scheme | exact | valid error, % | valid loss | kB sent a step | s an epoch | runs | front |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        spread = f" ± {100 * row['deviation']:.2f}" if row["runs"] > 1 else ""
        lines.append(
            f"| `{row['scheme']}` | {'yes' if row['exact'] else 'no'} | {100 * row['error']:.2f}{spread}"
            f" | {row['loss']:.4f} | {row['bytes'] / 1e3:.1f} | {row['seconds']:.1f} | {row['runs']}"
            f" | {'yes' if row['front'] else ''} |"
        )
    return "\n".join(lines) + "\n"
