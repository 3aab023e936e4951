"""`neondist bench scaling`: the same training step on more and more ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from ..io.files import can_draw, make_folder, write_figure, write_text
from .tables import bytes_text, markdown, seconds_text


def bench_scaling(measure: Callable[[int], dict[str, Any]], ranks: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """Return a row for each rank count.

    Parameters
    ----------
    measure : function of a rank count
        Returns what `bench_step` does. All rank counts have their turn in every round, so that a machine that becomes
        slower slows all of them down.
    ranks : in the order to measure; speed-up and efficiency are relative to the first
    """
    found = [[measure(count) for count in ranks] for _ in range(rounds)]
    rows = []
    for count, made in zip(ranks, zip(*found, strict=True), strict=True):
        times = [one["seconds_per_step"] for one in made]
        layers = made[0]["layers"]
        rows.append(
            {
                "ranks": count,
                "batch_size": made[0]["batch_size"],
                "grid": made[0]["grid"],
                "seconds_per_step": median(times),
                "all_seconds": times,
                "samples_per_second": made[0]["batch_size"] / median(times),
                "wait_seconds": median(sum(layer["wait"] for layer in one["layers"]) for one in made),
                "bytes_sent": sum(layer["bytes_sent"] for layer in layers),
                "peak_bytes": max(max(one["peak_bytes"]) for one in made),
            }
        )
    first = rows[0]
    for at, row in enumerate(rows):
        # samples per second compare a batch that grows (weak scaling) as well as one that stays (strong)
        row["speedup"] = median(
            one[at]["batch_size"] / one[at]["seconds_per_step"] * one[0]["seconds_per_step"] / one[0]["batch_size"]
            for one in found
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
            seconds_text(row["seconds_per_step"]),
            f"{row['speedup']:.2f}",
            f"{row['efficiency']:.0%}",
            seconds_text(row["wait_seconds"]),
            bytes_text(row["bytes_sent"]),
            bytes_text(row["peak_bytes"]),
        ]
        for row in rows
    ]
    return markdown(heads, cells)


def write(folder: Path, rows: Sequence[dict[str, Any]], title: str) -> list[Path]:
    """Write scaling.jsonl, scaling.md and, if matplotlib is there, scaling.png; return the files."""
    make_folder(folder)
    lines, table, picture = (folder / f"scaling.{kind}" for kind in ("jsonl", "md", "png"))
    write_text(lines, "".join(json.dumps(row) + "\n" for row in rows))
    write_text(table, f"{title}\n\n{scaling_table(rows)}\n")
    return [lines, table, *_draw(picture, rows, title)]


def _draw(file: Path, rows: Sequence[dict[str, Any]], title: str) -> list[Path]:
    if not can_draw():
        return []
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 4), layout="constrained")
    axes = figure.subplots()
    ranks = [row["ranks"] for row in rows]
    axes.plot(ranks, [row["speedup"] for row in rows], "o-", label="measured")
    axes.plot(ranks, [count / ranks[0] for count in ranks], "k:", label="as many times faster as ranks")
    axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel="samples per second, relative", title=title)
    axes.set_xticks(ranks, labels=map(str, ranks), minor=False)
    axes.legend()
    write_figure(file, figure)
    return [file]
