"""Plot of predictions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...io.files import has_matplotlib, write_figure


def plot_predicted_step_times(file: Path, rows: Sequence[dict[str, Any]], title: str) -> list[Path]:
    """Plot seconds against ranks; return a list of the file, which is empty without matplotlib."""
    if not has_matplotlib():
        return []
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    ranks = [row["ranks"] for row in rows]
    axes.plot(ranks, [row["seconds_per_step"] for row in rows], "o-", label="step")
    axes.plot(ranks, [row["seconds_with_schemes"] for row in rows], "--", label="step, best schemes")
    axes.plot(ranks, [row["compute_seconds"] for row in rows], ":", label="computing")
    axes.plot(ranks, [row["latency_seconds"] for row in rows], ":", label="latency of messages")
    measured = [(row["ranks"], row["measured_seconds"]) for row in rows if row.get("measured_seconds")]
    if measured:
        axes.plot(*zip(*measured, strict=True), "kx", label="measured")
    axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel="seconds", title=title)
    axes.set_xticks(ranks, labels=map(str, ranks), minor=False)
    axes.tick_params(axis="x", labelrotation=45)
    axes.legend()
    write_figure(file, figure)
    return [file]
