"""Reports of predictions: sentences, Markdown tables, JSON lines and a plot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from ...io.files import write_figure
from ...plan.report import format_seconds, format_size
from ...terminal.console import counted
from .. import tables
from ..noise import noise_warnings
from ..tables import markdown_table
from .predict import fastest_rank_count, first_latency_bound_ranks, mean_relative_error

PREDICTION_HEADS = ["ranks", "grid", "step", "compute", "exchange", "sums", "waiting", "MPI", "sent", "summed", "held"]
SCHEMES_HEADS = ["ranks", "step", "best schemes", "step with them"]
TIME_FIELDS = ("seconds_per_step", "compute_seconds", "exchange_seconds", "sum_seconds", "waiting_seconds")


def prediction_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows of `predict`, with bytes per rank, and measured steps if there are any."""
    measured = any(row.get("measured_seconds") for row in rows)
    twice = any(row["recomputed"] for row in rows)
    heads = [*PREDICTION_HEADS, *(["recomputed"] if twice else []), *(["measured", "off by"] if measured else [])]
    cells = [
        [
            *_row_cells(row),
            *([f"{row['recomputed']:.1%}"] if twice else []),
            *(_describe_measured(row) if measured else []),
        ]
        for row in rows
    ]
    return markdown_table(heads, cells)


def schemes_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the best exact schemes of the layers for every rank count, and the time that these schemes save."""
    scheme_rows = [row for row in rows if row["schemes"]]
    return markdown_table(
        SCHEMES_HEADS,
        [
            [
                str(row["ranks"]),
                format_seconds(row["seconds_per_step"]),
                ", ".join(_scheme_texts(row["schemes"])) or "`halo` everywhere",
                format_seconds(row["seconds_with_schemes"]) + _note_if_schemes_slower(row),
            ]
            for row in scheme_rows
        ],
    )


def describe_conclusions(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return sentences on the fastest rank count, on message latency and on the prediction error."""
    ranks = first_latency_bound_ranks(rows)
    sentences = [
        f"of these rank counts, the step is fastest on {counted(fastest_rank_count(rows), 'rank')}",
        "message latency is below compute time on all of these rank counts"
        if ranks is None
        else f"message latency exceeds compute time from {counted(ranks, 'rank')} on",
    ]
    measured = {row["ranks"]: row["measured_seconds"] for row in rows if row.get("measured_seconds")}
    if measured:
        rank_list = ", ".join(map(str, measured))
        sentences.append(
            f"mean error of the prediction: {mean_relative_error(rows, measured):.1%} (measured on {rank_list} ranks)"
        )
    else:
        sentences.append("the prediction error is unknown, because no step was measured on the calibrated machine")
    return sentences + noise_warnings(max(row["noise"] for row in rows))


def write_report(folder: Path, rows: Sequence[dict[str, Any]], title: str) -> list[Path]:
    """Write model.jsonl, model.md and, if matplotlib is installed, model.png; return the files."""
    schemes = [schemes_table(rows)] if any(row["schemes"] for row in rows) else []
    parts = [title, prediction_table(rows), *schemes, *describe_conclusions(rows)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    texts = {"model.jsonl": lines, "model.md": "\n\n".join(parts) + "\n"}
    return tables.write_report(folder, texts, {"model.png": partial(_plot_predicted_step_times, rows, title)})


def _plot_predicted_step_times(rows: Sequence[dict[str, Any]], title: str, file: Path) -> None:
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


def _row_cells(row: dict[str, Any]) -> list[str]:
    return [
        str(row["ranks"]),
        "{replicas} × {rows} × {cols}".format(**row["grid"]),
        *(format_seconds(row[name]) for name in TIME_FIELDS),
        f"{row['mpi_share']:.0%}",
        *(format_size(row[name]) for name in ("bytes_sent", "bytes_summed", "bytes_held")),
    ]


def _note_if_schemes_slower(row: dict[str, Any]) -> str:
    return " (slower: keep the scheme)" if row["seconds_with_schemes"] > 1.02 * row["seconds_per_step"] else ""


def _describe_measured(row: dict[str, Any]) -> list[str]:
    taken = row.get("measured_seconds")
    return [format_seconds(taken), f"{row['seconds_per_step'] / taken - 1:+.0%}"] if taken else ["-", "-"]


def _scheme_texts(choices: Sequence[dict[str, Any]]) -> list[str]:
    """Return the layers whose scheme is not `halo`, with consecutive layers of one scheme merged."""
    texts = []
    for scheme, group in groupby(choices, key=lambda choice: choice["scheme"]):
        members = list(group)
        if scheme != "halo":
            names = members[0]["layer"] + (f" to {members[-1]['layer']}" if len(members) > 1 else "")
            texts.append(f"{names} `{scheme}` (saves {format_seconds(sum(c['saves'] for c in members))})")
    return texts
