"""Section of report.html on the workers, tasks and servers of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import DataError
from ..io.output import RECOVERY
from ..services.job_status import NAME, TASKS, JobStatus
from ..system.memory import words
from .callbacks.job_figures import JOB
from .page import format_value, is_number, safe, table
from .state import Record
from .svg_plot import plot

_MOST = 1000
"""Limit of workers and servers in the tables."""


def describe_job(folder: Path, records: Sequence[Record]) -> list[str]:
    """Return the workers, tasks, versions of servers and throughput of each epoch, and the last state of the job.

    Empty if the run has no servers.
    """
    parts, figures_by_epoch = [], [(r["epoch"], r[JOB]) for r in records if isinstance(r.get(JOB), dict)]
    if figures_by_epoch:
        rows = [[format_value(epoch), *_row(figures)] for epoch, figures in figures_by_epoch]
        parts = ["<h2>Workers and servers</h2>"]
        for name, title in (("workers", "workers"), ("samples_per_second", "samples/s of all workers")):
            points = [(at, record[name]) for at, record in figures_by_epoch if is_number(record.get(name))]
            parts += [plot(title, {title: points}, along="epoch")] if len({value for _, value in points}) > 1 else []
        tasks = [f"tasks {state}" for state in TASKS]
        parts.append(table(["epoch", "workers", *tasks, "versions of servers", "samples/s, all workers"], rows))
    return parts + _last_state(folder / RECOVERY)


def _row(figures: dict[str, Any]) -> list[str]:
    tasks, versions = figures.get("tasks"), figures.get("server_versions")
    counts = [format_value(tasks.get(state)) for state in TASKS] if isinstance(tasks, dict) else [""] * len(TASKS)
    shown = ", ".join(map(format_value, versions[:_MOST])) if isinstance(versions, list) else ""
    return [format_value(figures.get("workers")), *counts, shown, format_value(figures.get("samples_per_second"))]


def _last_state(folder: Path) -> list[str]:
    if not (folder / NAME).is_file():
        return []
    try:
        status = JobStatus.read(folder)
    except DataError:  # `neondist top` says why
        return []
    workers = [[safe(name), format_value(steps)] for name, steps in sorted(status.workers.items())[:_MOST]]
    servers = [
        [
            *map(format_value, (at, server.version, server.samples)),
            words(server.bytes),
            *map(format_value, (server.rows, server.refused)),
        ]
        for at, server in enumerate(status.servers[:_MOST])
    ]
    return [
        "<h3>At the end</h3>" if status.ended else "<h3>Now</h3>",
        *([table(["worker", "steps"], workers)] if workers else []),
        table(["server", "version", "samples", "parameters", "rows", "refused"], servers),
    ]
