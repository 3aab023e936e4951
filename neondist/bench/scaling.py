"""`neondist bench scaling`: the same training step on increasing rank counts."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from ..io.files import write_figure
from ..plan.report import format_seconds, format_size
from .noise import noise_warnings, relative_noise
from .tables import markdown_table, write_report


def bench_scaling(measure: Callable[[int], dict[str, Any]], ranks: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """Return a row for each rank count.

    Parameters
    ----------
    measure : function of a rank count
        Returns the result of `bench_step`. Every round measures all rank counts, so that a slowdown of the machine
        affects all of them.
    ranks : rank counts in order of measurement; speed-up and efficiency are relative to the first
    """
    measured = [[measure(count) for count in ranks] for _ in range(rounds)]
    rows = []
    for count, results in zip(ranks, zip(*measured, strict=True), strict=True):
        times = [result["seconds_per_step"] for result in results]
        layers = results[0]["layers"]
        rows.append(
            {
                "ranks": count,
                "batch_size": results[0]["batch_size"],
                "grid": results[0]["grid"],
                "seconds_per_step": median(times),
                "all_seconds": times,
                "noise": relative_noise(times),
                "samples_per_second": results[0]["batch_size"] / median(times),
                "wait_seconds": median(sum(layer["wait"] for layer in result["layers"]) for result in results),
                "bytes_sent": sum(layer["bytes_sent"] for layer in layers),
                "peak_bytes": max(max(result["peak_bytes"]) for result in results),
            }
        )
    first = rows[0]
    for at, row in enumerate(rows):
        # the ratio of samples per second is the speed-up in weak scaling (growing batch) as well
        row["speedup"] = median(
            run[at]["batch_size"] / run[at]["seconds_per_step"] * run[0]["seconds_per_step"] / run[0]["batch_size"]
            for run in measured
        )
        row["efficiency"] = row["speedup"] * first["ranks"] / row["ranks"]
    return rows


def scaling_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table."""
    heads = ["ranks", "grid", "batch", "step", "speed-up", "efficiency", "inside MPI", "halos sent", "peak per rank"]
    cells = [
        [
            str(row["ranks"]),
            "{replicas} × {rows} × {cols}".format(**row["grid"]),
            str(row["batch_size"]),
            format_seconds(row["seconds_per_step"]),
            f"{row['speedup']:.2f}",
            f"{row['efficiency']:.0%}",
            format_seconds(row["wait_seconds"]),
            format_size(row["bytes_sent"]),
            format_size(row["peak_bytes"]),
        ]
        for row in rows
    ]
    return markdown_table(heads, cells)


def write_scaling_report(folder: Path, rows: Sequence[dict[str, Any]], title: str) -> list[Path]:
    """Write scaling.jsonl, scaling.md and, if matplotlib is installed, scaling.png; return the files."""
    parts = [title, scaling_table(rows), *noise_warnings(max(row["noise"] for row in rows))]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    texts = {"scaling.jsonl": lines, "scaling.md": "\n\n".join(parts) + "\n"}
    return write_report(folder, texts, {"scaling.png": partial(_draw_scaling, rows, title)})


def _draw_scaling(rows: Sequence[dict[str, Any]], title: str, file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 4), layout="constrained")
    axes = figure.subplots()
    ranks = [row["ranks"] for row in rows]
    axes.plot(ranks, [row["speedup"] for row in rows], "o-", label="measured")
    axes.plot(ranks, [count / ranks[0] for count in ranks], "k:", label="ideal")
    axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel="samples per second, relative", title=title)
    axes.set_xticks(ranks, labels=map(str, ranks), minor=False)
    axes.legend()
    write_figure(file, figure)
