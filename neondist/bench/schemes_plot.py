"""The plots of `bench schemes`: error against bytes, and against the number of tiles."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..files import write_figure


def plot(rows: Sequence[dict[str, Any]], file: Path) -> bool:
    """Write error (mean and deviation) over bytes sent a step, a panel for each number of tiles, the front as a line.

    Returns False without matplotlib.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return False
    from matplotlib.figure import Figure

    counts = list(dict.fromkeys(row["tiles"] for row in rows))
    figure = Figure(figsize=(3 + 5 * len(counts), 4.5), layout="constrained")
    for axes, tiles in zip(figure.subplots(1, len(counts), sharey=True, squeeze=False)[0], counts, strict=True):
        _front(axes, [row for row in rows if row["tiles"] == tiles])
        axes.set_title(f"{tiles} tiles")
    figure.supxlabel("halo bytes of a training step, all ranks, kB", fontsize=10)
    figure.supylabel("valid error, %", fontsize=10)
    figure.suptitle("Border schemes: exact (round), approximate (square), and the front", fontsize=11)
    write_figure(file, figure, dpi=90)
    return True


def _front(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
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


def plot_tiles(rows: Sequence[dict[str, Any]], file: Path) -> bool:
    """Write error (mean and deviation) over the number of tiles, a line for each scheme; False without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        return False
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for scheme in dict.fromkeys(row["scheme"] for row in rows):
        mine = sorted((row for row in rows if row["scheme"] == scheme), key=lambda row: row["tiles"])
        tiles, errors, spread = ([row[key] for row in mine] for key in ("tiles", "error", "deviation"))
        axes.errorbar(tiles, [100 * e for e in errors], [100 * d for d in spread], marker=".", capsize=3, label=scheme)
    counts = sorted({row["tiles"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_xlabel("tiles")
    axes.set_ylabel("valid error, %")
    axes.legend(fontsize=8)
    write_figure(file, figure, dpi=90)
    return True
