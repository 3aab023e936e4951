"""The plot of `bench schemes`: error against bytes."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def plot(rows: Sequence[dict[str, Any]], file: Path) -> bool:
    """Write error (mean and deviation) over bytes sent a step, the front as a line; False without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        return False
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
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
    axes.set_xlabel("halo bytes of a training step, all ranks, kB")
    axes.set_ylabel("valid error, %")
    axes.set_title("Border schemes: exact (round), approximate (square), and the front")
    figure.savefig(file, dpi=120)
    return True
